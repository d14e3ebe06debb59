"""Projection heads behind the embeddings of a model that stays as it is: two small networks that InfoNCE trains.

What they find is the baseline of trained embeddings where no linear map does: an answer that has to be computed may be
in a model's embeddings and yet be no linear function of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from stepjepa.base.json_object import JsonObject
from stepjepa.objectives.alignment import InfoNCE
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings

WIDTH, DIMENSIONS = 512, 128
"""Of the hidden layer, and of what heads return."""
BATCH, LEARNING_RATE, WEIGHT_DECAY = 128, 1e-3, 0.01
EPOCHS = 60
FEWEST_STEPS, MOST_STEPS = 1000, 5000
"""Of the heads that are taken: few pairs have more epochs, many pairs fewer."""
STEPS_TRIED = 320
"""Of the heads that choose where embeddings are read. With a quarter of them all heads find little, and the input
embeddings may look best."""
EVERY = 5
"""Epochs between two looks at held-out pairs; the last epoch is looked at, too."""

_Embeddings = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ProjectionHeads:
    """Two trained heads.

    Attributes:
        source: maps source embeddings ``[N, D]`` to ``[N, 128]``.
        target: maps target embeddings.
        epochs: of their training.
    """

    source: nn.Module
    target: nn.Module
    epochs: int

    @torch.no_grad()
    def __call__(self, sources: _Embeddings, targets: _Embeddings) -> tuple[_Embeddings, _Embeddings]:
        """Return sources and targets ``[N, 128]`` behind the heads: those of a pair are near each other."""
        return self.source(torch.as_tensor(sources)).numpy(), self.target(torch.as_tensor(targets)).numpy()

    def of_pairs(self, pairs: ViewEmbeddings) -> ViewEmbeddings:
        """Return the pairs with their sources and targets as the heads give them."""
        source, target = self(pairs.source, pairs.target)
        return replace(pairs, source=source, target=target)


@dataclass(frozen=True, eq=False)
class FittedHeads:
    """Projection heads that were trained on the pairs of some records, and the embeddings that they belong to.

    Attributes:
        heads: the heads.
        place: where the embeddings in front of them are read.
        records: number of records that they were trained on.
    """

    heads: ProjectionHeads
    place: ReadoutPlace
    records: int

    def of_pairs(self, pairs: ViewEmbeddings) -> ViewEmbeddings:
        """Return the pairs, read at ``place``, as the heads give them."""
        return self.heads.of_pairs(pairs)

    def facts(self) -> JsonObject:
        """Return how the heads were trained."""
        return {"epochs": self.heads.epochs}


class _Head(nn.Module):
    """A network with one hidden layer on embeddings ``[N, D]``, each dimension centred and scaled as in the known."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.mean, self.scale = known.mean(0), known.std(0) + 1e-6
        self.network = nn.Sequential(nn.Linear(known.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, DIMENSIONS))

    def forward(self, vectors: Tensor) -> Tensor:
        mapped: Tensor = self.network((vectors - self.mean) / self.scale)
        return mapped


def epochs_of(pairs: int, steps: int | None = None) -> int:
    """Return how many epochs heads of some number of pairs are trained: those of ``steps`` if it is given, rounded up.

    Otherwise they are :data:`EPOCHS`, or those of at least :data:`FEWEST_STEPS` and at most :data:`MOST_STEPS` steps.
    """
    of_epoch = -(-pairs // BATCH)
    if steps is not None:
        return -(-steps // of_epoch)
    return max(1, min(max(EPOCHS, -(-FEWEST_STEPS // of_epoch)), MOST_STEPS // of_epoch))


def fit_heads(
    sources: _Embeddings,
    targets: _Embeddings,
    same: NDArray[np.int64],
    rank: Callable[[ProjectionHeads], float],
    *,
    epochs: int,
    seed: int = 0,
    progress: bool = False,
) -> tuple[float, ProjectionHeads]:
    """Train heads on known pairs by InfoNCE; targets of the same text are no negatives.

    The networks are those of SimCLR's projection (Chen et al., 2020), one for each side, on embeddings that stay as
    they are. Weights and order are drawn without moving torch's generator.

    Args:
        sources: ``[N, D]`` embeddings of known sources, N at least 2.
        targets: ``[N, D]`` embeddings of their targets.
        same: ``[N]``, equal for targets of the same text.
        rank: of heads, the mean reciprocal rank of held-out pairs, which says when training was best.
        epochs: of the training, at least 1; see :func:`epochs_of`.
        seed: of the first weights and of the order of the pairs.
        progress: show a bar of the epochs on a terminal.

    Returns:
        The highest of these ranks, and the heads that had it last.
    """
    before, wanted, answers, loss = *map(torch.as_tensor, (sources, targets, same)), InfoNCE()
    of_epoch = -(-len(answers) // BATCH)
    best: tuple[float, ProjectionHeads] | None = None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        source, target = _Head(before), _Head(wanted)
        weights = [*source.parameters(), *target.parameters()]
        optimizer = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * of_epoch)
        hidden = None if progress else True  # None shows it on a terminal
        for epoch in tqdm(range(1, epochs + 1), desc="projection heads", unit="epoch", disable=hidden):
            for batch in torch.randperm(len(answers)).split(BATCH):
                equal = (answers[batch][:, None] == answers[batch]).fill_diagonal_(False)
                optimizer.zero_grad()
                (loss(source(before[batch]), target(wanted[batch]), 0, equal) / len(batch)).backward()
                optimizer.step()
                schedule.step()
            if epoch % EVERY == 0 or epoch == epochs:
                now = ProjectionHeads(copy.deepcopy(source), copy.deepcopy(target), epoch)
                ranked = rank(now)
                if best is None or ranked >= best[0]:
                    best = ranked, now
    assert best is not None
    return best
