"""``stepjepa train --streaming``: a run over more than an epoch, resumed; flags that it can't honour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from stepjepa.cli import main
from stepjepa.files import write_jsonl
from stepjepa.run_folder import read_run

RECORDS = 19


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [{"messages": list(record.messages)} for record in (tiny.records() * RECORDS)[:RECORDS]])
    return path


def train(data: Path, folder: Path, flags: str) -> int:
    fixed = "--model_name preset:tiny --batch_size 2 --grad_accum 2 --step_jepa --use_cpu --logging_steps 3"
    return main(["train", "--train_file", str(data), "--output_dir", str(folder), *fixed.split(), *flags.split()])


def test_a_run_on_a_stream_is_resumed_with_what_it_had_not_seen(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--streaming --max_steps 8 --shuffle_buffer_size 7 --save_steps 6 --stp --jepa_ratio 0.6 --eval_file "
    flags += str(data)
    assert train(data, tmp_path / "whole", flags) == 0
    out = capsys.readouterr().out
    assert "data: streamed, shuffled in a buffer of 7 records; the tokenizer was trained on the first 19 records" in out
    assert "data, epoch 1 is over: 19 records, 13 pairs, 6 without a pair" in out
    run = read_run(tmp_path / "whole")
    assert run["status"] == "finished"
    # Five steps an epoch, the last of three records.
    assert run["counts"]["records"] == RECORDS + 12
    assert run["tokens"]["ratio"] > 1.1
    assert run["template"]
    assert run["system_prompts"] == ["Add."]
    assert run["order"]["streaming"] is True
    assert run["order"]["shuffle_buffer_size"] == 7
    assert run["data"]["train"].keys() == {"file", "bytes", "sha256_of_first_mib"}
    assert run["data"]["eval"]["records"] == RECORDS
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_lm_loss" in line] == [5, 8]
    assert [line["data_epoch"] for line in lines if "loss" in line] == [0.0, 1.0]

    checkpoint = tmp_path / "whole" / "checkpoint-6"
    assert train(data, tmp_path / "again", f"{flags} --resume_from_checkpoint {checkpoint}") == 0
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert read_run(tmp_path / "again")["counts"] == run["counts"]
    changed = f"{flags} --shuffle_buffer_size 8 --resume_from_checkpoint {checkpoint}"
    assert train(data, tmp_path / "whole", changed) == 2
    assert "begun with other settings (order, shuffle_buffer_size)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--streaming", "pass --max_steps N; a file that fits into memory needs no --streaming"),
        ("--shuffle_buffer_size 3", "--shuffle_buffer_size does nothing without --streaming"),
        ("--streaming --max_steps 3 --num_epochs 2", "--num_epochs does nothing with --streaming"),
        ("--streaming --max_steps 3 --shuffle_buffer_size -3", "--shuffle_buffer_size: expected 0 or more, got -3"),
        ("--streaming --max_steps 3 --no_cache", "--no_cache does nothing with --streaming"),
        ("--streaming --max_steps 3 --track_flop", "--track_flop needs the lengths of all records"),
        ("--streaming --max_steps 3 --same_flop", "leave one out"),
        ("--streaming --max_steps 3 --train_sampling_strategy group_by_length", "needs the lengths of all records"),
        (
            "--streaming --max_steps 3 --train_sampling_strategy sequential --shuffle_buffer_size 3",
            "sequential keeps the order that shuffle_buffer_size 3 changes",
        ),
    ],
)
def test_what_a_stream_can_not_do_is_refused(
    flags: str, words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(data, tmp_path / "run", flags) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert words in told[-1]
    assert not (tmp_path / "run").exists()


def test_a_file_to_be_split_is_no_stream(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data_file", str(data), "--output_dir", str(tmp_path / "run"), "--model_name", "preset:tiny"]
    assert main(["train", *given, "--streaming", "--max_steps", "3"]) == 2
    assert "--streaming reads one file" in capsys.readouterr().err


def test_sequential_is_the_order_of_the_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(data, tmp_path / "run", "--streaming --max_steps 1 --train_sampling_strategy sequential") == 0
    assert "data: streamed, in the order of the file" in capsys.readouterr().out
    assert read_run(tmp_path / "run")["order"]["shuffle_buffer_size"] == 0


def test_a_record_that_is_too_long_ends_the_run_in_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no end " * 999}]
    with data.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"messages": long}) + "\n")
    flags = "--streaming --max_steps 9 --shuffle_buffer_size 0"
    assert train(data, tmp_path / "late", flags) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert f"{data}:20: the record has" in told
    assert read_run(tmp_path / "late")["status"] == "failed"
    write_jsonl(data, [{"messages": long}])
    assert train(data, tmp_path / "early", flags) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert f"{data}:1: the record has" in told
    # Nothing was trained, so nothing stays.
    assert not (tmp_path / "early").exists()
