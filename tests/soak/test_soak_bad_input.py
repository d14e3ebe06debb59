"""A thousand damaged files and more, each a clear error, a counted skip, or sound after all; never a traceback."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import make_run, try_config, try_data, try_run
from bad_runs import try_comparison, try_sweep
from bad_tables import try_table
from soak_figures import SEED, note

pytestmark = pytest.mark.slow


def tell(found: Counter[str], what: str) -> None:
    """Note how many were tried, and what came of them."""
    note("bad_input", {what: {"tried": sum(found.values()), **dict(sorted(found.items()))}})


def test_a_thousand_damaged_data_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Counter(try_data(capsys, tmp_path, number, SEED) for number in range(1000))
    found.update(try_data(capsys, tmp_path, number, SEED, large=True) for number in range(12))
    tell(found, "damaged data files")
    assert found["error"] > 500
    assert found["skipped"] > 100


def test_damaged_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Counter(try_config(capsys, tmp_path, number, SEED) for number in range(300))
    tell(found, "damaged configurations")
    assert found["error"] > 150


def test_damaged_run_folders(trained_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "model", trained_tokenizer)
    found = Counter(try_run(capsys, tmp_path, run, number, SEED) for number in range(150))
    tell(found, "damaged run folders")
    assert found["error"] > 50


def test_damaged_evaluated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Counter(try_comparison(capsys, tmp_path, number, SEED) for number in range(1500))
    found.update(f"sweep: {try_sweep(capsys, tmp_path, number, SEED)}" for number in range(200))
    tell(found, "damaged evaluated runs and sweeps")
    assert found["error"] > 700
    assert found["sweep: error"] > 50


def test_damaged_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    found = Counter(try_table(capsys, tmp_path, number, SEED) for number in range(2000))
    tell(found, "damaged tables")
    assert found["error"] > 600
    assert found["skipped"] > 40
