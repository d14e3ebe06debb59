"""Runs that fail or were begun before: one line, and a record that says so or is as it was before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.files import write_json
from stepjepa.cli.main import main
from stepjepa.store.folder import METRICS_FILE, RUN_FILE
from stepjepa.store.record import read_run
from stepjepa.training import trainer

FOO = ("--lr_scheduler_kwargs", '{"foo": 1}')


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A model, data, and a finished run of two steps with a checkpoint at the second; not to be changed."""
    folder = tmp_path_factory.mktemp("failures")
    tiny.write_material(folder, trained_tokenizer)
    assert train(folder, folder / "run") == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def train(material: Path, run: Path, *more: object) -> int:
    names = ["--train_file", material / "data.jsonl", "--model_name", material / "base", "--output_dir", run]
    flags = ["--max_steps", "2", "--save_steps", "2", "--batch_size", "2", "--grad_accum", "1", "--use_cpu"]
    return main([str(each) for each in ("train", *names, *flags, "--report_to", "none", "--regular", *more)])


def fail_in_pass(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let one pass of the model fail."""
    forward, passes = trainer.jepa_loss, 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == number:
            raise error
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer, "jepa_loss", fail)


def test_before_the_first_step_nothing_stays(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train(made, tmp_path / "new", *FOO) == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message.startswith("stepjepa train: error: TypeError: ")
    assert "unexpected keyword argument 'foo'" in message
    assert not (tmp_path / "new").exists()


def test_after_some_steps_the_record_says_so(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in_pass(monkeypatch, 3, KeyError("step"))
    capsys.readouterr()
    folder = tmp_path / "new"
    assert train(made, folder, "--max_steps", "4") == 2
    (message,) = capsys.readouterr().err.strip().splitlines()
    assert message == (
        "stepjepa train: error: the run failed after step 2 (KeyError: 'step'); checkpoint-2 is complete: resume with "
        "--resume_from_checkpoint last; --debug 2 shows where it was"
    )
    assert read_run(folder)["status"] == "failed"
    monkeypatch.undo()
    assert train(made, folder, "--max_steps", "4", "--resume_from_checkpoint", "last") == 0
    assert read_run(folder)["results"]["steps"] == 4


def test_a_full_disk_before_the_first_checkpoint_lets_the_same_command_begin_again(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in_pass(monkeypatch, 2, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint-2"))
    folder = tmp_path / "new"
    capsys.readouterr()
    assert train(made, folder) == 2
    assert capsys.readouterr().err == (
        "stepjepa train: error: checkpoint-2: No space left on device; no checkpoint was saved before; once it can be "
        "written to, begin again with --resume_from_checkpoint auto\n"
    )
    monkeypatch.undo()
    assert train(made, folder, "--resume_from_checkpoint", "auto") == 0
    assert read_run(folder)["status"] == "finished"


@pytest.mark.parametrize("error", [None, OSError(5, "Input/output error")], ids=repr)
def test_a_resume_without_a_step_leaves_the_results(
    error: Exception | None,
    made: Path,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (run / RUN_FILE).read_bytes()
    if error is not None:
        # Training has begun by then.
        fail_in_pass(monkeypatch, 1, error)
    capsys.readouterr()
    flags = FOO if error is None else ()
    assert train(made, run, "--max_steps", "4", "--resume_from_checkpoint", "last", *flags) == 2
    assert capsys.readouterr().err.startswith("stepjepa train: error: ")
    assert (run / RUN_FILE).read_bytes() == before
    assert "results" in json.loads(before)


# -- begun before ------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_without_checkpoints_is_not_begun_again(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoint-2")
    before = contents(run)
    assert train(made, run, "--resume_from_checkpoint", "auto") == 0
    assert "the run is finished" in capsys.readouterr().err
    assert contents(run) == before
    assert train(made, run, "--resume_from_checkpoint", "auto", "--max_length", "77") == 2
    assert "begun with other settings (--max_length: 512 -> 77" in capsys.readouterr().err
    assert contents(run) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(made: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoint-2")
    write_json(run / RUN_FILE, {**read_run(run), "status": "running", "launches": [{"seconds": 9.0, "to_step": 1}]})
    assert train(made, run, "--resume_from_checkpoint", "auto") == 0
    assert read_run(run)["status"] == "finished"
    assert len(read_run(run)["launches"]) == 1
    steps = [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()]
    assert steps == sorted(set(steps))
