"""The alignment loss: a distance between the two embeddings of each pair, summed over the pairs of a micro-batch.

Terms that act on one set of embeddings, against collapse, are in ``regularizers``.

An embedding without a direction (of length 0) has no cosine: a pair with one adds exactly 0 to a loss that compares
directions, and gets exactly 0 as its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stepjepa.config import DEFAULTS
from stepjepa.models.heads import PredictorHead
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.config import LbdSchedule
    from stepjepa.models.encode import Encoded

SHORTEST = 1e-8
"""Length up to which a vector counts as one without a direction. Its gradient would be the inverse of its length."""


def directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors divided by their lengths, with zeros, and gradients of zero, for those that have no direction.

    Args:
        vectors: ``[..., D]``.

    Returns:
        ``[..., D]`` float32, and ``[...]`` bool: which of them have a direction.
    """
    values = vectors.float()
    lengths = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    # Not 'longer than': a length that is no number must not pass for none.
    none = lengths <= SHORTEST
    # Put in before the division: what is taken out after it would still come back as 0 * inf in the gradient.
    found = values.masked_fill(none, 0) / lengths.masked_fill(none, 1)
    return found, ~none[..., 0]


def apart(first: Tensor, second: Tensor) -> Tensor:
    """``1 - cos`` of vectors, exactly 0 and without a gradient where one of them has no direction.

    Args:
        first: ``[..., D]``.
        second: the same shape.

    Returns:
        ``[...]`` float32.
    """
    (first, here), (second, there) = directions(first), directions(second)
    return (1 - (first * second).sum(-1)).masked_fill(~(here & there), 0)


class Distance(Protocol):
    """Source and target embeddings ``[P, D]`` of P pairs to the sum of their losses, a float32 scalar."""

    def __call__(self, source: Tensor, target: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Cosine:
    """``1 - cos(s, t)`` for each pair: the loss of LLM-JEPA (arXiv 2509.14252, eq. 3).

    Minimised by any constant map as well; watch the shuffled similarity.
    """

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        return apart(source, target).sum()


@dataclass(frozen=True)
class L2:
    """Euclidean distance ``|s - t|`` of each pair."""

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        return torch.linalg.vector_norm(source.float() - target.float(), dim=-1).sum()


@dataclass(frozen=True)
class MSE:
    """Mean over the D dimensions of ``(s - t)^2`` for each pair."""

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        return (source.float() - target.float()).square().mean(dim=-1).sum()


@dataclass(frozen=True)
class InfoNCE:
    """Cross-entropy of finding each source's target among all targets of the batch (van den Oord et al., 2018).

    Logits are cosines over a temperature. Unlike the others it can't be minimised by a constant; it depends on which
    pairs share a batch, and is 0 where a batch holds one pair.

    Args:
        temperature: divides the cosines.
    """

    temperature: float = DEFAULTS["infonce_temperature"]

    def __call__(self, source: Tensor, target: Tensor, first: int = 0) -> Tensor:
        """Sum over the sources.

        Args:
            source: ``[P, D]``.
            target: ``[Q, D]``; those that belong to no source are negatives only.
            first: the target of source i is row ``first + i``.
        """
        (source, here), (target, there) = directions(source), directions(target)
        logits = source @ target.T / self.temperature
        wanted = torch.arange(first, first + len(logits), device=logits.device)
        losses = torch.logsumexp(logits, dim=-1) - logits.gather(1, wanted[:, None])[:, 0]
        return losses.masked_fill(~(here & there[wanted]), 0).sum()


def make_distance(name: str, temperature: float = DEFAULTS["infonce_temperature"]) -> Distance:
    """The distance of a ``jepa_loss_type``; only ``infonce`` has a temperature."""
    losses: dict[str, Distance] = {"cosine": Cosine(), "l2": L2(), "mse": MSE(), "infonce": InfoNCE(temperature)}
    return losses[name]


@term("jepa_loss", "alignment loss")
@dataclass
class Alignment(Term):
    """Mean distance between source and target embedding: the second term of LLM-JEPA (arXiv 2509.14252, eq. 2).

    Attributes:
        weight: lambda of the paper.
        distance: between the embeddings of pairs, summed.
        through_target: train the model through the target embedding, too.
        schedule: of the weight over the run: ``constant``; ``warmup`` rises from 0 over the first share of the run;
            ``cosine`` falls to 0 along half a cosine.
        warmup: that share.
        head: kind of the predictor head on the source, see ``heads.PredictorHead``; None for none.
    """

    of_pairs = True
    head_name = "predictor_head"

    weight: float = 0.1
    distance: Distance = field(default_factory=Cosine)
    through_target: bool = True
    schedule: LbdSchedule = "constant"
    warmup: float = 0.1
    head: str | None = None

    @property
    def compares_pairs(self) -> bool:
        """InfoNCE finds the target among those of all pairs."""
        return isinstance(self.distance, InfoNCE)

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return batch.pairs

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Distances, summed over the pairs."""
        source, target = encoded.pairs
        if not self.through_target:
            target = target.detach()
        if isinstance(self.distance, InfoNCE):
            candidates, first = context.gather(target)
            return self.distance(source, candidates, first)
        return self.distance(source, target)

    def weight_at(self, progress: float | None) -> float:
        """By the schedule."""
        if progress is None or self.schedule == "constant":
            return self.weight
        if self.schedule == "warmup":
            return self.weight * min(1.0, progress / self.warmup)
        return self.weight * 0.5 * (1 + math.cos(math.pi * progress))

    @property
    def logged_weight(self) -> str | None:
        """``lbd``, if it has a schedule."""
        return None if self.schedule == "constant" else "lbd"

    def modules(self, config: Any) -> nn.Module | None:
        """The predictor head."""
        return None if self.head is None else PredictorHead(self.head, int(config.hidden_size))
