"""Run folders that version 0.1.0 has written can still be shown and compared.

``first_edition/`` holds four runs of ``preset:tiny``: 64 problems of ``prepare stepmath``, 40 steps each, no weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepjepa.cli.main import main

RUNS = sorted(path.parent for path in (Path(__file__).parent / "first_edition").glob("*/run.json"))


def test_they_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(RUNS) == 4
    assert main(["compare", *map(str, RUNS), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {arm["name"]: arm["seeds"] for arm in table["arms"]} == {"regular": ["23", "82"], "step-jepa": ["23", "82"]}


def test_they_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *map(str, RUNS), "--output_file", str(page)]) == 0, capsys.readouterr().err
    assert main(["report", *map(str, RUNS)]) == 0
    output = capsys.readouterr().out
    for run in RUNS:
        assert run.name in output
        assert run.name in page.read_text(encoding="utf-8")
