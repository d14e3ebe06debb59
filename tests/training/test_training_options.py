"""What a trainer refuses, and what it must not lose."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PrinterCallback
from transformers.trainer_callback import ProgressCallback

import tiny
from own_term import Margin
from stepjepa.base.errors import UserError
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora
from stepjepa.objectives.alignment import Alignment, Cosine, Distance, InfoNCE
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.text import LMLoss
from stepjepa.store.folder import PART
from stepjepa.training.callbacks import BarCallback
from stepjepa.training.trainer import JepaTrainer


def test_a_rate_far_too_high_ends_the_run_before_it_ruins_the_weights(tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(tmp_path, learning_rate=1e30, optim="sgd", max_grad_norm=0.0, per_device_train_batch_size=3),
        JepaConfig(),
        train_dataset=tiny.records() * 3,
        processing_class=tiny_tokenizer,
    )
    with pytest.raises(UserError, match=r"step 2: .* not finite .*lower `learning_rate`"):
        trainer.train()
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


@pytest.mark.parametrize("save_steps", [1, 9])
def test_weights_that_are_not_finite_are_never_saved(save_steps: int, tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(tmp_path, learning_rate=math.inf, max_steps=1, save_strategy="steps", save_steps=save_steps),
        JepaConfig(),
        train_dataset=tiny.records(),
        processing_class=tiny_tokenizer,
    )
    with pytest.raises(UserError, match=r"step 1: the weights are not finite any more, .*lower `learning_rate`"):
        trainer.train()
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_what_a_kill_left_of_a_checkpoint_is_no_part_of_the_next(tiny_tokenizer: Any, tmp_path: Path) -> None:
    left = tmp_path / PART / "checkpoint-1" / "scaler.pt"
    left.parent.mkdir(parents=True)
    left.touch()
    arguments = tiny.arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    more = {"train_dataset": tiny.records(), "processing_class": tiny_tokenizer}
    JepaTrainer(tiny.make_model("llama"), arguments, JepaConfig(), **more).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()
    assert not (tmp_path / "checkpoint-1" / "scaler.pt").exists()


@pytest.mark.parametrize(("name", "bar", "looks"), [("llama", False, False), ("qwen3_moe", True, None)])
def test_one_callback_prints_and_only_experts_may_be_unused(
    name: str, bar: bool, looks: bool | None, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model, arguments = tiny.make_model(name), tiny.arguments(tmp_path, disable_tqdm=not bar)
    trainer = JepaTrainer(
        model, arguments, JepaConfig(), train_dataset=tiny.records(), processing_class=copy.deepcopy(tiny_tokenizer)
    )
    result = [type(each) for each in trainer.callback_handler.callbacks]
    assert [each for each in result if issubclass(each, PrinterCallback | ProgressCallback)] == [BarCallback] * bar
    # What DDP looks for in every step: weights that take no part in it.
    assert trainer.args.ddp_find_unused_parameters is looks


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_leaves_every_module_in_its_mode(
    fails: bool, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(tmp_path),
        JepaConfig(),
        train_dataset=tiny.records(),
        eval_dataset=tiny.records(),
        processing_class=tiny_tokenizer,
        answer_scores=lambda model, rank, world: {"exact": float(model.training), "answers": 3.0},
    )
    trainer.model.train()
    trainer.model.model.layers[1].eval()
    modes = {name: module.training for name, module in trainer.model.named_modules()}
    assert 1 < sum(modes.values()) < len(modes)
    if fails:
        monkeypatch.setattr("stepjepa.training.held_out.jepa_loss", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert trainer.evaluate()["eval_answer_exact"] == 0
    assert {name: module.training for name, module in trainer.model.named_modules()} == modes


def test_losses_that_compare_pairs_do_not_sort_their_negatives_by_length(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Not for a distance of the user's own, either; and a batch of one pair is refused for it."""
    orders = {}
    for distance in (Cosine(), InfoNCE(), Margin()):

        def of(batch_size: int, chosen: Distance = distance) -> JepaTrainer:
            return JepaTrainer(
                tiny.make_model("llama"),
                tiny.arguments(tmp_path, per_device_train_batch_size=batch_size),
                train_dataset=tiny.records() * 9,
                processing_class=copy.deepcopy(tiny_tokenizer),
                objective=Objective([LMLoss(), Alignment(0.1, chosen)]),
            )

        trainer = of(7)
        keys = list(trainer._get_train_sampler())
        lengths = trainer.prepared.dataset.lengths if trainer.prepared else []
        orders[distance] = [lengths[key.record] for key in keys[:7]]
        if distance.compares_pairs:
            with pytest.raises(ValueError, match="the loss compares the pairs of a micro-batch, and a batch of 1"):
                of(1)
    assert orders[Cosine()] == sorted(orders[InfoNCE()]) != orders[InfoNCE()] == orders[Margin()]


