"""Training gives the figures it gave before: see ``record.py``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import record

COMPARED = 5
RELATIVE = 2e-5
ABSOLUTE = 1e-6
"""For what is a difference of numbers near 1, the cosine distance of embeddings that point the same way."""


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """The file of figures."""
    document: dict[str, Any] = json.loads(record.GOLDEN.read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and records of the cases are made, once."""
    return tmp_path_factory.mktemp("golden")


def is_same(name: str, key: str, figure: float, expected: float) -> bool:
    """Whether a figure of a case is the recorded one."""
    cosine = key == "jepa_loss" and "--jepa_loss_type" not in record.CASES[name]
    return math.isclose(figure, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE if cosine else 0.0)


@pytest.mark.parametrize("name", record.CASES)
def test_a_run_has_the_figures_it_had(name: str, golden: dict[str, Any], golden_folder: Path) -> None:
    """The loss, its parts and the gradient norm of the first steps, one by one."""
    mended = name in record.KNOWN_DIFFERENCES
    known = golden["mended" if mended else "cases"]
    assert name in known, f"record it: python tests/golden/record.py {'--mended ' if mended else ''}{name}"
    expected = known[name][:COMPARED]
    figures = record.run_case(name, golden_folder, record.STEPS if name in record.WHOLE else COMPARED)[:COMPARED]
    assert [sorted(step) for step in figures] == [sorted(step) for step in expected]
    differences = [
        f"step {number} {key}: {step[key]:.9g}, recorded {right[key]:.9g}"
        for number, (step, right) in enumerate(zip(figures, expected, strict=True), start=1)
        for key in right
        if not is_same(name, key, step[key], right[key])
    ]
    assert not differences, "\n".join(differences)


def test_the_file_has_every_case_and_no_other(golden: dict[str, Any]) -> None:
    """A case that is left out, renamed or not recorded is noticed."""
    assert sorted(golden["cases"]) == sorted(record.CASES)
    assert sorted(golden["mended"]) == sorted(record.KNOWN_DIFFERENCES)
    assert set(record.KNOWN_DIFFERENCES) <= set(record.CASES)
    for steps in golden["cases"].values():
        assert len(steps) == record.STEPS
