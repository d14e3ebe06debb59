"""docs/first-hour.md from its first command to its last, in order, on small files of the three kinds it names."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from in_process import InProcess
from stepjepa.cli import main
from stepjepa.data.sources import read_records
from stepjepa.experiments import sweep as sweep_module
from stepjepa.models.loading import load_model

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "first-hour.md").read_text(encoding="utf-8")

NUMBERS = [(3, 4, 2), (5, 7, 3), (2, 9, 4), (6, 3, 5), (7, 2, 1), (4, 8, 6), (9, 5, 7)]


def commands() -> list[str]:
    """What stands in blocks of commands, continued lines joined."""
    blocks = re.findall(r"^(?: {4}.*\n)+", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)
    text = "".join(blocks).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines()]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def rows() -> list[dict[str, str]]:
    return [
        {
            "question": f"A shop has {boxes} boxes of {pens} pens and sells {sold}. How many are left?",
            "solution": f"{boxes} * {pens} = {boxes * pens} pens.\n\nAfter the sale {boxes * pens} - {sold} = "
            f"{boxes * pens - sold} are left. The answer is \\boxed{{{boxes * pens - sold}}}.",
        }
        for boxes, pens, sold in NUMBERS
    ]


def make_files(folder: Path) -> None:
    """What the page takes for granted: train.csv, test.parquet, pairs.parquet, chats.json and model in mine/."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    folder.mkdir()
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, ["question", "solution"])
        table.writeheader()
        table.writerows(rows()[:5])
    parquet.write_table(arrow.Table.from_pylist(rows()[5:]), folder / "test.parquet")
    pairs = [{"sentence": f"names of {number} cars", "sql": f"SELECT name LIMIT {number}"} for number in range(3)]
    parquet.write_table(arrow.Table.from_pylist(pairs), folder / "pairs.parquet")
    turns = [[{"from": "human", "value": row["question"]}, {"from": "gpt", "value": row["solution"]}] for row in rows()]
    (folder / "chats.json").write_text(json.dumps([{"conversations": each} for each in turns[:2]]), encoding="utf-8")
    model, tokenizer = load_model("preset:tiny", texts=[text for row in rows() for text in row.values()])
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_files(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mine"


@pytest.mark.slow
def test_every_command_in_its_order(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_module, "Child", InProcess)
    lines = commands()
    # The first are done before a test can run.
    assert lines[:3] == [
        "git clone REPOSITORY stepjepa && cd stepjepa",
        "make setup",
        ". .venv/bin/activate",
    ]
    kinds = []
    for line in lines[3:]:
        program, *words = shlex.split(line)
        if program == "cat":
            subprocess.run(line, shell=True, check=True)
            continue
        assert program == "stepjepa", line
        assert main(words) == 0, (line, capsys.readouterr().err)
        kinds.append(words[0])
    assert kinds == [*["prepare"] * 4, "inspect", "verify", "evaluate", "sweep", "compare", "report"]
    said = capsys.readouterr().out
    assert "all checks passed" in said
    assert said.count("PASS") == 8
    assert "2 arms, 6 runs, baseline regular; evaluation test: task boxed" in said
    assert (home / "first.html").stat().st_size > 0
    folders = {str(path.parent.relative_to(home)) for path in home.rglob("test.summary.json")}
    assert folders == {f"first/{arm}/seed{seed}" for arm in ("regular", "step-jepa") for seed in (1, 2, 3)}
    # What the page says of more seeds and of other weights.
    (sweep,) = (shlex.split(line)[1:] for line in lines if line.startswith("stepjepa sweep"))
    assert main([*sweep[:-3], "1", "2", "3", "4", "5", "--dry_run"]) == 0
    assert "10 trials (2 combinations, 5 seeds): 6 finished, 4 new" in capsys.readouterr().out
    weight = sweep.index("--lbd") + 1
    assert main([*sweep[:weight], "0.02", "0.5", *sweep[weight + 1 :], "--dry_run"]) == 0
    assert "9 trials (3 combinations, 3 seeds): 3 finished, 6 new" in capsys.readouterr().out
    assert main([*sweep, "--same_flop", "--dry_run"]) == 0
    assert "6 trials (2 combinations, 3 seeds): 3 finished, 3 new" in capsys.readouterr().out
    both = read_records(home / "both.jsonl")
    assert len(both) == 7
    assert {record.messages[0]["content"] for record in both} == {"Solve the problem step by step."}
    records = read_records(home / "train.jsonl")
    assert [record.messages[0]["content"] for record in records] == ["Solve the problem step by step."] * 5
    pair = read_records(home / "pairs.jsonl")[2]
    assert [message["content"] for message in pair.messages] == ["names of 2 cars", "SELECT name LIMIT 2"]
