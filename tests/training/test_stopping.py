"""Asked to stop, a command saves what it has and says how to go on; a full disk costs nothing that was there."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import kills
from forked import Commands
from stepjepa import RunConfig, UserError, run
from stepjepa.base.signals import Stopped
from stepjepa.cli.main import main
from stepjepa.store.folder import checkpoint_fault
from stepjepa.training.stop import StopCallback

STEPS = 6


@pytest.fixture(scope="module")
def whole(commands: Commands, material: Path) -> Path:
    """The run folder of a training that nobody disturbed."""
    run = material / "whole"
    log = material / "whole.log"
    assert commands.run(train(material, run), log, folder=run) == 0, log.read_text()
    return run


def train(material: Path, run: Path, *more: object) -> list[object]:
    return ["train", *kills.train_flags(material, STEPS), "--output_dir", run, *more]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_is_saved_at_the_end_of_its_step(
    number: signal.Signals, commands: Commands, material: Path, whole: Path, tmp_path: Path
) -> None:
    log = tmp_path / "run.log"
    run = tmp_path / "run"
    assert commands.run(train(material, run), log, folder=run, when=run / "checkpoint-2", number=number) == 128 + number
    output = log.read_text()
    assert (
        f"{number.name}: saving a checkpoint at the end of this step, then stopping; once more to stop at on" in output
    )
    (step,) = re.findall(r"stopped; \S+/checkpoint-(\d+) is saved; resume with --resume_from_checkpoint last", output)
    assert step == "3"
    assert checkpoint_fault(run / "checkpoint-3") is None
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert not (run / "model.safetensors").exists()
    assert commands.run(train(material, run, "--resume_from_checkpoint", "last"), log, folder=run) == 0
    expected, result = (load_file(folder / "model.safetensors") for folder in (whole, run))
    assert all(expected[name].equal(result[name]) for name in expected)
    launches = json.loads((run / "run.json").read_text())["launches"]
    assert [launch["to_step"] for launch in launches] == [3, STEPS]


def test_a_signal_behind_the_last_step_says_how_to_go_on(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = [str(word) for word in ("train", *kills.train_flags(material, 2), "--output_dir", run)]
    with monkeypatch.context() as patch:
        patch.setattr("stepjepa.running.run.draw_metrics", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert main(command) == 128 + signal.SIGTERM
    told = "interrupted after the last step; checkpoint-2 is complete: resume with --resume_from_checkpoint last\n"
    assert capsys.readouterr().err.endswith(f"stepjepa train: {told}")
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert main([*command, "--resume_from_checkpoint", "last"]) == 0
    assert (run / "model.safetensors").is_file()


class Terminate(TrainerCallback):
    """Sends SIGTERM to this process at the start of the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("eval_steps", [1, 2, 3])
def test_without_a_new_best_a_training_is_saved_at_the_end_of_its_step(
    eval_steps: int, material: Path, tmp_path: Path
) -> None:
    """Behind an evaluation Trainer forgot that a checkpoint was asked for, so the signal had no effect."""
    of_trainer = {"max_steps": STEPS, "save_strategy": "best", "metric_for_best_model": "loss"}
    config = RunConfig(
        model_name=str(material / "model"),
        train_file=str(material / "train.jsonl"),
        eval_file=str(material / "test.jsonl"),
        output_dir=str(tmp_path / "run"),
        learning_rate=0.0,  # only the first evaluation is a new best
        eval_steps=eval_steps,
        trainer={**of_trainer, "use_cpu": True, "report_to": "none"},
    )
    with pytest.raises(Stopped, match=r"stopped; .*checkpoint-3 is saved; resume with `resume_from_checkpoint last`"):
        run(config, callbacks=[Terminate()])
    assert checkpoint_fault(tmp_path / "run" / "checkpoint-3") is None
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert [line["step"] for line in state["log_history"] if "eval_loss" in line] == [*range(eval_steps, 4, eval_steps)]
    resumed = run(replace(config, resume_from_checkpoint="last"))
    assert resumed.record.status == "finished" and resumed.record.results.steps == STEPS


def test_checkpoints_on_a_signal_are_those_of_the_run_alone(material: Path, tmp_path: Path) -> None:
    """Trainer's own took SIGTERM, also for what came behind the run, and a killed run was recorded as finished."""
    config = RunConfig(
        model_name=str(material / "model"),
        train_file=str(material / "train.jsonl"),
        output_dir=str(tmp_path / "run"),
        trainer={"max_steps": 1, "use_cpu": True, "report_to": "none", "enable_jit_checkpoint": True},
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match=r"^enable_jit_checkpoint: not with this trainer, got True; leave it out: "):
        run(config)
    assert not (tmp_path / "run").exists()
    run(replace(config, trainer={**config.trainer, "enable_jit_checkpoint": False}))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_disk_that_is_full_costs_no_checkpoint(
    commands: Commands, material: Path, whole: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "run.log"
    size = (whole / "model.safetensors").stat().st_size
    assert commands.run(train(material, run), log, folder=run, when=run / "checkpoint-2", largest=size // 2) == 2
    error = [line for line in log.read_text().splitlines() if not line.startswith("changes ")][-1]
    assert re.fullmatch(
        rf"stepjepa train: error: {run}/checkpoint-4: .*; checkpoint-2 is complete: once it can be written to, "
        "resume with --resume_from_checkpoint last",
        error,
    )
    assert "Traceback" not in log.read_text()
    assert sorted(path.name for path in run.iterdir()) == [
        *("checkpoint-2", "metrics.jsonl", "run.json", "run.yaml", "tensorboard", "trained_prompts.json"),
    ]
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert commands.run(train(material, run, "--resume_from_checkpoint", "last"), log, folder=run) == 0
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_evaluation_keeps_what_is_answered(
    whole: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from stepjepa.evaluation.answering import Batcher

    def arguments(output: Path) -> list[str]:
        flags = f"--model_path {whole} --test_file {material}/test.jsonl --batch_size 2 --max_new_tokens 3"
        return ["evaluate", *flags.split(), "--output_file", str(output)]

    assert main(arguments(tmp_path / "whole.jsonl")) == 0
    answer, batches = Batcher.lines, []

    def stopped(self: Batcher, *given: Any) -> Any:
        batches.append(given)
        if len(batches) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer(self, *given)

    monkeypatch.setattr(Batcher, "lines", stopped)
    assert main(arguments(tmp_path / "stopped.jsonl")) == 128 + signal.SIGTERM
    assert "stepjepa evaluate: stopped; 4 of 11 examples are in" in capsys.readouterr().err
    assert len((tmp_path / "stopped.jsonl").read_text().splitlines()) == 4
    assert main(arguments(tmp_path / "stopped.jsonl")) == 0
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(("mine", "theirs"), [(15, 0), (0, 15)])
def test_all_processes_stop_at_the_same_step(mine: int, theirs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them was sent the signal; and at an epoch's end after what it brings."""

    def all_reduce(number: torch.Tensor, _operation: Any) -> None:
        number.clamp_(min=theirs)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    callback = StopCallback(SimpleNamespace(first=mine), 2, torch.device("cpu"))  # type: ignore[arg-type]
    control = SimpleNamespace(should_save=False)
    callback.on_step_end(None, SimpleNamespace(epoch=1.0), control)
    assert not control.should_save
    callback.on_epoch_end(None, SimpleNamespace(epoch=1.0), control)
    assert control.should_save
    with pytest.raises(Stopped) as stop:
        callback.on_save(None, None, control)
    assert stop.value.number == 15
