"""Training of projection heads by InfoNCE, behind the embeddings of a model that stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from stepjepa.base.json_object import JsonObject
from stepjepa.objectives.alignment import InfoNCE
from stepjepa.objectives.projection_heads import DIMENSIONS, WIDTH, Head, ProjectionHeads

BATCH, LEARNING_RATE, WEIGHT_DECAY = 128, 1e-3, 0.01
EPOCHS = 60
FEWEST_STEPS, MOST_STEPS = 1000, 5000
"""Of the heads that are taken: few pairs have more epochs, many pairs fewer."""
STEPS_TRIED = 320
"""Of the heads that choose where embeddings are read. With a quarter of them all heads find little, and the input
embeddings may look best."""
EVERY = 5
"""Epochs between two looks at held-out pairs; the last epoch is looked at, too."""

TRAINING: JsonObject = {
    "width": WIDTH,
    "dimensions": DIMENSIONS,
    "batch": BATCH,
    "learning_rate": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "epochs": EPOCHS,
    "steps": [FEWEST_STEPS, MOST_STEPS, STEPS_TRIED],
    "every": EVERY,
}
"""All of these, on which trained heads depend."""

_Embeddings = NDArray[np.float32]


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
    width: int = WIDTH,
    weight_decay: float = WEIGHT_DECAY,
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
        width: of the hidden layers.
        weight_decay: of the networks.
        progress: show a bar of the epochs on a terminal.

    Returns:
        The highest of these ranks, and the heads that had it last.
    """
    loss, of_epoch = InfoNCE(), -(-len(same) // BATCH)
    best: tuple[float, ProjectionHeads] | None = None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        before, wanted = (torch.tensor(side, dtype=torch.float32) for side in (sources, targets))
        answers = torch.tensor(same)
        source, target = Head.of(before, width), Head.of(wanted, width)
        weights = [*source.parameters(), *target.parameters()]
        optimizer = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=weight_decay)
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
