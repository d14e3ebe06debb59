"""``stepjepa.run``: the same run from the shell and from Python; objects for names; a process left as it was."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import transformers
import yaml
from transformers import TrainerCallback

import stepjepa
import tiny
from stepjepa import JepaConfig, LoraSettings, Run, RunConfig, UserError, run
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.config.server import ServerSettings
from stepjepa.evaluation.options import EvaluationOptions
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.sampling import Sampling
from stepjepa.objectives.alignment import Alignment, InfoNCE
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.text import LMLoss
from stepjepa.running.training_arguments import training_arguments
from stepjepa.tasks.base import TaskOptions


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 5])
    return tmp_path / "data.jsonl"


TRAINER = {"max_steps": 3, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}


def losses(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in ("loss", "lm_loss", "jepa_loss", "grad_norm")} for line in lines if "loss" in line
    ]


def settings(folder: Path) -> dict[str, Any]:
    """What ``run.yaml`` holds, but for the run folder."""
    flat: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    del flat["output_dir"]
    return flat


@pytest.mark.slow
def test_two_spellings_of_a_run_are_one(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        model_name="preset:tiny",
        train_file=str(data),
        output_dir=str(tmp_path / "python"),
        batch_size=3,
        grad_accum=2,
        learning_rate=1e-3,
        jepa=JepaConfig(mode="step-jepa", jepa_loss_type="infonce", lbd=0.3),
        trainer={**TRAINER, "weight_decay": 0.01},
    )
    made = run(config)
    flags = "--model_name preset:tiny --batch-size 3 --gradient_accumulation_steps 2 --learning_rate 0.001 --step_jepa"
    flags += " --infonce --lbd 0.3 --max_steps 3 --use_cpu --logging_steps 1 --save_strategy no --report_to none"
    file = tmp_path / "flags.yaml"
    file.write_text(f"train_file: {data}\nweight_decay: 1e-2\n")
    assert main(["train", *flags.split(), "--config", str(file), "--output_dir", str(tmp_path / "shell")]) == 0
    assert settings(tmp_path / "python") == settings(tmp_path / "shell")
    assert losses(tmp_path / "python") == losses(tmp_path / "shell")
    assert len(losses(tmp_path / "shell")) == 3
    # What is written is read as what was run.
    assert RunConfig.read(tmp_path / "python" / "run.yaml") == config
    assert made.config == config
    assert made.folder == tmp_path / "python"
    assert (made.record.command, Run(tmp_path / "shell").record.command) == (None, ["train", *_words(flags, tmp_path)])
    # And both are runs to the commands that read folders.
    capsys.readouterr()
    for each in (made, Run(tmp_path / "shell")):
        each.evaluate(data, max_new_tokens=2, task="generic", max_examples=3)
    assert main(["report", str(tmp_path / "python"), str(tmp_path / "shell"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == ["python", "shell"]
    assert rows[0]["LM loss"] == rows[1]["LM loss"]
    assert main(["compare", str(tmp_path / "python"), str(tmp_path / "shell"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in compared["arms"]] == ["python", "shell"]
    assert "one run, trained 2 times" in compared["verdict"] and "equal bit for bit" in compared["verdict"]
    assert stepjepa.compare([made, tmp_path / "shell"]).verdict == compared["verdict"]


def _words(flags: str, folder: Path) -> list[str]:
    words = flags.replace("--batch-size", "--batch_size").split()
    return [*words, "--config", str(folder / "flags.yaml"), "--output_dir", str(folder / "shell")]


class Seen(TrainerCallback):
    """Counts steps."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


