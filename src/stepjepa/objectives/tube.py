"""Semantic Tube Prediction: hidden states of a text should move along a straight line.

:class:`Tube` is the formula of the paper, :class:`RandomSpan` what the published code computes. They are not the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stepjepa.objectives.alignment import apart
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.batch.pack import Numbers
    from stepjepa.models.encode import Encoded


@dataclass
class _OfTexts(Term):
    """A term on the states of each text; what it draws depends on the seed of the run, and epoch and index of the text.

    Attributes:
        layer: hidden state that is read.
    """

    weight: float = 0.02
    layer: int = -1

    @property
    def layers(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on a setting here
        """The one that is read."""
        return (self.layer,)


@term("stp_loss", "STP")
@dataclass
class Tube(_OfTexts):
    """``1 - cos(h_t - h_r, h_r - h_s)`` at three random places s < r < t of each main text (arXiv 2602.22617).

    It is 0 where hidden states move on a straight line, and where two of the three are one and the same. It needs no
    views. The published script computes something else, see :class:`RandomSpan`.

    Attributes:
        layer: hidden state that is read.
    """

    def count(self, batch: Batch) -> int:
        """Records of three tokens or more."""
        return sum(len(text) >= 3 for text in _texts(batch))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Summed over the records."""
        triples = [np.empty((0, 3), np.int64)]
        for text, draw in zip(_texts(batch), batch["members"].draws, strict=True):
            if len(text) >= 3:
                # Every choice is as likely as any other.
                chosen = np.random.default_rng((context.seed, *draw)).choice(len(text), 3, replace=False)
                triples.append(text[np.sort(chosen)][None])
        index = torch.from_numpy(np.concatenate(triples)).to(batch["label_ids"].device)
        return tube(encoded.at(index, self.layer))


@term("stp_span_loss", "STP of a random span")
@dataclass
class RandomSpan(_OfTexts):
    """``1 - cos(patch, before + after)`` for a random span of each record's messages: the published ``random_span``.

    A text moves by ``h_i - h_(i-1)`` at each token i of a message of user or assistant. The patch is the sum of these
    moves over a span of tokens, which may reach from one message into the next; before and after are the sums over the
    others. The template's own tokens do not count.

    Attributes:
        layer: hidden state that is read.
    """

    def count(self, batch: Batch) -> int:
        """Records with two tokens of messages or more."""
        return sum(len(moves) >= 2 for moves in _moves(batch))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Summed over the records."""
        # [M, 2] the places before and after each move, and [M] what it is part of: 2i + 1 for the patch of record i,
        # 2i for what surrounds it.
        places, parts, count = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)], 0
        for moves, draw in zip(_moves(batch), batch["members"].draws, strict=True):
            if len(moves) >= 2:
                first, last = _span(len(moves), (context.seed, *draw))
                part = np.full(len(moves), 2 * count)
                part[first:last] += 1
                places.append(moves)
                parts.append(part)
                count += 1
        device = batch["label_ids"].device
        before, after = torch.from_numpy(np.concatenate(places)).to(device).unbind(1)
        moved = encoded.at(after, self.layer).float() - encoded.at(before, self.layer).float()
        sums = moved.new_zeros((2 * count, moved.shape[1]))
        sums = sums.index_add(0, torch.from_numpy(np.concatenate(parts)).to(device), moved)
        return apart(sums[::2], sums[1::2]).sum()


def tube(triples: Tensor) -> Tensor:
    """``1 - cos(h_t - h_r, h_r - h_s)``, summed: a float32 scalar, 0 for no triples.

    Args:
        triples: ``[S, 3, D]``, hidden states at places s < r < t of a text.
    """
    first, second, third = triples.float().unbind(dim=1)
    return apart(third - second, second - first).sum()


def _texts(batch: Batch) -> list[Numbers]:
    """The flat places of each record's own text that see all before them."""
    members = batch["members"]
    return [np.delete(path, alone) for path, alone in zip(members.paths, members.isolated, strict=True)]


def _moves(batch: Batch) -> list[Numbers]:
    """``[K, 2]`` for each record: flat places before and at each token of its messages."""
    members = batch["members"]
    found = []
    for path, messages in zip(members.paths, members.messages, strict=True):
        # Nothing stands before the first token of a text.
        tokens = [np.arange(max(first, 1), last) for first, last, _ in messages.tolist()]
        own = np.concatenate([np.empty(0, np.int64), *tokens])
        found.append(np.stack([path[own - 1], path[own]], axis=1))
    return found


def _span(length: int, place: tuple[int, ...]) -> tuple[int, int]:
    """A span of some, but not all, of so many tokens: its start uniform, then its end."""
    draw = np.random.default_rng(place)
    first = int(draw.integers(length))
    last = int(draw.integers(first + 1, length + 1 if first else length))
    return first, last
