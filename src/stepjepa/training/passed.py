"""The arguments that a ``JepaTrainer`` was given, recorded before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Passed:
    """The names that a ``JepaTrainer`` was given, and which of its arguments were objects."""

    model: str | None  # a folder, hub id or preset; None for an object
    train: str | None  # a file, folder or hub data set; None for records
    held_out: str | None
    tokenizer: bool
    objective: bool
    optimizer: bool
    views: bool


def passed(
    model: object,
    train: object,
    held_out: object,
    *,
    tokenizer: object,
    objective: object,
    optimizer: object,
    views: object,
) -> Passed:
    """Record the arguments of a trainer, before any of them is loaded; arguments as for ``JepaTrainer``."""
    names = [
        os.fspath(argument) if isinstance(argument, str | os.PathLike) else None
        for argument in (model, train, held_out)
    ]
    return Passed(
        model=names[0],
        train=names[1],
        held_out=names[2],
        tokenizer=tokenizer is not None,
        objective=objective is not None,
        optimizer=optimizer is not None,
        views=views is not None,
    )
