"""The interface of every loss: what it is a mean over, and its sum on a micro-batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.errors import UserError
from stepjepa.own_code import load_class

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.models.encode import Encoded


def alone(rows: Tensor) -> tuple[Tensor, int]:
    """:func:`gather_rows` of a single process."""
    return rows, 0


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """The rows ``[P, D]`` of all processes, in the order of their ranks; P may differ from process to process.

    Every process must call it, also with no rows.

    Returns:
        ``[P of all, D]``, through which gradients flow back to where each row came from, and the index in it of this
        process's first row.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return rows, 0
    from torch.distributed.nn.functional import all_gather

    counts = torch.cat(all_gather(torch.tensor([len(rows)], device=rows.device))).tolist()
    if not any(counts):
        return rows, 0
    # Collectives take tensors of one shape.
    parts = all_gather(F.pad(rows, (0, 0, 0, max(counts) - len(rows))))
    found = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return found, sum(counts[: dist.get_rank()])


@dataclass(frozen=True)
class Context:
    """What a term may depend on beside a micro-batch.

    Attributes:
        step: number of the optimizer step, from 0.
        seed: of the run; what a term draws at random must depend on it, the step and ``Members.draws`` alone, so that a
            resumed run draws the same.
        progress: share of the run that is over, 0 to 1; None outside training, where weights have no schedule.
        gather: brings in rows of other processes, see :func:`gather_rows`; to be called equally often on each.
        averaged: a batch and a layer to the hidden states ``[R * T, D]`` under averaged weights; None if none are kept.
    """

    step: int = 0
    seed: int = 42
    progress: float | None = None
    gather: Callable[[Tensor], tuple[Tensor, int]] = alone
    averaged: Callable[[Batch, int], Tensor] | None = None


@dataclass
class Term(ABC):
    """One part of the objective, a mean over what it counts.

    The trainer adds up the counts of a whole optimizer step, over accumulation and processes, divides each term's sums
    by its own count, and adds up the weighted means. So a term is right under accumulation, DDP and FSDP without
    knowing of them.

    Attributes:
        weight: of the mean in the objective.
    """

    name: ClassVar[str]
    """Name in logs, such as ``lm_loss``; :func:`term` sets it."""
    words: ClassVar[str]
    """What people are told that it is."""
    layers: ClassVar[tuple[int, ...]] = (-1,)
    """Hidden states that it reads with ``Encoded.at``."""
    of_pairs: ClassVar[bool] = False
    """It is a mean over pairs of views: there is none in regular training and in steps without views."""
    head_name: ClassVar[str | None] = None
    """What its own weights are called; None for its name."""

    weight: float = 1.0

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """What the mean is over: labels, pairs, tokens ...; known before the forward pass."""

    @abstractmethod
    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """The sum over the micro-batch, a float32 scalar; with gradient 0, not none, where there is nothing to sum."""

    @property
    def compares_pairs(self) -> bool:
        """Whether it depends on which pairs share a micro-batch."""
        return False

    def weight_at(self, progress: float | None) -> float:
        """The weight at a share of the run, 0 to 1; None for the weight itself."""
        return self.weight

    @property
    def logged_weight(self) -> str | None:
        """Under which name the weight is logged where it changes over the run; None where it does not."""
        return None

    def modules(self, config: Any) -> nn.Module | None:
        """Weights of its own, trained and resumed with the model and no part of what is saved as the model.

        They are found again in ``encoded.heads[name]`` (or ``head_name``).

        Args:
            config: of the model's decoder (``model.config.get_text_config()``).
        """
        return None


TERMS: dict[str, type[Term]] = {}
"""All terms by name, in the order in which they are logged."""


def term(name: str, words: str | None = None) -> Callable[[type[Term]], type[Term]]:
    """Register a class of terms.

    Args:
        name: in logs.
        words: what people are told; None for the name.
    """

    def register(cls: type[Term]) -> type[Term]:
        cls.name, cls.words = name, words or name
        TERMS[name] = cls
        return cls

    return register


def load_term(address: str, settings: Mapping[str, Any]) -> Term:
    """A term of the user's own (``--term``, ``--term_args``).

    Args:
        address: ``module:Class``; the working folder is looked in, too.
        settings: fields of the class.

    Raises:
        UserError: there is no such class, it has no name, or it does not take these settings.
    """
    kind = load_class("--term", address, Term)  # type: ignore[type-abstract]  # what is loaded is concrete
    if not hasattr(kind, "name"):
        raise UserError(f"--term: '{address}' has no name; put @stepjepa.term('my_loss') above the class")
    known = [each.name for each in fields(kind) if each.init]
    if unknown := [name for name in settings if name not in known]:
        raise UserError(f"--term_args: '{address}' has no setting '{unknown[0]}'; it has {', '.join(known)}")
    try:
        made = kind(**settings)
        if not 0 <= made.weight < math.inf:
            raise ValueError(f"weight: expected 0 or more, got {made.weight}")
    except (TypeError, ValueError) as error:
        raise UserError(f"--term_args: '{address}' does not take these settings: {error}") from None
    return made
