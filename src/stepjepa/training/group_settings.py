"""Settings in the parameter groups of an optimizer: those that a launch changes are applied to a loaded checkpoint.

Optimizers and schedules also count there, and keep what they have measured: only a setting with which the launch that
saved the checkpoint began otherwise is a change of the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from stepjepa.base.json_object import JsonObject

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Settings = list[JsonObject]
"""The settings of each parameter group of an optimizer, by name."""

HYPERPARAMETERS = (
    *("initial_lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "amsgrad", "maximize"),
    *("alpha", "centered", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    *("beta1", "decay_rate", "clip_threshold", "scale_parameter", "relative_step", "warmup_init", "correct_bias"),
)
"""Settings that no optimizer of torch or transformers changes in training."""


class StartSettings:
    """The settings with which an optimizer begins its training, which a further call of ``train`` continues."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._settings: Settings = []

    def of(self, optimizer: Optimizer | None) -> Settings:
        """Return the settings that an optimizer had when it was first passed here, before it was trained."""
        if optimizer is not self._optimizer:
            groups = getattr(optimizer, "param_groups", ())
            of_groups = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            self._optimizer, self._settings = optimizer, copy.deepcopy(of_groups)
        return self._settings


def apply_settings(
    settings: Settings, before: Settings | None, optimizer: Optimizer | None, schedule: LRScheduler | None
) -> None:
    """Override settings that an optimizer and its schedule loaded from a checkpoint by those that this launch changes.

    Without this a changed learning rate would have no effect, and the first step of a run that was made longer would
    have the rate of the last, shorter schedule: 0 behind its end.

    Args:
        settings: those with which the optimizer of this launch begins.
        before: those with which that of the launch that saved the checkpoint began; None for a checkpoint of an earlier
            version, which lacks them: then the :data:`HYPERPARAMETERS` are applied.
        optimizer: the optimizer with the loaded state.
        schedule: the schedule with the loaded state.

    Raises:
        ValueError: the learning rate changes, and the schedule is of a class whose rate can't be changed.
    """
    groups = getattr(optimizer, "param_groups", ())
    old, rates = ([_start_rate(group) for group in of] for of in (groups if before is None else before, settings))
    # Some schedules leave no start rate in the groups.
    known = before is not None or any("initial_lr" in group for group in groups)
    for number, (group, values) in enumerate(zip(groups, settings, strict=True)):
        changed = HYPERPARAMETERS if before is None else _changed(before[number], values)
        group.update({name: copy.deepcopy(values[name]) for name in changed if name in values})
    inner = getattr(schedule, "scheduler", schedule)
    if not isinstance(inner, LambdaLR):
        if rates == old or not known:
            return
        raise ValueError(
            f"expected the learning rate {old[0]} of the checkpoint, which the schedule keeps; got {rates[0]}"
        )
    inner.base_lrs = list(rates)
    inner._last_lr = [rate * factor(inner.last_epoch) for rate, factor in zip(rates, inner.lr_lambdas, strict=True)]
    for group, rate in zip(groups, inner._last_lr, strict=True):
        group["lr"] = rate


def _start_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate with which a parameter group began, as far as its schedule keeps it."""
    return float(group.get("initial_lr", group["lr"]))


def _changed(before: JsonObject, now: JsonObject) -> Sequence[str]:
    """List the settings of a group that are others now, without the rate, which the schedule sets."""
    return [name for name in now if name != "lr" and not (name in before and _equal(before[name], now[name]))]


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first.cpu(), second.cpu())
    return bool(first == second)
