"""A ``JepaTrainer`` records its run as the shell does: the commands work on its folder, and a resume is guarded."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainerCallback, TrainingArguments

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import locked, write_jsonl
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.text import LMLoss
from stepjepa.store.prompts import share_trained_on
from stepjepa.store.record import read_record
from stepjepa.training.trainer import JepaTrainer

STEPS = JepaConfig(mode="step-jepa", jepa_loss_type="infonce", lbd=0.5)
ROWS = [{"messages": list(record.messages)} for record in tiny.records()]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    options |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-3, **changes}
    return TrainingArguments(str(folder), **options)


def trainer(
    folder: Path, jepa: JepaConfig = STEPS, *, data: Any = ROWS, model: Any = "preset:tiny", **changes: Any
) -> Any:
    names = ("processing_class", "objective", "callbacks", "eval_dataset")
    own = {name: changes.pop(name) for name in names if name in changes}
    return JepaTrainer(model, arguments(folder, **changes), jepa, train_dataset=data, **own)


class Interrupt(TrainerCallback):
    """Fails in a step, as a run that is killed."""

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise self.error("step")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    return tmp_path / "train.jsonl"


def test_the_record_of_a_run_from_python(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, data=str(data)).train()
    record = read_record(run)
    assert (record.status, record.model, record.command) == ("finished", "preset:tiny", None)
    assert record.results is not None and record.results.steps == 4 and record.results.tokens
    assert record.data["train"] is not None and record.data["train"].file == "train.jsonl"
    assert record.system_prompts == ["Add."]
    assert [(each.from_step, each.to_step) for each in record.launches] == [(0, 4)]
    assert record.launches[0].settings["learning_rate"] == 1e-3
    settings = yaml.safe_load((run / "run.yaml").read_text())
    assert settings["train_file"] == str(data) and settings["model_name"] == "preset:tiny"
    assert settings["max_steps"] == 4 and settings["save_steps"] == 2 and settings["report_to"] == "none"
    absent = {"hub_token", "resume_from_checkpoint", "weight_decay", "remove_unused_columns", "accelerator_config"}
    assert not absent & settings.keys()
    assert share_trained_on(str(run), tiny.records()) == {"exact": 1.0, "normalised": 1.0}
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
def test_the_commands_work_on_its_folder(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / f"{mode}-{seed}" for seed in (3, 5) for mode in ("regular", "steps")]
    for run in runs:
        jepa = STEPS if "steps" in run.name else JepaConfig(mode="regular")
        trainer(run, jepa, data=str(data), seed=int(run.name[-1]), max_steps=2).train()
        similarity = ["--similarity", "step-jepa"]
        command = [
            "evaluate",
            "--model_path",
            run,
            "--test_file",
            data,
            "--output_file",
            run / "test.jsonl",
            *similarity,
        ]
        assert main([*map(str, command), "--max_new_tokens", "3"]) == 0, capsys.readouterr().err
    names = list(map(str, runs))
    capsys.readouterr()
    assert main(["report", *names]) == 0
    assert main(["report", *names, "--output_file", str(tmp_path / "page.html")]) == 0
    assert main(["compare", *names]) == 0
    assert "regular" in capsys.readouterr().out
    assert (
        main(["analyze", "--model_path", *names[:2], "--test_file", str(data), "--output_dir", str(tmp_path / "a")])
        == 0
    )
    assert main(["rerun", names[1]]) == 0
    assert "bit for bit" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resume_is_guarded_as_in_the_shell(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, max_steps=2).train()
    for resume in (True, "last", "auto", str(run / "checkpoint-2")):
        with pytest.raises(UserError, match=r"begun with other settings \(`lbd`: 0.5 -> 0.25\)"):
            trainer(run, replace(STEPS, lbd=0.25)).train(resume_from_checkpoint=resume)
    with pytest.raises(UserError, match="begun with other settings"):
        trainer(run, data=ROWS[::-1]).train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match="holds the record of a run; train\\(resume_from_checkpoint=True\\)"):
        trainer(run).train()
    before = (run / "run.json").read_bytes()
    trainer(run).train(resume_from_checkpoint=True)
    record = read_record(run)
    assert [(each.from_step, each.to_step) for each in record.launches] == [(0, 2), (2, 4)]
    assert json.loads(before)["results"]["steps"] == 2
    # Asked for, it goes on, and the record says with what.
    again = trainer(run, replace(STEPS, lbd=0.25), max_steps=6)
    again.train(resume_from_checkpoint=True, allow_changes=True)
    changes = {each.name: (each.before, each.now, each.mixed) for each in read_record(run).launches[-1].changes}
    assert changes == {"jepa.lbd": (0.5, 0.25, True), "max_steps": (4, 6, True)}


def test_a_further_call_of_train_is_a_further_launch(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", max_steps=2)
    run.train()
    run.train()
    record = read_record(tmp_path / "run")
    assert [(each.from_step, each.to_step) for each in record.launches] == [(0, 2), (2, 4)]
    assert record.results is not None and record.results.steps == 4
    (change,) = record.launches[1].changes
    assert change.mixed and "step 2" in change.now
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4}


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyError):
        trainer(run, callbacks=[Interrupt(3, KeyError)]).train()
    record = read_record(run)
    assert (record.status, record.error) == ("failed", "'step'")
    assert record.launches[0].to_step == 3
    with pytest.raises(KeyboardInterrupt):
        trainer(run, callbacks=[Interrupt(3, KeyboardInterrupt)]).train(resume_from_checkpoint=True)
    assert read_record(run).status == "interrupted"
    before = (run / "run.json").read_bytes()
    # Without a step the record stays what it was, and a new folder is left as it was.
    with pytest.raises(KeyError):
        trainer(run, callbacks=[Interrupt(2, KeyError)]).train(resume_from_checkpoint=True)
    assert (run / "run.json").read_bytes() == before
    with pytest.raises(KeyError):
        trainer(tmp_path / "new", callbacks=[Interrupt(0, KeyError)]).train()
    assert not (tmp_path / "new").exists()


def test_objects_are_described_and_refused_by_name(tmp_path: Path, tiny_tokenizer: Any, capsys: Any) -> None:
    run = tmp_path / "run"

    def make(objective: Objective) -> Any:
        model = tiny.make_model("llama")
        return trainer(run, JepaConfig(), model=model, processing_class=tiny_tokenizer, objective=objective)

    make(Objective([LMLoss(0.5)])).train()
    settings = yaml.safe_load((run / "run.yaml").read_text())
    assert settings["train_dataset"]["records"] == 3 and len(settings["train_dataset"]["sha256"]) == 64
    assert settings["model"]["object"] == "LlamaForCausalLM" and settings["objective"]["object"] == "Objective"
    assert "tokenizer" in settings and "model_name" not in settings
    capsys.readouterr()
    assert main(["train", "--config", str(run / "run.yaml"), "--output_dir", str(tmp_path / "new")]) == 2
    assert "pass model= to stepjepa.run again" in capsys.readouterr().err
    # Another objective is another run.
    with pytest.raises(UserError, match="begun with other settings \\(`objective`\\)"):
        make(Objective([LMLoss(1.0)])).train(resume_from_checkpoint=True)


def test_a_replaced_base_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    def make(seed: int) -> Any:
        return trainer(
            tmp_path / "run", JepaConfig(), model=tiny.make_model("llama", seed=seed), processing_class=tiny_tokenizer
        )

    make(0).train()
    told = r"begun with other settings \(weights of the base model\); bring back the earlier weights"
    with pytest.raises(UserError, match=told):
        make(1).train(resume_from_checkpoint=True)


def test_nothing_is_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", save_strategy="no", max_steps=1)
    run.train()
    assert not list((tmp_path / "run").glob("*.safetensors"))
    run.save_model()
    assert (tmp_path / "run" / "checksums.json").is_file()
    assert read_record(tmp_path / "run").status == "finished"


def test_a_second_training_in_a_folder_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    second = trainer(tmp_path / "run")
    for name in ("run", "link"):
        with locked(tmp_path / name), pytest.raises(UserError, match=r"run: is in use by process \d+ on "):
            second.train()
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("run.yaml", "metrics.jsonl", "metrics.png", "trained_prompts.json", "config.json", "model.safetensors"),
        *("tokenizer.json", "chat_template.jinja", "training_args.bin", "checksums.json", "checkpoint-1/x"),
    ],
)
def test_a_file_that_is_no_runs_is_not_written_over(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "run" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("{}\n")
    told = f"{name.partition('/')[0]}: would be written over, and the folder holds no run.json beside it; move it, or"
    with pytest.raises(UserError, match=told):
        trainer(tmp_path / "run").train()
    assert [file for file in (tmp_path / "run").rglob("*") if file.is_file()] == [mine]
    assert mine.read_text() == "{}\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("file", "file: is a file; name a folder as `output_dir`"),
        ("file/run", "file/run: can't be made, since .*/file is a file; name another place"),
        ("link", "link: is a link to nowhere, where nothing is; make a folder there, remove the link, or name another"),
    ],
)
def test_a_folder_that_can_not_be_made_is_named(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match=told):
        trainer(tmp_path / name).train()
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    flags = ["--model_name", "preset:tiny", "--train_file", str(tmp_path / "train.jsonl")]
    assert main(["train", *flags, "--output_dir", str(tmp_path / name)]) == 2
    assert re.search(told.replace("`output_dir`", "--output_dir"), capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link", "train.jsonl"}


def test_a_file_that_is_no_runs_is_not_written_over_on_resuming(tmp_path: Path) -> None:
    """A checkpoint may be resumed in another folder, or in one of another program, which has no run.json."""
    trainer(tmp_path / "first", save_steps=1, max_steps=2).train()
    (tmp_path / "first" / "run.json").unlink()
    mine = tmp_path / "other" / "run.yaml"
    mine.parent.mkdir()
    mine.write_text("mode: regular\n")
    with pytest.raises(UserError, match=r"other/run.yaml: would be written over"):
        trainer(tmp_path / "other").train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert [*mine.parent.iterdir()] == [mine] and mine.read_text() == "mode: regular\n"
    theirs = shutil.copytree(tmp_path / "first" / "checkpoint-1", mine.parent / "checkpoint-3")
    mine.unlink()
    with pytest.raises(UserError, match=r"other/checkpoint-3: would be written over"):
        trainer(tmp_path / "other").train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert [*mine.parent.iterdir()] == [theirs]
    with pytest.raises(UserError, match=r"first/run.yaml: would be written over"):
        trainer(tmp_path / "first").train(resume_from_checkpoint=True)


def test_metrics_of_an_evaluation_before_the_training_stay(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = trainer(tmp_path / "run", max_steps=1, eval_dataset=ROWS[:2])
    run.evaluate()
    run.train()
    assert json.loads(metrics.read_text().splitlines()[0])["step"] == 0
    # A launch without a step leaves nothing that the next one would take for the user's own.
    failing = Interrupt(0, ZeroDivisionError)
    run = trainer(
        tmp_path / "again", eval_dataset=ROWS[:2], eval_on_start=True, eval_strategy="epoch", callbacks=[failing]
    )
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert not (tmp_path / "again").exists()


def test_an_evaluation_alone_changes_no_metrics_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"mine": 1}\n')
    run = trainer(tmp_path / "run", max_steps=1, eval_dataset=ROWS[:2])
    run.evaluate()
    assert metrics.read_text() == '{"mine": 1}\n'
    assert f"{metrics} is another run's or your own, so the evaluation is not added" in capsys.readouterr().err
    # Nor is it in the way of a training that resumes what there is: its own is written before it begins.
    run = trainer(tmp_path / "second", max_steps=1, eval_dataset=ROWS[:2])
    run.evaluate()
    run.train(resume_from_checkpoint="auto")
    lines = (tmp_path / "second" / "metrics.jsonl").read_text()
    assert next(json.loads(line)["step"] for line in lines.splitlines()) == 0
    trainer(tmp_path / "second", eval_dataset=ROWS[:2]).evaluate()
    assert (tmp_path / "second" / "metrics.jsonl").read_text() == lines
