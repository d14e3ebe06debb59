"""Projection heads behind embeddings of a model that stays as it is: what InfoNCE finds without training the model.

    python examples/experiment/heads.py --model_path runs/plain --train_file train.jsonl --test_file test.jsonl

prints how often the nearest of the distinct test answers is the right one: by embeddings as they are, behind the linear
map of ``evaluate --retrieval --linear_map``, and behind two networks with a hidden layer, one for the sources and one
for the targets, that InfoNCE trains on known pairs. An answer that has to be computed may be in a model's embeddings
and yet be no linear function of them: there the networks are the baseline of trained embeddings.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stepjepa import Jepa, Record, UserError, fit_linear_map, read_records
from stepjepa.data.questions import not_in_test
from stepjepa.evaluation.map_fitting import FEWEST_RECORDS, MOST_COMPARED, places_to_try
from stepjepa.evaluation.retrieval import rank_targets
from stepjepa.models.architecture import number_of_layers
from stepjepa.objectives.alignment import InfoNCE
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings

WIDTH, DIMENSIONS = 512, 128
"""Of the hidden layer, and of what heads return."""
BATCH, LEARNING_RATE, WEIGHT_DECAY = 128, 1e-3, 0.01
EPOCHS, EPOCHS_TRIED = 60, 10
"""Of the heads that are taken, and of those that choose where embeddings are read."""
EVERY = 5
"""Epochs between two looks at held-out records; the last epoch is looked at, too."""
Matrix = NDArray[np.float32]
Sides = tuple[Matrix, Matrix]
"""Sources and targets ``[N, D]`` of some records."""


class Heads(NamedTuple):
    """Two trained heads, and the epochs of their training."""

    source: nn.Module
    target: nn.Module
    epochs: int

    @torch.no_grad()
    def __call__(self, sides: Sides) -> Sides:
        """Sources and targets ``[N, DIMENSIONS]`` behind the heads."""
        return self.source(torch.as_tensor(sides[0])).numpy(), self.target(torch.as_tensor(sides[1])).numpy()

    def of_pairs(self, pairs: ViewEmbeddings) -> ViewEmbeddings:
        """The pairs with their sources and targets behind the heads."""
        source, target = self((pairs.source, pairs.target))
        return replace(pairs, source=source, target=target)


class _Head(nn.Module):
    """A network with one hidden layer on embeddings ``[N, D]``, each dimension centred and scaled as in the known."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.mean, self.scale = known.mean(0), known.std(0) + 1e-6
        self.network = nn.Sequential(nn.Linear(known.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, DIMENSIONS))

    def forward(self, vectors: Tensor) -> Tensor:
        mapped: Tensor = self.network((vectors - self.mean) / self.scale)
        return mapped