def test_settings_of_the_objective_without_effect_are_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """No loss has a weight, a held-out loss would be 0, or a field needs another one."""

    def make(jepa: JepaConfig, *, trains: bool = True, **changes: Any) -> JepaTrainer:
        return JepaTrainer(
            tiny.make_model("llama"),
            tiny.arguments(tmp_path, **changes),
            jepa,
            train_dataset=tiny.records() if trains else None,
            eval_dataset=tiny.records(),
            processing_class=copy.deepcopy(tiny_tokenizer),
        )

    for idle in ({"lbd": 0.0}, {"jepa_epochs": 0.0}, {"jepa_ratio": 0.0, "sigreg": 0.1}, {"mode": "regular"}):
        with pytest.raises(ValueError, match="no step has a loss whose weight is above 0, so nothing would be trained"):
            make(JepaConfig(gamma=0.0, **idle))
    epochs = {"max_steps": -1, "num_train_epochs": 2}
    for some in ({"jepa_ratio": 0.5}, {"jepa_epochs": 1.5}):
        told = f"`{next(iter(some))}` leaves steps without views, .* train nothing; leave `{next(iter(some))}` out"
        with pytest.raises(ValueError, match=told):
            make(JepaConfig(gamma=0.0, **some), **epochs)
        make(JepaConfig(gamma=0.0, **some), trains=False, **epochs)
        make(JepaConfig(gamma=0.0, stp=0.1, **some), **epochs)
    make(JepaConfig(gamma=0.0, jepa_epochs=2.0), **epochs)
    make(JepaConfig(mode="regular", gamma=0.0), trains=False)
    make(JepaConfig(mode="regular", gamma=0.0, stp=0.1))
    make(JepaConfig(gamma=0.0, lbd_schedule="warmup"))
    for field, needed in (("ema_decay", "target_grad ema"), ("infonce_temperature", "jepa_loss_type infonce")):
        with pytest.raises(UserError, match=f"`{field}` does nothing without `{needed}`; add it or leave it out"):
            make(JepaConfig(**{field: 0.5}))
    for cause, idle in (({"mode": "regular"}, {"lbd": 0.3}), ({"lbd": 0.0}, {"target_grad": "ema"})):
        with pytest.raises(UserError, match=f"`{next(iter(idle))}` does nothing with it; leave one out"):
            make(JepaConfig(**cause, **idle))
    infonce = JepaConfig(jepa_loss_type="infonce")
    # With all pairs it depends on the records.
    for jepa in (infonce, JepaConfig(jepa_loss_type="infonce", pairs="all")):
        with pytest.raises(ValueError, match=r"a held-out batch of 1 has one, .* raise `per_device_eval_batch_size`"):
            make(jepa, per_device_eval_batch_size=1)
    make(JepaConfig(mode="step-jepa", jepa_loss_type="infonce", pairs="all"), per_device_eval_batch_size=1)
    make(JepaConfig(), per_device_eval_batch_size=1)


def test_a_whole_adapter_run_through_the_trainer(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model: Any = add_lora(tiny.make_model("llama"), LoraSettings(3), all_predictor_ids(tiny_tokenizer))
    trainer = JepaTrainer(
        model,
        tiny.arguments(tmp_path, learning_rate=0.1, per_device_train_batch_size=3),
        JepaConfig(mode="step-jepa", predictors=2),
        train_dataset=tiny.records(),
        processing_class=tiny_tokenizer,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    for name, parameter in model.named_parameters():
        assert bool((parameter != before[name]).any()) == parameter.requires_grad, name
