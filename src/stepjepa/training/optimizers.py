"""Optimizers and schedules that a ``JepaTrainer`` has in place of those of its arguments: checks, description, mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Trainer

from stepjepa.base.json_object import JsonObject

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def optimizer_and_schedule(optimizers: object) -> tuple[Any, Any]:
    """Return an optimizer and its schedule, None for each that Trainer makes; ``TypeError`` for no such pair."""
    if optimizers is None:
        return None, None
    if isinstance(optimizers, tuple | list) and len(optimizers) == 2:
        return optimizers[0], optimizers[1]
    got = f"{len(optimizers)} values" if isinstance(optimizers, tuple | list) else type(optimizers).__name__
    raise TypeError(f"optimizers: expected (optimizer, schedule), each of which may be None, got {got}")


def check_optimizer(optimizer: Optimizer | None, model: nn.Module, before: set[nn.Parameter]) -> None:
    """Raise a ``ValueError`` for an optimizer of another model, or without weights that the objective has added.

    Args:
        optimizer: as it was passed; None for none.
        model: the model as it is trained, with rows of new tokens and the heads of terms.
        before: the model's own weights, without those that the objective has added. An optimizer need not hold them.
    """
    if optimizer is None:
        return
    held = {weight for group in optimizer.param_groups for weight in group["params"]}
    if held - {*model.parameters()}:
        raise ValueError(
            "optimizers: the optimizer holds weights that are none of this model; make it of the parameters of the "
            "model that you pass"
        )
    added = [name for name, weight in model.named_parameters() if weight.requires_grad and weight not in before | held]
    if added:
        raise ValueError(
            f"optimizers: the optimizer lacks weights that the objective adds to the model, such as {added[0]}; "
            f"optimizer_cls_and_kwargs=({type(optimizer).__name__}, {{'lr': ...}}) makes one of all that is trained"
        )


def use_evaluation_weights(optimizer: object) -> None:
    """Switch an optimizer that has other weights for evaluation, as schedule-free ones do, to those.

    Trainer switches back at the next micro-batch of training.
    """
    if callable(switch := getattr(optimizer, "eval", None)):
        switch()


def own_settings(trainer: Any, *, optimizer: bool, schedule: bool) -> JsonObject:
    """Return what optimizer and schedule of a trainer are where its arguments describe others; empty where they don't.

    Args:
        trainer: a ``JepaTrainer`` that is about to train.
        optimizer: the optimizer was passed, or assigned.
        schedule: the same of the schedule.
    """
    settings: JsonObject = {"lr_scheduler_type": type(trainer.lr_scheduler).__name__} if schedule else {}
    if optimizer:
        return _settings_of(trainer.optimizer) | settings
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, values = trainer.optimizer_cls_and_kwargs
        return {"optim": kind.__name__, "learning_rate": values.get("lr"), **settings}
    if type(trainer).create_optimizer is not Trainer.create_optimizer:
        return {"optim": type(trainer).create_optimizer.__qualname__, **settings}
    return settings


def _settings_of(optimizer: Optimizer) -> JsonObject:
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    decays = [float(group.get("weight_decay", 0.0)) for group in optimizer.param_groups]
    of_groups = {"learning_rate": rates, "weight_decay": decays}
    values = {
        name: group_values[0] if len(set(group_values)) == 1 else group_values
        for name, group_values in of_groups.items()
    }
    return {"optim": type(getattr(optimizer, "optimizer", optimizer)).__name__, **values}
