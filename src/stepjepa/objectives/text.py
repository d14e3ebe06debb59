"""Terms on the text of each record: LM loss, prompt LM loss, and Semantic Tube Prediction (STP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.objectives.cosine import cosine_distance
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.micro_batch import Batch
    from stepjepa.models.encoded import Encoded


@term("lm_loss", "LM loss")
@dataclass
class LMLoss(Term):
    """Mean cross-entropy of the labelled tokens (``JepaConfig.labels``).

    Attributes:
        weight: of the mean in the objective.
    """

    def count(self, batch: Batch) -> int:
        return len(batch.label_ids)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        return encoded.token_loss(batch.head_index, batch.label_ids, batch.label_row)


@term("prompt_loss", "prompt LM loss")
@dataclass
class PromptLoss(Term):
    """Mean cross-entropy of the tokens of user messages; system prompt and template are not counted.

    Attributes:
        weight: of the mean in the objective.
    """

    weight: float = 0.1

    def count(self, batch: Batch) -> int:
        return len(batch.prompt_ids)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        return encoded.token_loss(batch.prompt_index, batch.prompt_ids, batch.prompt_row)


@term("stp_loss", "STP")
@dataclass
class SemanticTube(Term):
    """Semantic Tube Prediction (arXiv 2602.22617): ``1 - cos(h_t - h_r, h_r - h_s)`` for each main text.

    s < r < t are three random positions; they depend on the run's seed, and on epoch and index of the record. The loss
    is 0 if the hidden states of ``layer`` move on a straight line, or if two of the three are equal.

    Attributes:
        weight: of the mean in the objective.
        layer: index in transformers' ``hidden_states``; -1 is the last.
    """

    weight: float = 0.02
    layer: int = -1

    @property
    def layers(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on a setting here
        return (self.layer,)

    def count(self, batch: Batch) -> int:
        return sum(len(text) >= 3 for text in _texts(batch))

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        triples = [np.empty((0, 3), np.int64)]
        for text, key in zip(_texts(batch), batch.records.rng_keys, strict=True):
            if len(text) >= 3:
                # Uniform over all triples of positions.
                chosen = np.random.default_rng((context.seed, *key)).choice(len(text), 3, replace=False)
                triples.append(text[np.sort(chosen)][None])
        index = torch.from_numpy(np.concatenate(triples)).to(batch.label_ids.device, non_blocking=True)
        return tube(encoded.at(index, self.layer))


def tube(triples: Tensor) -> Tensor:
    """Sum ``1 - cos(h_t - h_r, h_r - h_s)`` over S triples of hidden states ``[S, 3, D]`` at positions s < r < t."""
    first, second, third = triples.float().unbind(dim=1)
    return cosine_distance(third - second, second - first).sum()


def _texts(batch: Batch) -> list[NDArray[np.int64]]:
    """Return the flat positions of each record's main text, without tokens that are isolated from earlier text."""
    records = batch.records
    return [np.delete(path, isolated) for path, isolated in zip(records.paths, records.isolated, strict=True)]