def test_objects_take_the_place_of_names(tiny_tokenizer: Any, tmp_path: Path) -> None:
    observed, objective = Seen(), Objective([LMLoss(1.0), Alignment(0.3, InfoNCE(0.2))])
    config = RunConfig(output_dir=str(tmp_path / "a"), batch_size=3, eval_steps=2, trainer=TRAINER)
    made = run(
        config,
        model=tiny.make_model("llama", seed=3),
        tokenizer=tiny_tokenizer,
        train_dataset=tiny.records() * 5,
        eval_dataset=[{"messages": list(record.messages)} for record in tiny.records()],
        objective=objective,
        callbacks=[observed],
    )
    assert observed.steps == 3
    assert made.record.results is not None and made.record.results.evaluation["eval_lm_loss"] > 0
    # InfoNCE of the terms that were passed, not the configuration's cosine.
    config = RunConfig(output_dir=str(tmp_path / "b"), batch_size=3, trainer=TRAINER)
    run(config, model=tiny.make_model("llama", seed=3), tokenizer=tiny_tokenizer, train_dataset=tiny.records() * 5)
    assert losses(tmp_path / "a")[0]["lm_loss"] == pytest.approx(losses(tmp_path / "b")[0]["lm_loss"], rel=1e-6)
    assert losses(tmp_path / "a")[0]["jepa_loss"] != losses(tmp_path / "b")[0]["jepa_loss"]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_name": "preset:tiny"}, {"model": 1}, "model: an object is passed, and model_name does nothing beside it"),
    ({"dtype": "bfloat16"}, {"model": 1}, "model: an object is passed, and dtype does nothing beside it"),
    ({"model_name": "m", "train_file": "a"}, {"train_dataset": [1]}, "and train_file does nothing beside it"),
    ({"model_name": "m", "data_file": "a"}, {"eval_dataset": [1]}, "and data_file does nothing beside it"),
    ({"model_name": "m"}, {}, "name the data with one of `train_file`"),
    ({"model_name": "m", "eval_steps": 3}, {"train_dataset": [1]}, "`eval_steps` does nothing without `eval_file`"),
    ({}, {"train_dataset": [1]}, "model_name: expected a folder"),
    ({"lora": LoraSettings()}, {"train_dataset": [1]}, "model_name: expected a folder"),
]


