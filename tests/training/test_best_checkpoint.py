"""The best checkpoint of a run stays the best, wherever the run is resumed, and checkpoints are ordered by step."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import tiny
from stepjepa.base.files import read_jsonl
from stepjepa.config.jepa import JepaConfig
from stepjepa.evaluation.answering import AnswerScores
from stepjepa.evaluation.retrieval_scores import RetrievalScores
from stepjepa.models.ema import EMA_FILE
from stepjepa.store.record import read_record
from stepjepa.tasks.generic import GenericTask
from stepjepa.training.metric_checks import check_best_metric
from stepjepa.training.saving import resume_hint
from stepjepa.training.trainer import JepaTrainer

BEST, STEPS = 2, 5


class Scored(TrainerCallback):
    """Gives the checkpoint of step ``BEST`` the best score."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_score"] = 1.0 if state.global_step == BEST else 0.1


def trainer(
    folder: str | Path, tokenizer: Any, steps: int, jepa: JepaConfig | None = None, **changes: Any
) -> JepaTrainer:
    options = {
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": True,
    } | changes
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(Path(folder), **options),
        jepa or JepaConfig(mode="regular"),
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
        callbacks=[Scored()],
    )


def is_checkpoint(run: JepaTrainer, checkpoint: Path) -> bool:
    """Whether the model holds the weights of a checkpoint."""
    saved, weights = load_file(checkpoint / "model.safetensors"), run.model.state_dict()
    return all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A run of four steps, begun under a relative path; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        trainer("run", trained_tokenizer, STEPS - 1).train()
    names = sorted(path.name for path in (folder / "run").glob("checkpoint-*"))
    assert names == [f"checkpoint-{n}" for n in range(1, STEPS)]
    return folder / "run"


@pytest.fixture
def begun(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, from whose folder's folder it was begun as ``run``."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("limit", [None, 1, 2])
@pytest.mark.parametrize("spelling", ["absolute", "copied", "elsewhere"])
def test_the_best_checkpoint_is_found_under_another_spelling(
    spelling: str, limit: int | None, begun: Path, monkeypatch: pytest.MonkeyPatch, trained_tokenizer: Any
) -> None:
    folder: str | Path = begun
    if spelling == "copied":
        folder = begun.with_name("copy")
        shutil.copytree(begun, folder)
        # What the old folder has by now is no part of the copied run.
        shutil.copytree(begun / "checkpoint-3", begun / f"checkpoint-{BEST}", dirs_exist_ok=True)
    elif spelling == "elsewhere":
        begun.with_name("inner").mkdir()
        monkeypatch.chdir(begun.with_name("inner"))
        folder = Path("..") / "run"
    best = load_file(Path(folder) / f"checkpoint-{BEST}" / "model.safetensors")
    run = trainer(folder, trained_tokenizer, STEPS, save_total_limit=limit)
    run.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{STEPS - 1}"))
    weights = run.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in best.items())
    assert (Path(folder) / f"checkpoint-{BEST}").is_dir()


@pytest.mark.parametrize("resumed", [False, True])
def test_the_record_has_the_evaluation_of_the_weights_that_are_saved(
    resumed: bool, begun: Path, tmp_path: Path, trained_tokenizer: Any
) -> None:
    folder = begun if resumed else tmp_path / "new"
    run = trainer(folder, trained_tokenizer, STEPS)
    run.train(resume_from_checkpoint=resumed)
    lines = [line for line in run.state.log_history if "eval_lm_loss" in line]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    results = read_record(folder).results
    assert results is not None and (results.best_step, results.steps) == (BEST, STEPS)
    assert results.evaluation["eval_lm_loss"] == lines[BEST - 1]["eval_lm_loss"] != lines[-1]["eval_lm_loss"]
    assert is_checkpoint(run, folder / f"checkpoint-{BEST}")


