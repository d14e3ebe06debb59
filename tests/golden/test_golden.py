"""Training gives the figures it gave before: see ``record.py``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import record

RELATIVE = 2e-5
ABSOLUTE = 1e-6
"""For what is a difference of numbers near 1, the cosine distance of embeddings that point the same way."""

FIGURES = json.loads(record.GOLDEN.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and records of the cases are made, once."""
    return tmp_path_factory.mktemp("golden")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted({*record.CASES, *FIGURES}))
def test_a_run_has_the_figures_it_had(name: str, golden_folder: Path) -> None:
    """The loss, its parts and the gradient norm of the first steps, one by one."""
    expected, figures = FIGURES[name], record.run_case(name, golden_folder)
    assert len(figures) == record.STEPS
    assert [sorted(step) for step in figures] == [sorted(step) for step in expected]
    cosine = "--jepa_loss_type" not in record.CASES[name]
    near_zero = {"jepa_loss": ABSOLUTE} if cosine else {}
    differences = [
        f"step {number} {key}: {step[key]:.9g}, recorded {right[key]:.9g}"
        for number, (step, right) in enumerate(zip(figures, expected, strict=True), start=1)
        for key in right
        if not math.isclose(step[key], right[key], rel_tol=RELATIVE, abs_tol=near_zero.get(key, 0.0))
    ]
    assert not differences, "\n".join(differences)