@pytest.mark.parametrize(("named", "passed", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_contradicts_is_refused_before_anything_is_written(
    named: dict[str, Any], passed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        run(RunConfig(output_dir=str(tmp_path / "a"), **named), **passed)
    assert words in str(error.value)
    assert not (tmp_path / "a").exists()


def test_a_configuration_of_another_kind_is_named() -> None:
    config: Any = {"model_name": "preset:tiny"}
    with pytest.raises(TypeError, match=r"^config: expected RunConfig\(\.\.\.\), got dict; RunConfig.read\(path\)"):
        run(config)


def test_the_process_is_left_as_it_was(data: Path, tmp_path: Path) -> None:
    def state() -> list[Any]:
        return [
            transformers.logging.get_verbosity(),
            transformers.logging.is_progress_bar_enabled(),
            logging.getLogger().level,
            [*logging.getLogger().handlers],
            *(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
            torch.distributed.is_initialized(),
        ]

    transformers.logging.set_verbosity_info()
    transformers.logging.enable_progress_bar()
    try:
        before = state()
        config = RunConfig(
            model_name="preset:tiny", train_file=str(data), output_dir=str(tmp_path / "a"), trainer=TRAINER
        )
        run(config)
        assert state() == before
        with pytest.raises(UserError, match="is not empty"):
            run(config)
        assert state() == before
    finally:
        transformers.logging.set_verbosity_warning()


def test_a_finished_run_is_returned_where_auto_finds_it(data: Path, tmp_path: Path, capsys: Any) -> None:
    files = {"model_name": "preset:tiny", "train_file": str(data), "output_dir": str(tmp_path / "a")}
    config = RunConfig(**files, resume_from_checkpoint="auto", trainer={**TRAINER, "save_strategy": "epoch"})
    first, second = run(config), run(config)
    assert first.record == second.record
    assert "the run is finished; there is nothing to resume" in capsys.readouterr().err


def test_a_run_is_evaluated_and_shown(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run(
        RunConfig(
            model_name="preset:tiny",
            train_file=str(data),
            output_dir=str(tmp_path / "a"),
            jepa=JepaConfig(mode="regular", plain=True),
            trainer=TRAINER,
        )
    )
    scores = made.evaluate(data, max_new_tokens=5, task="generic")
    assert scores.file == tmp_path / "a" / "data.jsonl"
    flags = ["--model_path", str(made.folder), "--test_file", str(data), "--output_file", str(tmp_path / "b.jsonl")]
    capsys.readouterr()
    assert main(["evaluate", *flags, "--max_new_tokens", "5", "--task", "generic", "--json"]) == 0
    message = json.loads(capsys.readouterr().out)
    timed = {"seconds", "tokens_per_second", "output_file", "summary_file"}
    assert {k: v for k, v in scores.summary.items() if k not in timed} == {
        k: v for k, v in message.items() if k not in timed
    }
    assert scores[scores.headline] == message["scores"][message["headline"]]["mean"]
    assert len(scores.lines) == message["n"]
    # The same answer as the evaluation's to the same question, as a text and as messages.
    question = tiny.records()[0].messages[1]["content"]
    messages = list(tiny.records()[0].messages[:2])
    texts = {made.answer(messages, max_new_tokens=5), made.answer(question, max_new_tokens=5)}
    assert texts == {scores.lines[0]["generated"]}
    # A second call reads what is there.
    assert stepjepa.evaluate(made.folder, data, max_new_tokens=5, task="generic").summary == scores.summary
    assert repr(scores) == f"Scores({scores.headline} {scores[scores.headline]:.4f} of 15 records, '{scores.file}')"
    assert f"Run('{made.folder}': status finished, model preset:tiny, mode regular, steps 3, LM loss " in repr(made)
    assert "<td>finished</td>" in made._repr_html_() and "15 examples" in scores._repr_html_()
    with pytest.raises(TypeError, match=r"expected settings among .*, got 'max_tokens'"):
        made.evaluate(data, max_tokens=5)
    with pytest.raises(KeyError, match="no score 'bleu'; there are exact"):
        scores["bleu"]
    # A mapping: ``in`` and ``dict`` asked for the score '0'.
    assert dict(scores) == {name: scores[name] for name in scores.names}
    assert "exact" in scores and "bleu" not in scores and scores.get("bleu") is None
    with pytest.raises(TypeError, match=r"^test_file: expected the path of a file, got list; write the records to a"):
        made.evaluate(scores.lines)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^model_path: expected a run folder, .*, got Run; pass its .folder$"):
        stepjepa.evaluate(made, data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^folder: expected a run folder, got Run; pass its .folder$"):
        Run(made)  # type: ignore[arg-type]
    for name, remedy in Run.elsewhere.items():
        with pytest.raises(AttributeError, match=f"^Run has no attribute '{name}'; {re.escape(remedy)}$"):
            getattr(made, name)


def test_the_settings_of_an_evaluation_are_typed_as_they_are_declared() -> None:
    """An editor completes them and a type checker knows them by a list of their own."""
    typed, declared = get_type_hints(EvaluationOptions), dict[str, Any]()
    for owner in (EvaluationSettings, Sampling, TaskOptions, ServerSettings):
        declared |= get_type_hints(owner)
    settable = EvaluationSettings.flat_names() - {"model_path", "test_file", "output_file"}
    assert typed.keys() == settable
    bits = {"load_in_4bit": bool, "load_in_8bit": bool}
    assert typed == {name: (declared | bits)[name] for name in settable}


@pytest.mark.slow
def test_public_functions_are_there_at_the_second_call(data: Path, tmp_path: Path) -> None:
    """A module or package of the name of a function would take its place once it is imported."""
    for name in stepjepa.__all__:
        first = getattr(stepjepa, name)
        assert first is getattr(stepjepa, name)
        assert not hasattr(first, "__path__") and type(first).__name__ != "module", name
    for number in range(2):
        folder = tmp_path / str(number)
        files = {"model_name": "preset:tiny", "train_file": str(data), "output_dir": str(folder)}
        stepjepa.run(RunConfig(**files, trainer=TRAINER))
        assert stepjepa.evaluate(folder, data, max_new_tokens=2, max_examples=3, task="generic").summary["n"] == 3


@pytest.mark.parametrize(
    ("changes", "size"),
    [({"batch_size": 5}, 5), ({"batch_size": 1}, 8), ({"trainer": {"per_device_eval_batch_size": 3}}, 3)],
)
def test_held_out_pairs_are_compared_among_as_many_as_in_training(
    changes: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """InfoNCE of 8 candidates stood beside that of 32 under one name, as if held-out pairs were the easier ones."""
    config = RunConfig(model_name="preset:tiny", train_file="a", output_dir=str(tmp_path), **changes)
    assert training_arguments(config, has_eval=True).per_device_eval_batch_size == size
