"""Several sets of held-out records have names, and their metrics are called as transformers' own Trainer calls them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import read_jsonl
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import RunConfig
from stepjepa.store.record import read_record
from stepjepa.training.trainer import JepaTrainer

HARD, *EASY = [tiny.records()[:1], *tiny.records()[1:]]
SETS = {"easy": EASY, "hard": HARD}


def trainer(folder: Path, tokenizer: Any, held_out: Any, config: JepaConfig | None = None, **more: Any) -> JepaTrainer:
    parts = {name: more.pop(name) for name in ("answer_scores", "callbacks") if name in more}
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1} | more
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, **options),
        config or JepaConfig(mode="step-jepa"),
        train_dataset=tiny.records(),
        eval_dataset=held_out,
        processing_class=copy.deepcopy(tokenizer),
        **parts,
    )


def of_set(metrics: dict[str, float], name: str) -> dict[str, float]:
    """The metrics of a set, without their prefix and those of time."""
    chosen = {key.removeprefix(f"eval_{name}_"): value for key, value in metrics.items() if f"eval_{name}_" in key}
    return {key: value for key, value in chosen.items() if key not in ("runtime", "samples_per_second")}


def test_metrics_are_called_as_trainer_calls_them(trained_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(5, 12), "labels": torch.arange(5, 12)}] * 2
    plain = Trainer(
        tiny.make_model("llama", seed=3), tiny.arguments(tmp_path), eval_dataset={"easy": rows, "hard": rows}
    )
    theirs, ours = plain.evaluate(), trainer(tmp_path, trained_tokenizer, SETS).evaluate()
    shared = {f"eval_{name}_{metric}" for name in SETS for metric in ("loss", "runtime", "samples_per_second")}
    assert shared <= theirs.keys() and shared <= ours.keys()
    assert all(name.startswith(("eval_easy_", "eval_hard_")) for name in ours if name != "epoch")


def test_each_set_has_the_metrics_that_it_has_alone(trained_tokenizer: Any, tmp_path: Path) -> None:
    both = trainer(tmp_path, trained_tokenizer, SETS)
    found = both.evaluate()
    for name, records in SETS.items():
        alone = trainer(tmp_path, trained_tokenizer, records).evaluate()
        wanted = {key.removeprefix("eval_"): value for key, value in alone.items() if key != "epoch"}
        del wanted["runtime"], wanted["samples_per_second"]
        assert of_set(found, name) == pytest.approx(wanted, nan_ok=True)
    assert of_set(found, "easy") != of_set(found, "hard")
    # A line of logs each, as Trainer writes them; other sets may be passed later.
    assert [("eval_easy_loss" in line, "eval_hard_loss" in line) for line in both.state.log_history] == [
        (True, False),
        (False, True),
    ]
    other = both.evaluate({"third": EASY}, metric_key_prefix="test")
    assert other["test_third_loss"] == pytest.approx(found["eval_easy_loss"])


def test_a_run_with_sets_is_recorded_resumed_and_keeps_its_best(
    trained_tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "hard_lm_loss", "save_strategy": "steps"}
    run = trainer(tmp_path, trained_tokenizer, SETS, **best)
    run.train()
    printed = capsys.readouterr().out
    assert "eval easy  LM loss: " in printed and "eval hard  LM loss: " in printed
    record = read_record(tmp_path)
    assert record.results is not None and record.eval_counts is not None
    assert {"eval_easy_loss", "eval_hard_loss"} <= record.results.evaluation.keys()
    assert record.eval_counts["records"] == len(EASY) + len(HARD)
    source = record.data["eval"]
    assert source is not None and source.records == len(EASY) + len(HARD)
    assert source.other["sets"].keys() == SETS.keys()
    assert RunConfig.read(tmp_path / "run.yaml").objects["eval_dataset"].keys() == SETS.keys()
    by_step = {line["step"]: line["eval_hard_lm_loss"] for line in run.state.log_history if "eval_hard_lm_loss" in line}
    assert run.state.best_global_step == min(by_step, key=lambda step: by_step[step])
    lines = [line for _, line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert sum("eval_easy_lm_loss" in line for line in lines) == 2
    # The same records under other names are other held-out data.
    exchanged = trainer(tmp_path, trained_tokenizer, {"easy": HARD, "hard": EASY}, **(best | {"max_steps": 3}))
    with pytest.raises(UserError, match="`eval_dataset`: contents"):
        exchanged.train(resume_from_checkpoint=True)
    trainer(tmp_path, trained_tokenizer, SETS, **(best | {"max_steps": 3})).train(resume_from_checkpoint=True)


def test_scores_of_answers_have_no_name_of_a_set(trained_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    calls = list[int]()

    def scores(_model: Any, rank: int, _world: int) -> dict[str, float]:
        calls.append(rank)
        return {"exact": 3.0, "answers": 4}

    run = trainer(tmp_path, trained_tokenizer, SETS, JepaConfig(mode="regular"), answer_scores=scores)
    found = run.evaluate()
    assert (found["eval_answer_exact"], len(calls)) == (0.75, 1)
    assert "exact: 0.750" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["lm"], "'lm' gives eval_lm_loss, which is another metric"),
        (["answer"], "'answer' gives eval_answer_NAME"),
        ([3], "expected texts as the names of data sets, got 3"),
    ],
)
def test_names_that_hide_other_metrics_are_refused(
    names: list[Any], words: str, trained_tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, trained_tokenizer, dict.fromkeys(names, EASY))


def test_the_best_metric_must_be_one_of_a_set(trained_tokenizer: Any, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "save_strategy": "steps"}
    with pytest.raises(ValueError, match=r"measures 'loss'; did you mean .*(easy|hard)_loss"):
        trainer(tmp_path, trained_tokenizer, SETS, **best)
