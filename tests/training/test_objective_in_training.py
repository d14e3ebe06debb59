"""The parts of the objective as the trainer runs them, against values worked out beside it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from own_term import NextLatent
from slow_trees import separately
from stepjepa.batch.prepare import prepare
from stepjepa.config.jepa import JepaConfig
from stepjepa.objectives.alignment import SIGReg
from stepjepa.objectives.monitors import RUNNING_SUMS
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.term import TERMS, Context, Term, term
from stepjepa.objectives.text import LMLoss, tube
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import SampledRecord


def trainer(
    folder: Path, tokenizer: Any, config: JepaConfig, objective: Objective | None = None, **changes: Any
) -> JepaTrainer:
    options = {"per_device_train_batch_size": 3, "lr_scheduler_type": "constant", "optim": "sgd"} | changes
    return JepaTrainer(
        tiny.make_model("llama", seed=3),
        tiny.arguments(folder, **options),
        config,
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
        objective=objective,
    )


def lines(run: JepaTrainer) -> list[dict[str, float]]:
    return [line for line in run.state.log_history if "lm_loss" in line]


def test_the_schedule_is_that_of_the_run_and_the_weight_used_is_logged(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = JepaConfig(lbd=0.6, lbd_schedule="warmup", lbd_warmup=1.0)
    run = trainer(tmp_path, trained_tokenizer, config, learning_rate=0.05)
    run.train()
    # Three steps: 0, 1/3 and 2/3 of the way up.
    assert [line["lbd"] for line in lines(run)] == pytest.approx([0.0, 0.2, 0.4])
    for line in lines(run):
        assert line["loss"] == pytest.approx(line["lm_loss"] + line["lbd"] * line["jepa_loss"], rel=1e-4)
    # A term of the user's own can take the name of no other column and of no running sum.
    run.evaluate()
    columns = {name.removeprefix("eval_") for line in run.state.log_history for name in line if name[:6] != "train_"}
    for name in {*columns, *RUNNING_SUMS, "train_loss"} - set(TERMS):
        with pytest.raises(ValueError, match="expected another name for a term"):
            term(name)(type("Own", (Term,), {}))


def test_directions_are_drawn_anew_every_step(trained_tokenizer: Any, tmp_path: Path) -> None:
    """With weights that stay as they are, all that changes from step to step is what SIGReg draws."""
    config = JepaConfig(mode="step-jepa", pairs="all", sigreg=0.5)
    run = trainer(tmp_path, trained_tokenizer, config, learning_rate=0.0, seed=7)
    run.train()
    collator = tiny.collator(trained_tokenizer, config)
    parts = [collator.sequences(SampledRecord(record)) for record in tiny.tokenized(trained_tokenizer, config)]
    with torch.no_grad():
        slow = separately(tiny.make_model("llama", seed=3), parts)
        sides, term = (slow.source, slow.target), SIGReg()
        wanted = [sum(term.value(side, Context(step=step, seed=7)).item() for side in sides) / 2 for step in range(3)]
    assert [line["sigreg_loss"] for line in lines(run)] == pytest.approx(wanted, rel=1e-4)
    assert len(set(wanted)) == 3


def test_triples_are_those_of_the_seed_at_every_evaluation(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = JepaConfig(mode="regular", stp=0.5)
    run = trainer(tmp_path, trained_tokenizer, config, seed=11)
    model, wanted = tiny.make_model("llama", seed=3), 0.0
    with torch.no_grad():
        for index, record in enumerate(tiny.tokenized(trained_tokenizer, config)):
            drawn = np.random.default_rng((11, 0, index)).choice(len(record.ids), 3, replace=False)
            ids = torch.from_numpy(record.ids.astype(np.int64))[None]
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
            wanted += tube(states[sorted(drawn.tolist())][None]).item() / 3
    for given in (None, tiny.records(), prepare(tiny.records(), trained_tokenizer, config, cache_dir=False)):
        assert run.evaluate(given)["eval_stp_loss"] == pytest.approx(wanted, rel=1e-4)


def test_the_best_checkpoint_brings_its_head_and_its_average(trained_tokenizer: Any, tmp_path: Path) -> None:
    config = JepaConfig(mode="step-jepa", predictor_head="linear", target_grad="ema", ema_decay=0.5, lbd=0.7)
    # Called best is the checkpoint with the largest loss, so that it is not the last one.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "jepa_loss", "greater_is_better": True}
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, trained_tokenizer, config, learning_rate=0.3, max_grad_norm=0.0, **best, **every)
    run.train()
    losses = [line["eval_jepa_loss"] for line in run.state.log_history if "eval_jepa_loss" in line]
    assert max(losses) != losses[-1], "the last checkpoint must not be the best one"
    assert run.evaluate()["eval_jepa_loss"] == pytest.approx(max(losses), rel=1e-5)


@dataclass
class Twin(LMLoss):
    """The LM loss, with the name under which its labels were once counted: the evaluation failed."""

    name: ClassVar[str] = "count_lm_loss"


def test_the_counts_of_an_evaluation_take_no_names_of_terms(trained_tokenizer: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, trained_tokenizer, JepaConfig(mode="regular"), Objective([LMLoss(), Twin()]))
    metrics = run.evaluate()
    assert metrics["eval_count_lm_loss"] == metrics["eval_lm_loss"]


def test_held_out_losses_are_those_without_dropout(trained_tokenizer: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, trained_tokenizer, JepaConfig())
    without = run.evaluate()["eval_loss"]
    for layer in run.model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.5))
    run.model.train()
    assert run.evaluate()["eval_loss"] == without
    assert run.model.training


def test_flops_of_the_run_are_logged_as_they_are_spent(trained_tokenizer: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, trained_tokenizer, JepaConfig(mode="step-jepa", target_grad="ema"))
    run.train()
    spent = [line["total_flos"] for line in lines(run)]
    costs = list(islice(run.plan.costs(), 3))
    assert spent == pytest.approx([sum(costs[: step + 1]) for step in range(3)])
    without = trainer(tmp_path, trained_tokenizer, JepaConfig(mode="step-jepa")).plan
    assert costs[0] > next(without.costs())


def test_a_term_of_ones_own_is_trained_logged_and_evaluated(trained_tokenizer: Any, tmp_path: Path) -> None:
    """Beside the LM loss and nothing else; its weights move, and the saved model has none of them."""
    objective = Objective([LMLoss(), NextLatent(0.5)])
    run = trainer(tmp_path, trained_tokenizer, JepaConfig(mode="regular"), objective, learning_rate=0.05)
    before = run.model.term_heads["latent_loss"].weight.detach().clone()
    wanted = run.evaluate()
    run.train()
    assert not torch.equal(run.model.term_heads["latent_loss"].weight, before)
    first, *_, last = lines(run)
    assert first["latent_loss"] == pytest.approx(wanted["eval_latent_loss"], rel=1e-4)
    assert last["latent_loss"] < first["latent_loss"]
    assert first["loss"] == pytest.approx(first["lm_loss"] + 0.5 * first["latent_loss"], rel=1e-5)
    run.save_model(str(tmp_path / "saved"))
    plain, message = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(message[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tmp_path / "saved" / "latent_loss.safetensors").is_file()
    assert not any("latent" in name for name in plain.state_dict())
