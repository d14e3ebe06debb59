"""Is it collapsing? Similarities of matched and shuffled pairs, effective rank, retrieval: what a loss hides.

A falling alignment loss is no sign of success, since a constant embedding has none at all. What tells is the distance
between matched and shuffled similarity, and the uncentred effective rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

COLLAPSE_SIMILARITY = 0.99
"""Mean cosine of *unrelated* pairs from which on embeddings count as one constant direction."""

COLLAPSE_RANK = 1.5
"""Uncentred effective rank up to which embeddings count as one line: that two opposite vectors are dissimilar on
average hides such a collapse from the similarity."""

COLLAPSE_PAIRS = 16
"""Pairs that a rank must be of to be judged: few pairs span few directions."""

REMEDIES = (
    "try --jepa_loss_type infonce with a small --lbd, --sigreg 0.05, or --variance 1 --covariance 0.04 (--target_grad "
    "stop and ema only slow it down)"
)


def pair_similarity(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the cosines of the P matched pairs of embeddings ``[P, D]``, and of the P * (P - 1) shuffled ones."""
    first, second = F.normalize(source.float(), dim=-1), F.normalize(target.float(), dim=-1)
    matched = (first * second).sum()
    return matched, first.sum(0) @ second.sum(0) - matched


def effective_rank(embeddings: Tensor, *, centred: bool = False) -> float:
    """Exponential of the entropy of the normalised singular values (Roy & Vetterli, 2007).

    Args:
        embeddings: ``[P, D]``.
        centred: subtract the mean first; that hides a collapse to one vector.

    Returns:
        Between 1 (one direction) and ``min(P, D)``; 0 for no embeddings or for zeros; NaN if any number is not finite.
    """
    if len(embeddings) == 0:
        return 0.0
    matrix = embeddings.float()
    if centred:
        matrix = matrix - matrix.mean(0)
    if not bool(torch.isfinite(matrix).all()):
        return math.nan
    values = torch.linalg.svdvals(matrix)
    total = values.sum()
    if total <= 0:
        return 0.0
    share = values / total
    return float(torch.exp(-torch.special.xlogy(share, share).sum()))


def retrieval_top1(source: Tensor, target: Tensor) -> float:
    """Share of sources ``[P, D]`` whose nearest target by cosine is their own; 0 for no pairs."""
    if len(source) == 0:
        return 0.0
    similarity = F.normalize(source.float(), dim=-1) @ F.normalize(target.float(), dim=-1).T
    # Of equally near targets the first wins, so that a constant map finds one partner, not all of them.
    return float((similarity.argmax(1) == torch.arange(len(source), device=source.device)).float().mean())


def share(name: str, amount: float, count: float) -> dict[str, float]:
    """``{name: amount / count}``, and nothing where nothing was counted: not measured is not zero."""
    return {name: amount / count} if count else {}


class Window:
    """What was seen since the last log line. Adding to it never waits for the device.

    Args:
        keep: how many of the latest pairs the ranks and the retrieval are computed on.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._sums: dict[str, Tensor | float] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._held = 0

    def add(self, **values: Tensor | float) -> None:
        """Add to running sums, created at first use; tensors are detached and stay on their device."""
        for name, value in values.items():
            amount = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums[name] + amount if name in self._sums else amount

    def add_pairs(self, source: Tensor, target: Tensor) -> None:
        """Take in the embeddings of a batch, ``[P, D]`` each."""
        source, target = source.detach(), target.detach()
        matched, shuffled = pair_similarity(source, target)
        count = len(source)
        self.add(matched=matched, shuffled=shuffled, pairs=count, crossings=count * (count - 1))
        self._pairs.append((source, target))
        self._held += count
        while self._held - len(self._pairs[0][0]) >= self._keep:
            self._held -= len(self._pairs.pop(0)[0])

    def totals(self, names: list[str]) -> list[float]:
        """The running sums by name; 0 for what was never added. Waits for the device."""
        return [float(self._sums.get(name, 0.0)) for name in names]

    def geometry(self) -> dict[str, float]:
        """Effective ranks and retrieval of the latest pairs of this process, and how many; empty for less than two."""
        if self._held < 2:
            return {}
        source = torch.cat([first for first, _ in self._pairs])[-self._keep :].float()
        target = torch.cat([second for _, second in self._pairs])[-self._keep :].float()
        return {
            "source_rank": effective_rank(source),
            "target_rank": effective_rank(target),
            "source_rank_centred": effective_rank(source, centred=True),
            "target_rank_centred": effective_rank(target, centred=True),
            "retrieval_top1": retrieval_top1(source, target),
            "rank_pairs": float(len(source)),
        }
