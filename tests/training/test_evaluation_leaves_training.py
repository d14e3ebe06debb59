"""An evaluation while a model is trained changes nothing of the training: no random number, no weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

import tiny
from stepjepa import JepaConfig, JepaTrainer, RunConfig, run
from stepjepa.base.files import write_jsonl

ROWS = [{"messages": list(record.messages)} for record in tiny.records() * 2]


class Draws(TrainerCallback):
    """Draws random numbers while the metrics of an evaluation are passed on, as a user's callback may."""

    def on_evaluate(self, *arguments: Any, **kwargs: Any) -> None:
        torch.rand(3)


class DrawnScores:
    """Scores of a user that draw random numbers."""

    names = ("exact",)

    def __call__(self, *arguments: Any) -> dict[str, float]:
        torch.rand(5)
        return {"exact": 1.0, "answers": 1.0}


def drawn_ranks(*arguments: Any) -> dict[str, float]:
    torch.rand(7)
    return {"hits_at_1": 1.0}


def with_dropout() -> Any:
    """A model with an adapter whose input is dropped at random."""
    torch.manual_seed(5)
    return get_peft_model(tiny.make_model("llama", seed=3), LoraConfig(lora_dropout=0.3, target_modules="all-linear"))


NOISES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "NEFTune": (lambda: tiny.make_model("llama", seed=3), {"neftune_noise_alpha": 5.0}),
    "dropout of LoRA": (with_dropout, {}),
}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "every step": {"eval_strategy": "steps", "eval_steps": 1},
    "by workers": {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": 2},
    "on start": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
}


def make_trainer(noise: str, folder: Path, tokenizer: Any, **changes: Any) -> JepaTrainer:
    make_model, noisy = NOISES[noise]
    return JepaTrainer(
        make_model(),
        tiny.arguments(folder, max_steps=4, learning_rate=1e-2, **noisy, **changes),
        JepaConfig(mode="llm-jepa", predictors=0),
        train_dataset=ROWS,
        eval_dataset={"some": ROWS[:5], "others": ROWS[3:]},
        processing_class=copy.deepcopy(tokenizer),
        callbacks=[Draws()],
        answer_scores=DrawnScores(),
        retrieval_scores=drawn_ranks,
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("noise", NOISES)
def test_evaluations_change_no_weight(noise: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    alone = make_trainer(noise, tmp_path / "alone", trained_tokenizer, eval_strategy="no")
    alone.train()
    weights = {name: weight.clone() for name, weight in alone.model.state_dict().items()}
    for name, changes in EVALUATIONS.items():
        trainer = make_trainer(noise, tmp_path / name, trained_tokenizer, **changes)
        trainer.train()
        assert trainer.evaluated
        trained = trainer.model.state_dict()
        assert all(torch.equal(trained[name], weight) for name, weight in weights.items()), name
    # There is noise that could be another.
    other = make_trainer(noise, tmp_path / "other", trained_tokenizer, eval_strategy="no", seed=43, data_seed=42)
    other.train()
    assert not all(torch.equal(other.model.state_dict()[name], weight) for name, weight in weights.items())


def test_an_evaluation_and_its_loaders_leave_the_random_state(trained_tokenizer: Any, tmp_path: Path) -> None:
    trainer = make_trainer("NEFTune", tmp_path, trained_tokenizer)
    before = torch.get_rng_state()
    metrics = trainer.evaluate()
    assert (metrics["eval_answer_exact"], metrics["eval_retrieval_hits_at_1"]) == (1.0, 1.0)
    assert sum(1 for _ in trainer.get_eval_dataloader("some")) == 1
    assert sum(1 for _ in trainer.get_test_dataloader(ROWS)) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_answers_and_retrieval_during_training_change_no_weight(trained_tokenizer: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "held_out.jsonl", ROWS[:5])
    trainer = {"max_steps": 3, "use_cpu": True, "save_strategy": "no", "report_to": "none", "neftune_noise_alpha": 5.0}
    scores = {"eval_file": str(tmp_path / "held_out.jsonl"), "eval_steps": 1, "eval_generate": 3}
    weights = []
    for name, more in {"alone": {}, "scored": {**scores, "eval_max_new_tokens": 2, "eval_retrieval": True}}.items():
        config = RunConfig(output_dir=tmp_path / name, learning_rate=1e-2, trainer=trainer, **more)
        model, tokenizer = tiny.make_model("llama", seed=3), copy.deepcopy(trained_tokenizer)
        run(config, model=model, tokenizer=tokenizer, train_dataset=ROWS)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
