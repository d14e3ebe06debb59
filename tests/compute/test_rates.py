"""Rates: seconds by hand, kept in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepjepa.compute.rates import Rates
from stepjepa.compute.work import Work
from stepjepa.errors import UserError

RATES = Rates("made up", "float32", 1, products=100, attention=50, moved=20, call=0.5, overlaps=False)
WORK = Work(products=300, attention=100, moved=60, calls=7)


def test_seconds_by_hand() -> None:
    # 3 + 2 + 3 of work, 3.5 to start it.
    assert RATES.seconds(WORK) == pytest.approx(11.5)
    queued = replace(RATES, overlaps=True)
    assert queued.seconds(WORK) == pytest.approx(8)
    assert queued.seconds(Work(calls=20)) == pytest.approx(10), "the work is done before the next one is started"
    assert replace(RATES, factor=2.0).seconds(WORK) == pytest.approx(23)
    # 6 passes over 10 bytes of gradients and weights, states read and written.
    assert RATES.optimizer_seconds(10, 30) == pytest.approx((60 + 60) / 20)
    assert replace(RATES, held=1.5, held_beside=7.0).held_bytes(10) == 22
    assert RATES.held_bytes(10) == 10


def test_kept_in_a_file(tmp_path: Path) -> None:
    RATES.save(tmp_path / "rates.json")
    assert Rates.load(tmp_path / "rates.json") == RATES


@pytest.mark.parametrize("text", ["", "[]", '{"products": 1}', "nonsense"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(UserError, match="--measure"):
        Rates.load(tmp_path / "rates.json")


def test_a_rate_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such rates file"):
        Rates.load(tmp_path / "rates.json")
    with pytest.raises(ValueError, match="moved: expected a positive number, got 0"):
        replace(RATES, moved=0)
