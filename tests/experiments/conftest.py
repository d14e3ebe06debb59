"""Runs that several modules compare."""

import pytest

from made_up_runs import make_run

LLM = {"mode": "llm-jepa", "lbd": 0.5}
# Of eight examples, right by the headline, for each seed.
REGULAR = {23: "11000000", 37: "11100000", 82: "10000000"}
JEPA = {23: "11110000", 37: "11100100", 82: "11110000"}


@pytest.fixture
def runs(tmp_path):
    """Three seeds of two arms, the method's in another order."""
    made = [make_run(tmp_path / f"regular-{seed}", right, seed=seed) for seed, right in REGULAR.items()]
    for seed in (82, 23, 37):
        made.append(make_run(tmp_path / f"jepa-{seed}", JEPA[seed], seed=seed, jepa=LLM, tokens=1500.0))
    return made
