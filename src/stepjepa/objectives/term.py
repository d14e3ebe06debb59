"""The interface of every loss: what its mean is over, and its sum on a micro-batch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.base.errors import UserError
from stepjepa.config.option import load_class


def alone(rows: Tensor) -> tuple[Tensor, int]:
    """:func:`gather_rows` of a single process."""
    return rows, 0


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """The rows ``[P, D]`` of all processes, in the order of their ranks, and the index of this process's first row.

    Gradients flow back to where each row came from. P may differ; every process must call it, also with no rows.
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

    Random draws of a term must depend on seed, step and ``BatchRecords.rng_keys`` alone, so that a resumed run draws
    the same.
    """

    step: int = 0  # number of the optimizer step, from 0
    seed: int = 42  # of the run
    progress: float | None = None  # share of the run that is over; None outside training: weights have no schedule
    gather: Callable[[Tensor], tuple[Tensor, int]] = alone  # see gather_rows; to be called equally often on each
    averaged: Callable[[Any, int], Tensor] | None = None  # batch, layer -> [R * T, D] states under averaged weights


@dataclass
class Term(ABC):
    """One part of the objective, a mean over what it counts.

    The trainer adds up the counts of a whole optimizer step, over accumulation and processes, divides each term's sums
    by its own count, and adds up the weighted means. So a term is right under accumulation, DDP and FSDP without
    knowing of them.
    """

    name: ClassVar[str]  # in logs, such as 'lm_loss'; set by @term
    words: ClassVar[str]  # name on the screen
    layers: ClassVar[tuple[int, ...]] = (-1,)  # hidden states that it reads with Encoded.at
    of_pairs: ClassVar[bool] = False  # a mean over pairs: none in regular training and in steps without views
    compares_pairs: ClassVar[bool] = False  # depends on which pairs share a micro-batch
    reads_router_logits: ClassVar[bool] = False  # reads Encoded.router_logits, of a mixture of experts
    head_name: ClassVar[str | None] = None  # of its own weights; None for the term's name

    weight: float = 1.0  # of the mean in the objective

    @abstractmethod
    def count(self, batch: Any) -> int:
        """What the mean is over in a ``micro_batch.Batch``, known before the forward pass: labels, pairs, tokens."""

    @abstractmethod
    def __call__(self, encoded: Any, batch: Any, context: Context) -> Tensor:
        """The sum over a ``micro_batch.Batch``, of its ``encode.Encoded`` hidden states: a float32 scalar.

        Where there is nothing to sum it is 0 with a gradient of 0, not without a gradient.
        """

    def weight_at(self, progress: float | None) -> float:
        """The weight at a share of the run, 0 to 1; None for the weight itself."""
        return self.weight

    @property
    def logged_weight(self) -> str | None:
        """The column of the weight, if it changes over the run."""
        return None

    def modules(self, config: Any) -> nn.Module | None:
        """Weights of its own, trained and resumed with the model, but not saved as part of it.

        They are in ``encoded.heads``. ``config`` is that of the decoder (``model.config.get_text_config()``).
        """
        return None


TERMS: dict[str, type[Term]] = {}
"""All terms by name."""

# What else stands beside the terms: in sums and losses, in files of a checkpoint, in lines of logs.
_TAKEN = {"loss", "source", "target", "steps", "jepa_steps", "matched", "shuffled", "pairs", "crossings", "tokens"}
_TAKEN |= {"records", "records_with_views", "records_without_pair", "model", "adapter_model", "ema"}
_TAKEN |= {"step", "epoch", "grad_norm", "learning_rate", "total_flos", "num_tokens", "runtime", "without_pair_share"}
_TAKEN |= {"matched_similarity", "shuffled_similarity", "retrieval_top1", "rank_pairs"}
_TAKEN |= {f"{side}_rank{kind}" for side in ("source", "target") for kind in ("", "_centred")}
_TAKEN |= {f"{what}_per_second" for what in ("tokens", "records", "pairs", "samples", "steps")}


def term(name: str, words: str | None = None) -> Callable[[type[Term]], type[Term]]:
    """Register a class of terms under its name in logs, with its name on the screen (None for the same).

    ValueError for a name that something else in logs or checkpoints has.
    """

    def register(cls: type[Term]) -> type[Term]:
        if taken := {name, cls.head_name} & _TAKEN:
            told = f"expected a name of its own for a term, got '{taken.pop()}', which stands for something else"
            raise ValueError(f"{told} in logs or checkpoints")
        cls.name, cls.words = name, words or name
        TERMS[name] = cls
        return cls

    return register


def load_term(address: str, settings: Mapping[str, Any]) -> Term:
    """Make a term of the user's own class ``module:Class`` with these fields (``--term``, ``--term_args``)."""
    kind = load_class("--term", address, Term)  # type: ignore[type-abstract]  # what is loaded is concrete
    if not hasattr(kind, "name"):
        raise UserError(f"--term: '{address}' has no name; put @stepjepa.term('my_loss') above the class")
    known = [each.name for each in fields(kind) if each.init]
    if unknown := settings.keys() - known:
        raise UserError(f"--term_args: '{address}' has no setting '{min(unknown)}'; it has {', '.join(known)}")
    try:
        made = kind(**settings)
        if not 0 <= made.weight < math.inf:
            raise ValueError(f"weight: expected 0 or more, got {made.weight}")
    except (TypeError, ValueError) as error:
        raise UserError(f"--term_args: '{address}' does not take these settings: {error}") from None
    return made