def fit_heads(
    known: Sides, same: NDArray[np.int64], rank: Callable[[Heads], float], *, epochs: int = EPOCHS, seed: int = 0
) -> tuple[float, Heads]:
    """Train heads on known pairs; targets of the same answer are no negatives.

    Args:
        known: sources and targets ``[N, D]``.
        same: ``[N]``, equal for records with the same answer.
        rank: of heads, the mean reciprocal rank of held-out records, which says when training was best.
        epochs: of the training.
        seed: of the first weights and of the order of the pairs.

    Returns:
        The highest of these ranks, and the heads that have it.
    """
    sources, targets = (torch.as_tensor(side) for side in known)
    answers, loss = torch.as_tensor(same), InfoNCE()
    looks: list[tuple[float, Heads]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        source, target = _Head(sources), _Head(targets)
        optimizer = torch.optim.AdamW(
            [*source.parameters(), *target.parameters()], LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        steps = epochs * -(-len(answers) // BATCH)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for epoch in range(1, epochs + 1):
            for batch in torch.randperm(len(answers)).split(BATCH):
                equal = (answers[batch][:, None] == answers[batch]).fill_diagonal_(False)
                optimizer.zero_grad()
                (loss(source(sources[batch]), target(targets[batch]), 0, equal) / len(batch)).backward()
                optimizer.step()
                schedule.step()
            if epoch % EVERY == 0 or epoch == epochs:
                now = Heads(copy.deepcopy(source), copy.deepcopy(target), epoch)
                looks.append((rank(now), now))
    return max(looks, key=lambda look: look[0])


# -- a model and files of one's own ------------------------------------------------------------------------------------


def compare(
    jepa: Jepa, records: Sequence[Record], test: Sequence[Record], *, epochs: int = EPOCHS, file: str | None = None
) -> dict[str, float]:
    """Rank the distinct answers of some questions by embeddings of a model that stays as it is.

    Args:
        jepa: any model; without a JEPA objective every layer is tried with both poolings.
        records: known pairs; those with a question of ``test`` are left out, and a tenth chooses readout and epochs.
        test: the questions, and the candidates.
        epochs: of the heads that are taken.
        file: that of ``records``, for errors.

    Returns:
        Share of questions whose nearest answer is the right one, by what is behind the embeddings.

    Raises:
        UserError: too few records have a pair.
    """
    records = not_in_test(records, test)
    if len(records) < FEWEST_RECORDS:
        fault = f"has {len(records)} records whose question is not in the test file"
        raise UserError(f"{fault}; maps are fitted on at least {FEWEST_RECORDS}", path=file)
    linear_map = fit_linear_map(jepa, records)
    embedder = jepa.pair_embedder(pooling=None if jepa.has_objective else "mean")
    config = embedder.reader.config
    places = places_to_try(config, None if jepa.has_objective else number_of_layers(jepa.model))
    shuffled = random.Random(0).sample(records, len(records))  # the file may be sorted
    count = min(MOST_COMPARED, len(shuffled) // 10)
    chosen, known = (embedder.at(part, places) for part in (shuffled[:count], shuffled[count:]))
    asked = embedder.at(test, [*places, embedder.place, linear_map.place])

    def ranked(pairs: ViewEmbeddings) -> dict[str, float]:
        return rank_targets(pairs, [None] * (int(pairs.record.max()) + 1), config).means()

    def heads_at(place: ReadoutPlace, epochs: int) -> tuple[float, Heads]:
        pairs, held_out = known[place], chosen[place]
        sides = pairs.source, pairs.target
        return fit_heads(sides, pairs.same_target, lambda heads: ranked(heads.of_pairs(held_out))["mrr"], epochs=epochs)

    place = max(places, key=lambda each: heads_at(each, min(epochs, EPOCHS_TRIED))[0])
    _, heads = heads_at(place, epochs)
    behind = {
        f"as it is, {words(embedder.place)}": asked[embedder.place],
        f"linear map, {words(linear_map.place)}": linear_map.linear_map.of_pairs(asked[linear_map.place]),
        f"projection heads, {words(place)}, {heads.epochs} epochs": heads.of_pairs(asked[place]),
    }
    return {name: ranked(pairs)["hits_at_1"] for name, pairs in behind.items()}


def words(place: ReadoutPlace) -> str:
    """A readout as text."""
    return f"layer {place.layer}, pooling {place.pooling}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the shares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", required=True, help="run or model folder, or a hub id")
    parser.add_argument("--train_file", required=True, help="known pairs")
    parser.add_argument("--test_file", required=True, help="questions; their distinct answers are the candidates")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of the heads, at least 1 ({EPOCHS})")
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {args.epochs}")
    try:
        records, test = read_records(args.train_file), read_records(args.test_file)
        shares = compare(Jepa.from_pretrained(args.model_path), records, test, epochs=args.epochs, file=args.train_file)
    except UserError as error:
        sys.exit(f"error: {error}")
    for behind, share in shares.items():
        print(f"{share:6.1%}  {behind}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
