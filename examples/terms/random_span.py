"""Semantic Tube Prediction as the published code computes it (``--linear random_span``), beside the paper's ``--stp``.

    1 - cos(patch, before + after)

A text moves by h_i - h_(i-1) at each token i of a message of user or assistant. The patch is the sum of the moves over
a random span of these tokens, which may reach from one message into the next; before and after are those of the others.
Unlike there, the end of the assistant's turn is one of these tokens.

    cd examples/terms
    stepjepa train ... --term random_span:RandomSpan --term_args '{"weight": 0.02}'
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, Term, term


@term("random_span_loss", "STP of a random span")
@dataclass
class RandomSpan(Term):
    """A term without views, for any mode; it needs ``labels="assistant"``, which mark the messages."""

    weight: float = 0.02

    def count(self, batch: Batch) -> int:
        """Records with two tokens of messages or more."""
        return sum(len(moves) >= 2 for moves in _moves(batch))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """One cosine a record."""
        # [M] what each move is added to: 2i + 1 the patch of record i, 2i what surrounds it.
        places, parts = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
        for moves, draw in zip(_moves(batch), batch.records.rng_keys, strict=True):
            if len(moves) >= 2:
                first, last = span(len(moves), np.random.default_rng((context.seed, *draw)))
                part = np.full(len(moves), 2 * (len(parts) - 1))
                part[first:last] += 1
                places.append(moves)
                parts.append(part)
        device = batch.label_ids.device
        before, after = torch.from_numpy(np.concatenate(places)).to(device).unbind(1)
        moved = encoded.at(after).float() - encoded.at(before).float()
        sums = moved.new_zeros((2 * (len(parts) - 1), moved.shape[1]))
        sums = sums.index_add(0, torch.from_numpy(np.concatenate(parts)).to(device), moved)
        return (1 - nn.functional.cosine_similarity(sums[::2], sums[1::2], dim=-1)).sum()


def span(length: int, draw: np.random.Generator) -> tuple[int, int]:
    """A span of some, but not all, of so many tokens: its start uniform, then its end."""
    first = int(draw.integers(length))
    return first, int(draw.integers(first + 1, length + 1 if first else length))


def _moves(batch: Batch) -> list[NDArray[np.int64]]:
    """Return for each record the flat positions ``[K, 2]`` before and at each token of its messages and of its end.

    Tokens that see one step alone are left out: between them and others lies no movement of the text.
    """
    infos, moves = batch.records, []
    for path, isolated, labels, prompt in zip(infos.paths, infos.isolated, infos.labels, infos.prompt, strict=True):
        if np.intersect1d(labels, prompt).size:
            raise ValueError("expected labels of answers alone, got some in the prompt: set labels to assistant")
        before = np.union1d(labels, prompt).astype(np.int64)
        before = before[~np.isin(before, isolated) & ~np.isin(before + 1, isolated)]
        moves.append(np.stack([path[before], path[before + 1]], axis=1))
    return moves
