"""A resumed run trains with the learning rate and weight decay that it is given, not with those of its checkpoint."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """What each parameter group of an optimizer is set to, its parameters left out."""
    groups = getattr(optimizer, "param_groups", ())
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def apply_settings(wanted: list[dict[str, Any]], optimizer: Any, schedule: Any) -> None:
    """Set an optimizer and its schedule, whose states were loaded, to what this launch asks for.

    The checkpoint's values stand in both states, so that without this a changed learning rate would do nothing.

    Args:
        wanted: of :func:`settings_of`, from before the states were loaded.
        optimizer: gets them, but for the learning rate, which its schedule sets.
        schedule: goes on at its step, from the learning rates that are wanted.

    Raises:
        ValueError: the learning rate is another, and the schedule is of a kind that has none of its own.
    """
    groups = getattr(optimizer, "param_groups", ())
    rates: list[Any] = [group.get("initial_lr", group.get("lr")) for group in wanted]
    changed = rates != [group.get("initial_lr", group.get("lr")) for group in groups]
    for group, values in zip(groups, wanted, strict=True):
        group.update({name: value for name, value in values.items() if name != "lr"})
    if not changed:
        return
    inner = getattr(schedule, "scheduler", schedule)
    if not isinstance(inner, LambdaLR):
        kind = type(inner).__name__
        raise ValueError(f"expected the learning rate of the checkpoint, got {rates[0]}: {kind} can't change it")
    inner.base_lrs = list(rates)
    inner._last_lr = [rate * factor(inner.last_epoch) for rate, factor in zip(rates, inner.lr_lambdas, strict=True)]
    for group, rate in zip(groups, inner._last_lr, strict=True):
        group["lr"] = rate
