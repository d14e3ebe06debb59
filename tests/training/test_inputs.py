"""The records that a run is given, and what is said of them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from stepjepa.files import write_jsonl
from stepjepa.training.inputs import read_data


def write(path: Path, *questions: int) -> str:
    write_jsonl(
        path,
        [
            {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
            for n in questions
        ],
    )
    return str(path)


def given(**changes: Any) -> Namespace:
    fields = {"data_file": None, "train_file": None, "eval_file": None, "bad_records": "error", "streaming": False}
    return Namespace(**{**fields, "training": {}, "shuffle_buffer_size": None, **changes})


@pytest.mark.parametrize(("held_out", "said"), [((7, 8), ""), ((2, 7, 3), "note: 2 of 3 held-out records are among")])
def test_held_out_records_that_are_trained_on_are_counted(
    held_out: tuple[int, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"train_file": write(tmp_path / "a.jsonl", 1, 2, 3), "eval_file": write(tmp_path / "b.jsonl", *held_out)}
    train, evaluated, _ = read_data(given(**files))
    assert (len(train), len(evaluated)) == (3, len(held_out))
    told = capsys.readouterr().err
    assert told.startswith(said)
    assert bool(told) == bool(said)


def test_a_file_that_holds_records_twice_is_split_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = write(tmp_path / "a.jsonl", *range(5), *range(5))
    read_data(given(data_file=both, eval_split=0.5, split_seed=3))
    assert "held-out records are among the training records, too" in capsys.readouterr().err
