"""Figures that documents name in passing are those that the code and the committed results give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import tiny
from document_blocks import ROOT
from stepjepa.data.records import read_records
from stepjepa.tasks.regex.equivalence import equivalent

NUMBERS = {17: "seventeen", 18: "eighteen", 19: "nineteen"}


def text_of(page: str) -> str:
    """A page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def newest_benchmark() -> dict[str, dict[str, dict[str, float]]]:
    """For every suite of the newest benchmark of training the figures of its arms."""
    found = [path for path in (ROOT / "benchmarks" / "results").glob("*.json") if re.fullmatch(r".*cpu-\d+", path.stem)]
    suites = json.loads(max(found).read_text(encoding="utf-8"))["suites"]
    return {name: suite["summary"] for name, suite in suites.items()}


def test_the_tokens_of_a_forest_are_those_of_the_benchmark() -> None:
    told = re.search(r"at (\d\.\d) to (\d\.\d) times the tokens of plain fine-tuning", text_of("README.md"))
    assert told is not None
    ratios = [
        arm["token_ratio"] for arms in newest_benchmark().values() for name, arm in arms.items() if "forest" in name
    ]
    assert (float(told[1]), float(told[2])) == (round(min(ratios), 1), round(max(ratios), 1))


def test_so_many_architectures_are_tested() -> None:
    assert f"tested to 1e-5 on {NUMBERS[len(tiny.ATTENTION_ONLY)]} architecture and window" in text_of("README.md")


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
