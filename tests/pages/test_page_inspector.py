"""The record inspector's data against the inspection it comes from, and what it says where it can show nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from made_up_logs import STEP_JEPA
from made_up_runs import change, make_run
from stepjepa.config import JepaConfig
from stepjepa.data.sources import read_records
from stepjepa.files import fingerprint, write_jsonl
from stepjepa.inspection.record import inspect_records, visible_matrix, visible_text
from stepjepa.pages import inspector
from stepjepa.pages.inspector import inspector_section
from stepjepa.pages.runs import Run, read_runs


def write_records(path: Path, *answers: str) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"What is {place}?"}, {"role": "assistant", "content": answer}]}
        for place, answer in enumerate(answers)
    ]
    write_jsonl(path, lines)
    return path


def trained(folder: Path, file: Path, tokenizer: Any, jepa: dict[str, Any] | None = STEP_JEPA, **parts: Any) -> Run:
    """A made-up run on a file, with the tokenizer that training would leave."""
    data = {"train": {"file": file.name, "records": 3, "sha256": fingerprint(file)}}
    arguments = ["--train_file", file.name, "--lbd", "0.5"]
    make_run(folder, "10", jepa=jepa, **{"data": data, "arguments": arguments, "directory": str(file.parent), **parts})
    tokenizer.save_pretrained(folder)
    return read_runs([folder])[0]


def embedded(run: Run) -> dict[str, Any]:
    section = inspector_section(run)
    assert section is not None
    data = re.search(r'id="inspector-data">(.*?)</script>', section.html, re.DOTALL)
    assert data is not None, section.html
    value: dict[str, Any] = json.loads(data[1])
    return value


@pytest.fixture
def run(tmp_path, plain_tokenizer):
    file = write_records(tmp_path / "train.jsonl", "3+4=7\n\n7+5=12\n\n12", "Red\n\nBlue", "One")
    return trained(tmp_path / "run", file, plain_tokenizer)


@pytest.mark.parametrize("place", [0, 2])
def test_tokens_and_who_sees_whom_are_those_of_the_inspection(run, tmp_path, trained_tokenizer, place):
    record = read_records(tmp_path / "train.jsonl")[place]
    value = embedded(run)
    assert value["own"] == 2 and value["choices"] == [1, 2, 3]
    for count in (1, 2, 3):
        found = inspect_records([record], 0, trained_tokenizer, JepaConfig(**{**STEP_JEPA, "predictors": count}))
        tree = value["records"][place]["trees"][str(count)]
        assert [token[0] for token in tree["tokens"]] == [visible_text(token.text) for token in found.tokens]
        assert [token[1:4] for token in tree["tokens"]] == [[t.id, t.branch, t.position] for t in found.tokens]
        assert [token[5] for token in tree["tokens"]] == [", ".join(token.readouts) for token in found.tokens]
        seen = visible_matrix(found)
        for query, looking in enumerate(tree["tokens"]):
            keys = {key for key, token in enumerate(tree["tokens"]) if looking[6] <= key <= query < token[7]}
            assert keys == set(seen[query].nonzero()[0].tolist())
        assert [branch["end"] for branch in tree["branches"]] == [branch.end for branch in found.branches]
        assert [branch["kind"] for branch in tree["branches"]] == [branch.kind for branch in found.branches]


def test_only_the_first_records_are_shown_and_long_ones_left_out(tmp_path, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(inspector, "LONGEST", 61)
    file = write_records(tmp_path / "train.jsonl", "x\n\ny", "x " * 101, *["x\n\ny"] * 11)
    run = trained(tmp_path / "run", file, plain_tokenizer)
    assert [record["index"] for record in embedded(run)["records"]] == [0, 2, 3, 4, 5, 6, 7]
    assert "Record 1 has more than 61 tokens" in inspector_section(run).html.replace("&#39;", "'")


def test_a_file_that_has_changed_is_not_shown(run, tmp_path):
    write_records(tmp_path / "train.jsonl", "another")
    section = inspector_section(run)
    assert "has changed since it was trained on" in section.html
    assert section.script is None and "application/json" not in section.html


def test_a_file_that_is_gone_is_named_with_the_remedy(run, tmp_path):
    (tmp_path / "train.jsonl").unlink()
    html = inspector_section(run).html
    assert "the training file train.jsonl is not there" in html and "in the folder that the run was started in" in html


def test_runs_of_earlier_versions_have_only_the_command(run, tmp_path, monkeypatch):
    file = run.folder / "run.json"
    change(file, "command", to=["train", "--train_file=train.jsonl", "--output_dir", "run"])
    for name in ("arguments", "directory"):
        change(file, name, to=None)
    monkeypatch.chdir(tmp_path)
    assert len(embedded(read_runs([run.folder])[0])["records"]) == 3


def test_without_a_tokenizer_or_an_objective_it_says_so(run):
    change(run.folder / "run.json", "jepa", "mode", to="no such mode")
    assert "the objective in run.json can" in inspector_section(read_runs([run.folder])[0]).html
    change(run.folder / "run.json", "jepa", "mode", to="step-jepa")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run.folder / name).unlink()
    assert "No record of run can be shown" in inspector_section(read_runs([run.folder])[0]).html
