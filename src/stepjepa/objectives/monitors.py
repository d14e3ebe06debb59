"""Directions of embeddings, and signs of their collapse: similarities of pairs, effective rank, retrieval.

A falling alignment loss is no sign of success, since constant embeddings have none at all. The signs are the distance
between matched and shuffled similarity, and the uncentred effective rank.

An embedding without a direction (of length 0) has no cosine: a pair with one adds exactly 0 to a loss that compares
directions, and gets exactly 0 as its gradient.
"""

import math
from collections.abc import Mapping
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

# Length up to which a vector has no direction. Its gradient would be the inverse of its length.
SHORTEST = 1e-8

# Mean cosine of *unrelated* pairs from which on embeddings count as one constant direction.
COLLAPSE_SIMILARITY = 0.99
# Uncentred effective rank up to which embeddings count as one line. The similarity does not show a collapse to two
# opposite vectors, whose mean cosine is small.
COLLAPSE_RANK = 1.5
# Fewest pairs that a rank is judged by: few pairs span few directions.
COLLAPSE_PAIRS = 16

REMEDIES = (
    "try --jepa_loss_type infonce with a small --lbd, --sigreg 0.05, or --variance 1 --covariance 0.04 (--target_grad "
    "stop and ema only slow it down)"
)


def directions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors ``[..., D]`` divided by their lengths, in float32, and ``[...]`` which of them have a direction.

    The others are zeros, with gradients of zero.
    """
    values = vectors.float()
    lengths = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    # Not 'longer than': a length of NaN must not pass for none.
    none = lengths <= SHORTEST
    # Masked before the division: masked after it, it would come back as 0 * inf in the gradient.
    return values.masked_fill(none, 0) / lengths.masked_fill(none, 1), ~none[..., 0]


def apart(first: Tensor, second: Tensor) -> Tensor:
    """``1 - cos`` of vectors ``[..., D]``, exactly 0 and without a gradient where one of them has no direction."""
    (first, here), (second, there) = directions(first), directions(second)
    return (1 - (first * second).sum(-1)).masked_fill(~(here & there), 0)


def collapse(logs: dict[str, float]) -> str | None:
    """How the embeddings of a line of logs are collapsed, for people; None where they are not, or it can't be told."""
    # Comparisons are such that NaN is no sign of anything.
    similarity = logs.get("shuffled_similarity", 0.0)
    if similarity >= COLLAPSE_SIMILARITY:
        return f"unrelated pairs have cosine {similarity:.3f}: the embeddings are collapsing to one direction"
    if logs.get("rank_pairs", 0.0) < COLLAPSE_PAIRS:
        return None
    for side in ("source", "target"):
        rank = logs.get(f"{side}_rank", math.inf)
        if rank <= COLLAPSE_RANK:
            pairs = int(logs["rank_pairs"])
            return f"{pairs} {side} embeddings have effective rank {rank:.2f}: they are collapsing to one line"
    return None


def pair_similarity(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the cosines of the P matched pairs of embeddings ``[P, D]``, and of the P * (P - 1) shuffled ones."""
    first, second = F.normalize(source.float(), dim=-1), F.normalize(target.float(), dim=-1)
    matched = (first * second).sum()
    return matched, first.sum(0) @ second.sum(0) - matched


def effective_rank(embeddings: Tensor, *, centred: bool = False) -> float:
    """Exponential of the entropy of the normalised singular values (Roy & Vetterli, 2007) of embeddings ``[P, D]``.

    Between 1 (one direction) and ``min(P, D)``; 0 for no embeddings or for zeros; NaN if any number is not finite.
    ``centred`` subtracts the mean first; that hides a collapse to one vector.
    """
    if len(embeddings) == 0:
        return 0.0
    matrix = embeddings.float()
    matrix = matrix - matrix.mean(0) if centred else matrix
    if not bool(torch.isfinite(matrix).all()):
        return math.nan
    values = torch.linalg.svdvals(matrix)
    share = values / values.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum())) if values.any() else 0.0


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


class WindowState(TypedDict):
    """What a :class:`Window` holds, on the CPU."""

    sums: dict[str, Tensor | float]
    pairs: list[tuple[Tensor, Tensor]]


class Window:
    """Sums, and the latest ``keep`` pairs, since the last log line; adding to it never waits for the device."""

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self.reset()

    def reset(self) -> None:
        """Start a new window."""
        self._sums: dict[str, Tensor | float] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, **values: Tensor | float) -> None:
        """Add to running sums, created at first use; tensors are detached and stay on their device."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + (value.detach() if isinstance(value, Tensor) else value)

    def add_pairs(self, source: Tensor, target: Tensor) -> None:
        """Add the embeddings of a batch, ``[P, D]`` each."""
        source, target = source.detach(), target.detach()
        matched, shuffled = pair_similarity(source, target)
        count = len(source)
        self.add(matched=matched, shuffled=shuffled, pairs=count, crossings=count * (count - 1))
        self._pairs.append((source, target))
        while sum(len(first) for first, _ in self._pairs[1:]) >= self._keep:
            self._pairs.pop(0)

    def state(self) -> WindowState:
        """All of it, on the CPU, for a checkpoint; see :meth:`restore`."""
        sums = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in self._sums.items()}
        return {"sums": sums, "pairs": [(source.cpu(), target.cpu()) for source, target in self._pairs]}

    def restore(self, state: WindowState, device: torch.device) -> None:
        """Continue where :meth:`state` was taken."""
        self.reset()
        for name, value in state["sums"].items():
            self._sums[name] = value.to(device) if isinstance(value, Tensor) else value
        self._pairs = [(source.to(device), target.to(device)) for source, target in state["pairs"]]

    def totals(self, names: list[str]) -> list[float]:
        """The running sums by name; 0 for what was never added. Waits for the device."""
        return [float(self._sums.get(name, 0.0)) for name in names]

    def monitors(self, sums: Mapping[str, float] | None = None) -> dict[str, float]:
        """Similarities of these sums (of all processes, by the names of ``add_pairs``) or its own; :meth:`geometry`."""
        sums = {name: float(value) for name, value in self._sums.items()} if sums is None else sums
        similarity = share("matched_similarity", sums["matched"], sums["pairs"])
        return similarity | share("shuffled_similarity", sums["shuffled"], sums["crossings"]) | self.geometry()

    def geometry(self) -> dict[str, float]:
        """Effective ranks and retrieval of the latest pairs of this process, and how many; empty for less than two."""
        if sum(len(first) for first, _ in self._pairs) < 2:
            return {}
        source, target = (torch.cat(side)[-self._keep :].float() for side in zip(*self._pairs, strict=True))
        return {
            "source_rank": effective_rank(source),
            "target_rank": effective_rank(target),
            "source_rank_centred": effective_rank(source, centred=True),
            "target_rank_centred": effective_rank(target, centred=True),
            "retrieval_top1": retrieval_top1(source, target),
            "rank_pairs": float(len(source)),
        }
