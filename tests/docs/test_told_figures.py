"""Figures that documents name in passing are those that the code and the committed results give."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from document_blocks import ROOT
from stepjepa.data.sources import read_records
from stepjepa.tasks.regex.equivalence import equivalent


def text_of(page: str) -> str:
    """A page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_so_many_published_expressions_are_trivial(shared_data: Path) -> None:
    truths = [record.answer for record in read_records(shared_data / "llm_jepa" / "synth_test.jsonl")]
    nothing = [equivalent(truth, "~(.*)") for truth in truths]
    everything = [equivalent(truth, ".*") or equivalent(truth, ".+") for truth in truths]
    told = re.search(
        r"\((\d+) % of those in `synth_test` describe no line.*?; (\d+) % describe", text_of("docs/tasks.md")
    )
    score = re.search(r"one contradiction would score ([\d.]+) %", text_of("docs/tasks.md"))
    assert told is not None
    assert score is not None
    assert (told[1], told[2]) == (f"{sum(nothing) / 20:.0f}", f"{sum(everything) / 20:.0f}")
    assert score[1] == f"{sum(nothing) / 20:.1f}"


def test_the_table_of_performance_is_that_of_the_committed_results() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], check=False)
    assert done.returncode == 0
