"""Monitors of collapse: similarities of pairs, effective rank, retrieval.

A falling alignment loss does not show success: constant embeddings have a loss of 0. Matched similarity above shuffled
similarity does, and a high uncentred effective rank.
"""

import math
from collections.abc import Mapping
from typing import TypedDict

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor

from stepjepa.base.arguments import kind_of
from stepjepa.objectives.precision import without_autocast

# Mean cosine of *unrelated* pairs from which embeddings count as collapsed to one direction.
COLLAPSE_SIMILARITY = 0.99
# Uncentred effective rank up to which embeddings count as collapsed to one line. Similarity does not show a collapse to
# two opposite vectors, whose mean cosine is small.
COLLAPSE_RANK = 1.5
# Minimum number of pairs for judging a rank: few pairs span few directions.
COLLAPSE_PAIRS = 16

COLLAPSE_REMEDIES = (
    "try `jepa_loss_type infonce` with a small `lbd`, `sigreg 0.05`, or `variance 1` `covariance 0.04` "
    "(`target_grad stop` and `target_grad ema` only slow it down)"
)
# With such an objective an early log line shows the untrained model, whose embeddings are often alike.
COMPARED_REMEDIES = (
    "the objective compares pairs, which moves embeddings apart during training; if it stays so, train longer, or with "
    "more pairs in a batch (docs/how-to/collapse.md)"
)


def collapse_remedies(compares_pairs: bool) -> str:
    """Return what helps against a collapse, by whether a term of the objective compares pairs."""
    return COMPARED_REMEDIES if compares_pairs else COLLAPSE_REMEDIES


def describe_collapse(logs: dict[str, float]) -> str | None:
    """Describe the collapse that a log line shows; None if there is none, or too little data to tell."""
    # Comparisons are written so that NaN shows no collapse.
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
    """Sum the cosines of matched pairs, and those of all shuffled ones.

    Args:
        source: ``[P, D]`` embeddings.
        target: ``[P, D]`` embeddings of their partners.

    Returns:
        Two float32 scalars: the sum over the P matched pairs, and that over the P * (P - 1) shuffled pairs.
    """
    first, second = F.normalize(source.float(), dim=-1), F.normalize(target.float(), dim=-1)
    matched = (first * second).sum()
    with without_autocast(first):
        return matched, first.sum(0) @ second.sum(0) - matched


def effective_rank(embeddings: Tensor, *, centred: bool = False) -> float:
    """Compute the effective rank of embeddings: exp of the entropy of their normalised singular values.

    Roy & Vetterli, 2007. It says over how many directions the embeddings spread.

    Args:
        embeddings: ``[P, D]``.
        centred: subtract the mean first, which hides a collapse to one vector.

    Returns:
        A number between 1 (one direction) and ``min(P, D)``; 0 for no embeddings or all zeros; NaN if any number is not
        finite.

    Raises:
        TypeError: ``embeddings`` is no tensor.
        ValueError: it has another shape.
    """
    given: object = embeddings
    if not isinstance(given, Tensor):
        raise TypeError(f"embeddings: expected a tensor [P, D], got {kind_of(given)}; torch.as_tensor makes one")
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings: expected a tensor [P, D], got {[*embeddings.shape]}")
    if len(embeddings) == 0:
        return 0.0
    # Some devices have no float64.
    matrix = embeddings.cpu().double() if embeddings.device.type == "mps" else embeddings.double()
    matrix = matrix - matrix.mean(0) if centred else matrix
    # The squares of the singular values are the eigenvalues of the smaller Gram matrix. In float64 their roots are as
    # exact as float32 embeddings; the small matrix is decomposed on the CPU, which takes the one wait for the device.
    gram = (matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix).cpu()
    if not bool(torch.isfinite(gram).all()):
        return math.nan
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = values / values.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum())) if values.any() else 0.0


def retrieval_top1(source: Tensor, target: Tensor) -> float:
    """Return the fraction of sources ``[P, D]`` whose nearest target ``[P, D]`` by cosine is their own; 0 for no pairs.

    A cheap relative of ``hits_at_1`` in ``evaluation.retrieval``: it searches the latest pairs of a log line, which may
    hold equal texts, not the distinct answers of a test file. Fewer pairs give higher values.
    """
    if len(source) == 0:
        return 0.0
    with without_autocast(source):
        similarity = F.normalize(source.float(), dim=-1) @ F.normalize(target.float(), dim=-1).T
    # The first of equally near targets wins, so that a constant map finds one partner, not all of them.
    return float((similarity.argmax(1) == torch.arange(len(source), device=source.device)).float().mean())


