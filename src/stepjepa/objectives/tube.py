"""Semantic Tube Prediction: hidden states of a text should move along a straight line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from stepjepa.objectives.alignment import apart
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.batch.pack import Numbers
    from stepjepa.config import JepaConfig
    from stepjepa.models.encode import Encoded


@term("stp_loss", "STP")
@dataclass
class Tube(Term):
    """``1 - cos(h_t - h_r, h_r - h_s)`` at three random places s < r < t of each main text (arXiv 2602.22617).

    It is 0 where hidden states move on a straight line, and where two of the three are one and the same. It needs no
    views. The published script computes something else, see :class:`RandomSpan`.

    Attributes:
        layer: hidden state that is read.
        seed: of the places, with epoch and index of the record.
    """

    weight: float = 0.02
    layer: int = -1
    seed: int = 42

    @property
    def layers(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on a setting here
        """The one that is read."""
        return (self.layer,)

    def count(self, batch: Batch) -> int:
        """Records of three tokens or more."""
        return sum(len(text) >= 3 for text in _texts(batch))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Summed over the records."""
        del context
        drawn = [
            _triple(text, (self.seed, *draw)) for text, draw in zip(_texts(batch), batch["members"].draws, strict=True)
        ]
        triples = np.array([triple for triple in drawn if triple is not None], np.int64).reshape(-1, 3)
        index = torch.from_numpy(triples).to(batch["label_ids"].device)
        return tube(encoded.at(index, self.layer))

    @classmethod
    def from_config(cls, config: JepaConfig, seed: int) -> Self | None:
        """Where ``stp`` is not 0."""
        return cls(config.stp, config.jepa_layer, seed) if config.stp else None


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


def _triple(text: Numbers, place: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Three ascending places, every choice as likely as any other; None for a text of less than three tokens."""
    if len(text) < 3:
        return None
    first, second, third = sorted(np.random.default_rng(place).choice(len(text), 3, replace=False))
    return int(text[first]), int(text[second]), int(text[third])
