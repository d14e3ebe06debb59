"""Distances between paired embeddings. Each takes all pairs of a batch and returns the *sum* over them.

Sums, because the mean must be taken over the pairs of a whole optimizer step, across accumulation and processes; the
objective does that. Terms that act on one set of embeddings, against collapse, are in ``regularizers``.

An embedding without a direction (of length 0) has no cosine: a pair with one adds exactly 0 to a loss that compares
directions, and gets exactly 0 as its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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


class AlignmentLoss(Protocol):
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

    temperature: float = 0.07

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


def make_alignment(name: str, temperature: float = 0.07) -> AlignmentLoss:
    """The loss of a ``jepa_loss_type``.

    Args:
        name: ``cosine``, ``l2``, ``mse`` or ``infonce``.
        temperature: of ``infonce``; the others have none.

    Raises:
        ValueError: no such loss.
    """
    losses: dict[str, AlignmentLoss] = {"cosine": Cosine(), "l2": L2(), "mse": MSE(), "infonce": InfoNCE(temperature)}
    if name not in losses:
        raise ValueError(f"alignment: expected one of {', '.join(losses)}, got '{name}'")
    return losses[name]