def ratio_column(name: str, amount: float, count: float) -> dict[str, float]:
    """Return ``{name: amount / count}``; ``{}`` if the count is 0, since an unmeasured value is not zero."""
    return {name: amount / count} if count else {}


MONITORS = (
    *("matched_similarity", "shuffled_similarity", "source_rank", "target_rank", "source_rank_centred"),
    *("target_rank_centred", "retrieval_top1", "rank_pairs"),
)
"""Names of what :meth:`MetricWindow.monitors` computes."""

PAIR_SUMS = ("matched", "shuffled", "pairs", "crossings")
"""Names of the running sums of :meth:`MetricWindow.add_pairs`."""

RUNNING_SUMS = (
    *("steps", "jepa_steps", *PAIR_SUMS),
    *("tokens", "records", "records_with_views", "records_without_pair"),
)
"""Names of the running sums of a log line beside those of the terms, in the order in which processes add them up."""


class WindowState(TypedDict):
    """Contents of a :class:`MetricWindow`, on the CPU."""

    sums: dict[str, Tensor | float]
    pairs: list[tuple[Tensor, Tensor]]


class MetricWindow:
    """Running sums and the latest ``keep`` pairs since the last log line; adding never waits for the device."""

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
        sums: tuple[Tensor | float, ...] = (matched, shuffled, count, count * (count - 1))
        self.add(**dict(zip(PAIR_SUMS, sums, strict=True)))
        self._pairs.append((source, target))
        while sum(len(first) for first, _ in self._pairs[1:]) >= self._keep:
            self._pairs.pop(0)

    def state(self) -> WindowState:
        """Copy the contents to the CPU, for a checkpoint; see :meth:`restore`."""
        sums = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in self._sums.items()}
        return {"sums": sums, "pairs": [(source.cpu(), target.cpu()) for source, target in self._pairs]}

    def restore(self, state: WindowState, device: torch.device) -> None:
        """Load what :meth:`state` returned."""
        self.reset()
        for name, value in state["sums"].items():
            self._sums[name] = value.to(device) if isinstance(value, Tensor) else value
        self._pairs = [(source.to(device), target.to(device)) for source, target in state["pairs"]]

    def totals(self, names: list[str]) -> list[float]:
        """Return the running sums of these names, 0 for a name that was never added; waits for the device."""
        return [float(self._sums.get(name, 0.0)) for name in names]

    def monitors(self, sums: Mapping[str, float] | None = None, *, processes: int = 1) -> dict[str, float]:
        """Compute similarities and :meth:`geometry`.

        Args:
            sums: those of all processes, under the names of :data:`PAIR_SUMS`; None for this window's own.
            processes: number of processes, each with a window; all of them must call this, and get the same.
        """
        sums = {name: float(value) for name, value in self._sums.items()} if sums is None else sums
        similarity = ratio_column("matched_similarity", sums["matched"], sums["pairs"])
        return (
            similarity
            | ratio_column("shuffled_similarity", sums["shuffled"], sums["crossings"])
            | self.geometry(processes)
        )

    def geometry(self, processes: int = 1) -> dict[str, float]:
        """Compute ranks and retrieval of the latest pairs of all processes, and count them; empty for fewer than two.

        Each of the ``processes`` gives an equal share of the pairs, or all that it has.
        """
        pairs = self._pairs if processes == 1 else self._gathered(-(-self._keep // processes))
        if sum(len(first) for first, _ in pairs) < 2:
            return {}
        source, target = (torch.cat(side)[-self._keep :].float() for side in zip(*pairs, strict=True))
        return {
            "source_rank": effective_rank(source),
            "target_rank": effective_rank(target),
            "source_rank_centred": effective_rank(source, centred=True),
            "target_rank_centred": effective_rank(target, centred=True),
            "retrieval_top1": retrieval_top1(source, target),
            "rank_pairs": float(len(source)),
        }

    def _gathered(self, share: int) -> list[tuple[Tensor, Tensor]]:
        """Return the latest ``share`` pairs of each process in rank order, on the CPU; a process may have none."""
        own = []
        if self._pairs:
            source, target = zip(*self._pairs, strict=True)
            # Cloned, since a view would be sent with all that it is a part of.
            own = [(torch.cat(source)[-share:].cpu().clone(), torch.cat(target)[-share:].cpu().clone())]
        gathered: list[tuple[Tensor, Tensor]] = gather_object(own)
        return gathered
