"""What once was silently wrong, or a traceback, is refused or right: see ``soak/defects.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from defects import CASES, Ground

# These start processes, or train often; make soak runs them.
SLOW = ("A1", "B12")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A model, records and a run."""
    return Ground(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{item} {tried}", marks=[pytest.mark.slow] if item in SLOW else [])
        for number, (item, tried, _) in enumerate(CASES)
    ],
)
def test_it_is_refused_or_right(number: int, ground: Ground) -> None:
    assert [said for ok, said in CASES[number][2](ground) if not ok] == []


def test_a_wrong_outcome_would_be_seen(ground: Ground) -> None:
    from defects import refused, right

    assert not refused((0, "done"))[0] and not refused((2, "Traceback"))[0] and not refused((2, "no"), "yes")[0]
    assert not right((2, "words"), "words")[0] and not right((0, "words"), "others")[0]
    assert Path(ground.run / "run.json").is_file()
