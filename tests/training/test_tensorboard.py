"""TensorBoard, the tracker by default, receives what ``metrics.jsonl`` holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main

CURVES = ("loss", "lm_loss", "jepa_loss", "matched_similarity", "shuffled_similarity", "source_rank", "target_rank")


ROWS = [{"messages": list(record.messages)} for record in tiny.records()]


class Failing(TrainerCallback):
    """Ends a run before its first step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")


def make_trainer(folder: Path, *, callbacks: Any = (), **more: Any) -> JepaTrainer:
    arguments = tiny.arguments(folder, report_to=["tensorboard"], **{"max_steps": 1, **more})
    config = JepaConfig(mode="step-jepa")
    return JepaTrainer(
        "preset:tiny", arguments, config, train_dataset=ROWS, eval_dataset=ROWS, callbacks=list(callbacks)
    )


def event_files(folder: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(folder)) for file in folder.rglob("*tfevents*"))


def test_the_curves_are_those_of_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    flags = f"--train_file {tmp_path}/data.jsonl --eval_file {tmp_path}/data.jsonl --output_dir {tmp_path}/run"
    flags += " --model_name preset:tiny --use_cpu --step_jepa --logging_steps 1 --eval_steps 2 --max_steps 4"
    assert main(["train", *flags.split()]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    result = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    result.Reload()
    for name in CURVES:
        for tag, column in ((f"train/{name}", name), (f"eval/{name}", f"eval_{name}")):
            logged = {line["step"]: line[column] for line in lines if column in line}
            assert {each.step: each.value for each in result.Scalars(tag)} == pytest.approx(logged, rel=1e-6), tag


@pytest.mark.slow
def test_a_trainer_writes_where_a_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a trainer were in ``runs/DATE`` of its folder, those of an evaluation alone in the working directory."""
    monkeypatch.chdir(tmp_path)
    evaluated = make_trainer(tmp_path / "evaluated")
    evaluated.evaluate()
    evaluated.train()
    trained = make_trainer(tmp_path / "trained", save_strategy="steps", save_steps=1)
    trained.train()
    make_trainer(tmp_path / "trained", max_steps=2).train(resume_from_checkpoint=True)
    assert event_files(tmp_path) == ["evaluated/tensorboard", "trained/tensorboard", "trained/tensorboard"]
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "elsewhere"))
    make_trainer(tmp_path / "named").train()
    assert event_files(tmp_path / "elsewhere") == ["."] and not event_files(tmp_path / "named")


def test_a_run_that_fails_at_its_start_removes_its_own_files_alone(tmp_path: Path) -> None:
    """All of ``tensorboard`` was removed, with what the user had there."""
    folder = tmp_path / "run"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "mine").write_text("notes")
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(folder, callbacks=[Failing()]).train()
    assert [file.name for file in (folder / "tensorboard").iterdir()] == ["mine"]
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(tmp_path / "new", callbacks=[Failing()]).train()
    assert not (tmp_path / "new").exists()
