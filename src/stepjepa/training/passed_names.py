"""The names that a ``JepaTrainer`` was passed in place of objects, recorded before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Self

from stepjepa.base.arguments import expanded


@dataclass(frozen=True)
class PassedNames:
    """The names that a ``JepaTrainer`` was passed, and which of its optional arguments were passed."""

    model: str | None  # a folder, hub id or preset; None for an object
    train: str | None  # a file, folder or hub data set; None for records
    held_out: str | None  # the same of held-out records; None for several sets of them
    has_tokenizer: bool  # whether a tokenizer was passed
    has_objective: bool  # whether an objective was passed
    has_optimizer: bool  # whether an optimizer was passed
    has_views: bool  # whether a function was passed that gives the views

    @classmethod
    def of(
        cls,
        model: object,
        train: object,
        held_out: object,
        *,
        tokenizer: object,
        objective: object,
        optimizer: object,
        views: object,
    ) -> Self:
        """Record the arguments of a trainer, before any of them is loaded; arguments as for ``JepaTrainer``."""
        return cls(
            model=_name(model),
            train=_name(train),
            held_out=_name(held_out),
            has_tokenizer=tokenizer is not None,
            has_objective=objective is not None,
            has_optimizer=optimizer is not None,
            has_views=views is not None,
        )

    def with_held_out(self, held_out: object) -> Self:
        """Return the same for other held-out records."""
        return replace(self, held_out=_name(held_out))


def _name(argument: object) -> str | None:
    """Return the name that an argument is; None for an object."""
    return expanded(argument) if isinstance(argument, str | os.PathLike) else None
