"""The interface of every term of the objective: the count that its mean is over, and its sum on a micro-batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.user_code import load_class
from stepjepa.objectives.monitors import MONITORS, RUNNING_SUMS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stepjepa.batch.micro_batch import Batch
    from stepjepa.models.encoded import Encoded
    from stepjepa.objectives.cached_pairs import CachedPairs


def no_gather(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of this process, as :func:`gather_rows` does for a single one."""
    return rows, 0


def process_count() -> int:
    """Return the number of processes of torch's process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Gather the rows ``[P, D]`` of all processes, in rank order.

    Returns the rows, and the index of this process's first one. Gradients flow back to the process of each row. P may
    differ between processes; every process must call it, even with no rows.
    """
    if process_count() == 1:
        return rows, 0
    from torch.distributed.nn.functional import all_gather

    counts = torch.cat(all_gather(torch.tensor([len(rows)], device=rows.device))).tolist()
    if not any(counts):
        return rows, 0
    # Collectives take tensors of equal shapes.
    padded = all_gather(F.pad(rows, (0, 0, 0, max(counts) - len(rows))))
    joined = torch.cat([part[:count] for part, count in zip(padded, counts, strict=True)])
    return joined, sum(counts[: dist.get_rank()])


@dataclass(frozen=True)
class Context:
    """State of the run that a term may use beside the micro-batch.

    Random draws of a term must depend on seed, step and ``BatchRecords.rng_keys`` alone, so that a resumed run draws
    the same.

    Attributes:
        step: optimizer step, from 0.
        seed: the run's seed.
        progress: completed fraction of the run; None outside training: weights have no schedule.
        gather: takes rows ``[P, ...]`` of this process; returns those of all processes, and the index of its own first
            one. A collective call, which every process must make.
        ema_states: takes a batch and a layer, and returns hidden states ``[cells, D]`` under averaged weights, with
            ``target_grad='ema'``; None otherwise.
        cached: terms that compare the pairs of the whole step, worked out before; None to compare those of the
            micro-batch.
    """

    step: int = 0
    seed: int = 42
    progress: float | None = None
    gather: Callable[[Tensor], tuple[Tensor, int]] = no_gather
    ema_states: Callable[[Batch, int], Tensor] | None = None
    cached: CachedPairs | None = None


@dataclass
class Term(ABC):
    """One term of the objective: a weighted mean, given as a sum and a count.

    The trainer sums the counts of a whole optimizer step, over accumulation and processes, divides each term's sum by
    its count, and adds up the weighted means. So a term is right under accumulation, DDP and FSDP without knowing of
    them.

    Attributes:
        weight: weight of the mean in the objective.
    """

    name: ClassVar[str]  # name in logs, such as 'lm_loss'; set by @term
    label: ClassVar[str]  # name on the screen; set by @term
    layers: ClassVar[tuple[int, ...]] = (-1,)  # hidden states that it reads with Encoded.at
    of_pairs: ClassVar[bool] = False  # a mean over pairs: 0 in regular training and in steps without views
    compares_pairs: ClassVar[bool] = False  # its value depends on which pairs share a micro-batch, or a step
    reads_router_logits: ClassVar[bool] = False  # it reads Encoded.router_logits, of a mixture of experts
    head_name: ClassVar[str | None] = None  # name of its own weights; None for the term's name

    weight: float = 1.0

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """Return the denominator of the mean for one batch (labels, pairs or tokens), known before the forward pass."""

    @abstractmethod
    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Compute the sum over one batch, a float32 scalar.

        An empty sum is 0 with a gradient of 0 (``states[:0].sum()``), so that every parameter takes part in a step.

        Args:
            encoded: hidden states of the batch, embeddings of its pairs, and the LM head.
            batch: its labels, pairs and records.
            context: step, seed and progress of the run, and the gathering of rows over processes.
        """

    def weight_at(self, progress: float | None) -> float:
        """Return the weight at a completed fraction of the run, 0 to 1; None for the weight without a schedule."""
        return self.weight

    @property
    def logged_weight(self) -> str | None:
        """Name of the log column of the weight, if the weight changes over the run."""
        return None

    def modules(self, config: PreTrainedConfig) -> nn.Module | None:
        """Make weights of the term's own, which are trained and resumed with the model but not saved as part of it.

        They are in ``encoded.heads``. ``config`` is the decoder's (``model.config.get_text_config()``).
        """
        return None


def checked_sum(term: Term, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
    """Call a term; raise a ``TypeError`` that names the term if it gives anything but a scalar tensor."""
    value: object = term(encoded, batch, context)
    if isinstance(value, Tensor) and not value.dim():
        return value
    got = f"shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"term '{term.name}': expected its sum over the batch, a tensor of shape [], got {got}")


TERMS: dict[str, type[Term]] = {}
"""All registered terms by name."""

# Names that terms can't have: keys of losses, checkpoint files or columns of log lines.
_RESERVED = {"loss", "source", "target", "model", "adapter_model", "ema", *RUNNING_SUMS, *MONITORS}
_RESERVED |= {"step", "epoch", "grad_norm", "learning_rate", "total_flos", "num_tokens", "runtime", "train_loss"}
_RESERVED |= {"lbd", "without_pair_share"}
_RESERVED |= {f"{unit}_per_second" for unit in ("tokens", "records", "pairs", "samples", "steps")}


AnyTerm = TypeVar("AnyTerm", bound=Term)


def term(name: str, label: str | None = None) -> Callable[[type[AnyTerm]], type[AnyTerm]]:
    """Register a class of terms under its name in logs; ``label`` is its name on the screen, by default the same.

    TypeError for what is no class of terms, ValueError for a name that logs or checkpoints use for something else.
    """
    if callable(name):
        raise TypeError("expected the name of the term in logs: @term('my_loss')")

    def register(cls: type[AnyTerm]) -> type[AnyTerm]:
        _check_class(cls)
        if reserved := {name, cls.head_name} & _RESERVED:
            raise ValueError(
                f"expected another name for a term than '{reserved.pop()}', which logs or checkpoints use for "
                "something else"
            )
        cls.name, cls.label = name, label or name
        TERMS[name] = cls
        return cls

    return register


def _check_class(cls: object) -> None:
    """Raise a ``TypeError`` for what is no class of terms."""
    if not (isinstance(cls, type) and issubclass(cls, Term)):
        kind = getattr(cls, "__name__", type(cls).__name__)
        raise TypeError(f"term: expected a class derived from stepjepa.Term, got '{kind}'")


def load_term(address: str, settings: JsonObject) -> Term:
    """Make a term of a user's class ``module:Class`` with these fields (settings ``term`` and ``term_args``).

    Args:
        address: ``module:Class``.
        settings: fields of the class, by name.

    Raises:
        UserError: the class can't be loaded, is no registered term, or does not take these settings.
    """
    kind = load_class("term", address, Term)  # type: ignore[type-abstract]  # it raises an error for abstract classes
    if not hasattr(kind, "name"):
        raise UserError(f"term: '{address}' has no name; put @stepjepa.term('my_loss') above the class")
    names = [attribute.name for attribute in fields(kind) if attribute.init]
    if unknown := settings.keys() - names:
        raise UserError(f"term_args: '{address}' has no setting '{min(unknown)}'; it has {', '.join(names)}")
    try:
        made_term = kind(**settings)
        if not 0 <= made_term.weight < math.inf:
            raise ValueError(f"weight: expected 0 or more, got {made_term.weight}")
    except (TypeError, ValueError) as error:
        raise UserError(f"term_args: '{address}' does not take these settings: {error}") from None
    return made_term