def test_other_evaluations_leave_the_record_and_the_log_alone(tmp_path: Path, trained_tokenizer: Any) -> None:
    """One before the training stays in the log; one of other records is not the evaluation of the run."""
    run = trainer(tmp_path / "run", trained_tokenizer, STEPS, load_best_model_at_end=False)

    class Other(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            run.evaluate(tiny.records()[:1], metric_key_prefix="test")
            run.evaluate(tiny.records()[:1])

    run.add_callback(Other())
    before = run.evaluate()
    run.train()
    lines = [line for _, line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert (lines[0]["step"], lines[0]["eval_loss"]) == (0, before["eval_loss"])
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    results = read_record(tmp_path / "run").results
    of_last_step = next(line for line in lines if line["step"] == STEPS and "eval_lm_loss" in line)
    assert results is not None and results.evaluation["eval_lm_loss"] == of_last_step["eval_lm_loss"]


def test_where_the_best_checkpoint_is_gone_a_later_one_is_the_best(
    begun: Path, trained_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(begun / f"checkpoint-{BEST}")
    run = trainer(begun, trained_tokenizer, STEPS)
    run.train(resume_from_checkpoint=str(begun / f"checkpoint-{STEPS - 1}"))
    assert f"the best checkpoint so far, checkpoint-{BEST}, is gone" in capsys.readouterr().err
    assert (run.state.best_global_step, run.state.best_metric) == (STEPS, 0.1)
    assert is_checkpoint(run, begun / f"checkpoint-{STEPS}")


def test_another_metric_chooses_among_the_checkpoints_that_are_there(
    begun: Path, tmp_path: Path, trained_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best value by the metric of the launch before would beat, or never be beaten by, those of this one."""
    options = {"metric_for_best_model": "lm_loss", "greater_is_better": False}
    last = str(begun / f"checkpoint-{STEPS - 1}")
    run = trainer(begun, trained_tokenizer, STEPS, learning_rate=1e-2, **options)
    run.train(resume_from_checkpoint=last)
    losses = {line["step"]: line["eval_lm_loss"] for line in run.state.log_history if "eval_lm_loss" in line}
    assert len(losses) == STEPS
    best = min(losses, key=losses.__getitem__)
    assert (run.state.best_global_step, run.state.best_metric) == (best, losses[best])
    assert is_checkpoint(run, begun / f"checkpoint-{best}")
    said = capsys.readouterr()
    assert f"the best checkpoint so far, checkpoint-{BEST}, was chosen by another metric" in said.err
    changes = {change.name: change for change in read_record(begun).launches[-1].changes}
    assert str(changes["metric_for_best_model"]) == "metric_for_best_model: score -> lm_loss"
    assert changes["metric_for_best_model"].mixed and "resumed with another metric_for_best_model" in said.out


@pytest.mark.parametrize(("limit", "left"), [(1, [BEST]), (2, [BEST, STEPS])])
def test_a_limit_removes_no_folder_of_the_users_at_the_end(
    limit: int, left: list[int], tmp_path: Path, trained_tokenizer: Any
) -> None:
    """With limit 1 Trainer removes all but the best, and everything whose name begins like that of a checkpoint."""
    mine = [tmp_path / name for name in ("checkpoint-1-good", "checkpoint-7.bak", "old-checkpoint-3")]

    class Copied(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            for folder in mine:
                folder.mkdir(exist_ok=True)
                (folder / "model.safetensors").touch()

    run = trainer(tmp_path, trained_tokenizer, STEPS, save_total_limit=limit)
    run.add_callback(Copied())
    run.train()
    assert all((folder / "model.safetensors").is_file() for folder in mine)
    folders = {*tmp_path.glob("*checkpoint-*")} - {*mine}
    assert sorted(path.name for path in folders) == [f"checkpoint-{step}" for step in left]
    assert is_checkpoint(run, tmp_path / f"checkpoint-{BEST}")
    assert run.args.save_total_limit == limit


@pytest.mark.slow
def test_a_better_step_that_was_not_saved_is_remembered_when_resumed(tmp_path: Path, trained_tokenizer: Any) -> None:
    """As in a run that was not interrupted: no later checkpoint is the best unless it is better than that step."""

    class Best(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_score"] = {2: 0.5, 3: 1.0}.get(state.global_step, 0.2)

    def train(folder: Path, steps: int, resume: str | None) -> JepaTrainer:
        run = trainer(folder, trained_tokenizer, steps, save_steps=2)
        run.remove_callback(Scored)
        run.add_callback(Best())
        run.train(resume_from_checkpoint=resume)
        return run

    whole = train(tmp_path / "whole", 8, None)
    train(tmp_path / "parts", 4, None)
    resumed = train(tmp_path / "parts", 8, str(tmp_path / "parts" / "checkpoint-4"))
    assert is_checkpoint(whole, tmp_path / "whole" / "checkpoint-2")
    assert is_checkpoint(resumed, tmp_path / "parts" / "checkpoint-2")
    assert (resumed.state.best_global_step, resumed.state.best_metric) == (3, 1.0)


def test_a_resumed_run_logs_evaluates_and_saves_as_often_as_it_is_asked_to(begun: Path, trained_tokenizer: Any) -> None:
    """The state of a checkpoint has the intervals of its own launch."""
    often = {"logging_steps": 2, "eval_steps": 3, "save_steps": 3}
    run = trainer(begun, trained_tokenizer, 9, **often)
    run.train(resume_from_checkpoint=str(begun / f"checkpoint-{STEPS - 1}"))
    lines = [line for line in run.state.log_history if line["step"] >= STEPS]
    assert [line["step"] for line in lines if "loss" in line] == [6, 8]
    assert [line["step"] for line in lines if "eval_loss" in line] == [6, 9]
    assert {path.name for path in begun.glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (1, 2, 3, 4, 6, 9)}


def test_a_clock_that_was_ahead_deletes_no_new_checkpoint(begun: Path, trained_tokenizer: Any) -> None:
    for path in begun.glob("checkpoint-*"):
        os.utime(path, (4e9, 4e9))
    run = trainer(begun, trained_tokenizer, STEPS + 2, save_total_limit=2, load_best_model_at_end=False)
    run.train(resume_from_checkpoint=str(begun / f"checkpoint-{STEPS - 1}"))
    names = sorted(path.name for path in begun.glob("checkpoint-*"))
    assert f"checkpoint-{STEPS + 2}" in names and len(names) == 2
    state = json.loads((begun / f"checkpoint-{STEPS + 2}" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == STEPS + 2


def test_checkpoints_of_the_model_alone_have_the_averages_of_the_best(tmp_path: Path, trained_tokenizer: Any) -> None:
    config = JepaConfig(target_grad="ema", ema_decay=0.5)
    run = trainer(tmp_path / "run", trained_tokenizer, STEPS, config, save_only_model=True)
    run.train()
    best = tmp_path / "run" / f"checkpoint-{BEST}"
    assert is_checkpoint(run, best) and not (best / "optimizer.pt").exists()
    averages = load_file(best / EMA_FILE)
    assert run.ema is not None and averages.keys() == run.ema._average.keys()
    assert all(torch.equal(run.ema._average[name], value) for name, value in averages.items())
    # The hint of a failure does not deny that they are there.
    assert resume_hint(run.args.output_dir).startswith(f"checkpoint-{STEPS} holds the model alone; begin again ")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mode", "name", "remedy"),
    [
        ("regular", "eval_lm_los", "did you mean lm_loss?"),
        ("regular", "score", "expected one of lm_loss, loss, epoch, runtime, samples_per_second"),
        ("regular", "source_rank", "expected one of lm_loss, loss"),
        ("llm-jepa", "retrieval_hits_at_1", "add `eval_retrieval`, or name one of lm_loss, jepa_loss, loss, matched_"),
        ("llm-jepa", "answer_exact", "add `eval_generate N`, or name one of"),
    ],
)
def test_a_metric_that_nothing_measures_is_refused_before_the_training(
    mode: Any, name: str, remedy: str, tmp_path: Path, trained_tokenizer: Any
) -> None:
    """A callback of one's own may add any metric, as that of this file does."""
    arguments = tiny.arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model=name)
    records = {"train_dataset": tiny.records(), "eval_dataset": tiny.records()}

    def make(**more: Any) -> JepaTrainer:
        model, jepa = tiny.make_model("llama", seed=3), JepaConfig(mode=mode)
        tokenizer = copy.deepcopy(trained_tokenizer)
        return JepaTrainer(model, arguments, jepa, processing_class=tokenizer, **records, **more)

    with pytest.raises(ValueError, match=f"metric_for_best_model: no evaluation of this run measures .*{remedy}"):
        make()
    make(callbacks=[Scored()])


def test_every_metric_of_an_evaluation_can_choose_the_best_model(tmp_path: Path, trained_tokenizer: Any) -> None:
    task, records = GenericTask(), tiny.records()
    run = JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(tmp_path, eval_strategy="steps", eval_steps=1),
        JepaConfig(stp=0.3),
        train_dataset=records,
        eval_dataset=records,
        processing_class=copy.deepcopy(trained_tokenizer),
        answer_scores=AnswerScores(records, task, trained_tokenizer, max_new_tokens=3, batch_size=5),
        retrieval_scores=RetrievalScores(records, task),
    )
    measured = run.evaluate()
    assert {"eval_answer_exact", "eval_retrieval_mrr", "eval_source_rank", "eval_stp_loss"} <= measured.keys()
    scores = {"answer": run.answer_scores, "retrieval": RetrievalScores(records, task)}
    for name in measured:
        run.args.metric_for_best_model = name
        check_best_metric(run.args, run.objective.metrics, scores)
        with pytest.raises(ValueError, match=r"measures .*expected one of|measures .*did you mean"):
            run.args.metric_for_best_model = f"{name}x"
            check_best_metric(run.args, run.objective.metrics, scores)
