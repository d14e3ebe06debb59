"""Several processes: one dies and the run is resumed exactly; all must be given the same; all draw alike."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import kills
import tiny
from ranks import together
from stepjepa.base.files import write_jsonl
from stepjepa.store.folder import checkpoints

STEPS = 6


def errors_of(output: list[str]) -> list[str]:
    """The last words of all processes."""
    return [line for each in output for line in each.splitlines() if line.startswith("stepjepa train: ")]


@pytest.mark.slow
def test_one_process_dies_and_the_run_is_resumed_exactly(material: Path, tmp_path: Path) -> None:
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    train = ["train", *kills.train_flags(material, STEPS), "--resume_from_checkpoint", "auto", "--output_dir"]
    assert together([*train, whole], log)[0] == [0, 0]
    ended, output = together([*train, run], log, fault=(1, "kill", 6))
    assert ended == [2, -9], output
    assert "checkpoint-2 is complete: resume with --resume_from_checkpoint last" in output[0]
    assert "(another process of the run has ended; what it printed says why, unless it was killed); " in output[0]
    assert "Traceback" not in output[0]
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2"]
    assert not kills.half_files(run)
    assert together([*train, run], log)[0] == [0, 0]
    assert not kills.left_behind(run)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_process_that_was_given_another_file_is_refused_by_all(material: Path, tmp_path: Path) -> None:
    run, flags = tmp_path / "run", kills.train_flags(material, STEPS)
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "train.jsonl", [{"messages": list(each.messages)} for each in tiny.records()])
    given = [["--train_file", folder / "train.jsonl"] for folder in (material, tmp_path / "other")]
    position = flags.index("--train_file")
    common = ["train", *flags[:position], *flags[position + 2 :], "--output_dir", run]
    ended, output = together(common, tmp_path / "log", of_each=given)
    assert ended == [2, 2], output
    assert errors_of(output) == [
        "stepjepa train: error: the processes were started with different data; start all with the same command and "
        "files"
    ]
    assert not (run / "run.json").exists()


@pytest.mark.slow
def test_a_line_that_one_process_can_not_read_is_told_once(material: Path, tmp_path: Path) -> None:
    """And not beside an error of the connection that it ends."""
    run, bad = tmp_path / "run", tmp_path / "train.jsonl"
    bad.write_text('{"messages": [oops\n')
    train = ["train", *kills.train_flags(material, STEPS), "--output_dir", run]
    for of_each in ([[], ["--train_file", bad]], [["--train_file", bad]] * 2):
        ended, output = together(train, tmp_path / "log", of_each=of_each)
        assert ended == [2, 2], output
        (error,) = errors_of(output)
        assert error.startswith(f"stepjepa train: error: {bad}:1: not valid JSON")
        assert not run.exists() or not [*run.iterdir()]


@pytest.mark.slow
def test_a_signal_to_one_process_before_training_leaves_none_waiting(material: Path, tmp_path: Path) -> None:
    train = ["train", *kills.train_flags(material, STEPS), "--output_dir", tmp_path / "run"]
    ended, output = together(train, tmp_path / "log", fault=(1, "stops", 0))
    assert ended == [2, 128 + signal.SIGTERM], output
    assert errors_of(output) == ["stepjepa train: interrupted"]


@pytest.mark.slow
def test_three_processes_of_which_two_have_no_record_at_last(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Nor does it matter what else one of them has drawn: all draw alike what they must."""
    # Without dropout, of which each process draws its own.
    tiny.make_model("llama", seed=3).save_pretrained(tmp_path / "model")
    trained_tokenizer.save_pretrained(tmp_path / "model")
    # The first has pairs, so of three processes two have none.
    records = [{"messages": list(record.messages)} for record in (tiny.records() * 3)[:7]]
    write_jsonl(tmp_path / "train.jsonl", records)
    flags = "--num_epochs 2 --grad_accum 1 --learning_rate 0.01 --optim sgd --jepa_ratio 0.5 --use_cpu --step_jepa"
    flags += " --no_cache --jepa_loss_type infonce --stp 0.3 --save_strategy no --logging_steps 1"
    common = ["train", "--model_name", tmp_path / "model", "--train_file", tmp_path / "train.jsonl", *flags.split()]
    runs = tmp_path / "one", tmp_path / "three"
    for count, run in zip((1, 3), runs, strict=True):
        given = [*common, "--batch_size", 3 // count, "--output_dir", run]
        ended, output = together(given, tmp_path / "log", of_each=[[]] * count, fault=(1, "draws", 2))
        assert ended == [0] * count, output
    one, three = (load_file(run / "model.safetensors") for run in runs)
    assert all((one[name] - three[name]).abs().max() <= 1e-5 for name in one)
    lines = [
        [
            {key: value for key, value in line.items() if key.endswith("loss") and key != "train_loss"}
            for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        ]
        for run in runs
    ]
    assert len(lines[0]) == len(lines[1]) > 5
    for line, same in zip(*lines, strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-5)
