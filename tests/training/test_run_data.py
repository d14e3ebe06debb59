"""The records that a run is given, what is said of them, and what ``run.json`` says of the machine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.config.run import RunConfig
from stepjepa.data.splitting import draw_held_out
from stepjepa.running.data import read_data
from stepjepa.store.environment import machine


def write(path: Path, *questions: int) -> str:
    chats = [
        [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in questions
    ]
    write_jsonl(path, [{"messages": chat} for chat in chats])
    return str(path)


@pytest.mark.parametrize(("held_out", "said"), [((7, 8), ""), ((2, 7, 3), "note: 2 of 3 held-out records are also")])
def test_held_out_records_that_are_trained_on_are_counted(
    held_out: tuple[int, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"train_file": write(tmp_path / "a.jsonl", 1, 2, 3), "eval_file": write(tmp_path / "b.jsonl", *held_out)}
    train, evaluated, _ = read_data(RunConfig(**files))
    assert (len(train), len(evaluated)) == (3, len(held_out))
    message = capsys.readouterr().err
    assert message.startswith(said) and bool(message) == bool(said)


def test_a_file_is_split_by_its_seed_and_never_into_an_empty_part(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *range(11))
    train, held_out, identity = read_data(RunConfig(data_file=file, eval_split=0.27, split_seed=3))
    lines = [sorted(record.line for record in part) for part in (train, held_out)]
    assert (len(held_out), sorted(lines[0] + lines[1])) == (3, list(range(1, 12)))
    assert (identity["data"].records, identity["data"].split_seed) == (11, 3)
    # Of different questions both rules hold out the same.
    assert identity["data"].split_by is None
    by_record = RunConfig(data_file=file, eval_split=0.27, split_seed=3, split_by="record")
    assert read_data(by_record)[1:] == (held_out, identity)
    assert read_data(RunConfig(data_file=file, eval_split=0.27, split_seed=4))[1] != held_out
    with pytest.raises(UserError, match=r"a.jsonl: 11 records can't be split with `eval_split 0.01`"):
        read_data(RunConfig(data_file=file, eval_split=0.01, split_seed=3))


def test_no_question_is_on_both_sides_of_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [n % 7 for n in range(23)]
    rows = [
        [{"role": "user", "content": f"{'  ' * (n % 2)}Add {n % 7}"}, {"role": "assistant", "content": f"answer {n}"}]
        for n in range(23)
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": chat} for chat in rows])
    for seed in range(5):
        split = RunConfig(data_file=str(tmp_path / "a.jsonl"), eval_split=0.3, split_seed=seed)
        train, held_out, _ = read_data(split)
        questions = [{asked[record.line - 1] for record in part} for part in (train, held_out)]
        assert not questions[0] & questions[1] and len(train) + len(held_out) == 23
        assert len(held_out) in (6, 7)  # of 7 at most, of questions with 3 or 4 records each
    assert not capsys.readouterr().err
    # The record says so where a split of earlier versions holds out others; that one is at hand, too.
    assert read_data(split)[2]["data"].split_by == "question"
    by_record, held_out, files = read_data(replace(split, split_by="record"))
    assert files["data"].split_by is None and len(held_out) == 7
    order = random.Random(split.split_seed).sample(range(23), 23)
    assert [record.line - 1 for record in held_out] == sorted(order[:7])
    assert [record.line - 1 for record in by_record] == sorted(order[7:])
    capsys.readouterr()
    # No question has so few records: they are split one by one, which is said.
    assert len(read_data(replace(split, eval_split=0.1))[1]) == 2
    message = (
        "note: 2 of 2 held-out records have a question that is also trained on, "
        "since every question is that of 3 records or more"
    )
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("count", [1, 7, 501])
def test_records_of_different_questions_are_split_as_a_shuffled_list_is(count: int) -> None:
    order = random.Random(3).sample(range(count), count)
    for size in (0, 1, count // 3):
        drawn = draw_held_out([2**63 + 7 * n for n in range(count)], size, 3)
        assert drawn.nonzero()[0].tolist() == sorted(order[:size])


def test_an_accelerator_that_is_not_there_or_not_used_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_for(check_available: bool = False) -> Any:
        # A torch for GPUs on a machine without one.
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", made_for)
    assert machine()["device"] == "cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert machine(use_cpu=True)["device"] == "cpu"
    # That backend has no names for its devices.
    assert machine()["device"] == "mps"
