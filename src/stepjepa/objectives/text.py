"""Terms on the text of each record: LM loss, prompt LM loss, and Semantic Tube Prediction (STP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.objectives.monitors import apart
from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.micro_batch import Batch


@term("lm_loss", "LM loss")
@dataclass
class LMLoss(Term):
    """Mean cross-entropy of the labelled tokens (``JepaConfig.labels``)."""

    kind: ClassVar[str] = "label"

    def count(self, batch: Batch) -> int:
        return len(batch[f"{self.kind}_ids"])

    def __call__(self, encoded: Any, batch: Batch, context: Context) -> Tensor:
        index, rows = batch["head_index"], batch[f"{self.kind}_row"]
        if len(batch["prompt_row"]):
            # Both kinds have positions here; the head runs once for each distinct one with a label of this kind.
            used, rows = rows.unique(return_inverse=True)
            index = index[used]
        return encoded.token_loss(index, batch[f"{self.kind}_ids"], rows)


@term("prompt_loss", "prompt LM loss")
@dataclass
class PromptLoss(LMLoss):
    """Mean cross-entropy of the tokens of user messages; system prompt and template are not counted."""

    kind = "prompt"
    weight: float = 0.1


@term("stp_loss", "STP")
@dataclass
class Tube(Term):
    """``1 - cos(h_t - h_r, h_r - h_s)`` at three random places s < r < t of each main text (arXiv 2602.22617).

    It is 0 where the hidden states ``layer`` move on a straight line, and where two of the three are the same. The
    places depend on the run's seed, and on epoch and index of the record.
    """

    weight: float = 0.02
    layer: int = -1

    @property
    def layers(self) -> tuple[int, ...]:  # type: ignore[override]  # depends on a setting here
        return (self.layer,)

    def count(self, batch: Batch) -> int:
        return sum(len(text) >= 3 for text in _texts(batch))

    def __call__(self, encoded: Any, batch: Batch, context: Context) -> Tensor:
        triples = [np.empty((0, 3), np.int64)]
        for text, draw in zip(_texts(batch), batch["members"].draws, strict=True):
            if len(text) >= 3:
                # Every choice is as likely as any other.
                chosen = np.random.default_rng((context.seed, *draw)).choice(len(text), 3, replace=False)
                triples.append(text[np.sort(chosen)][None])
        index = torch.from_numpy(np.concatenate(triples)).to(batch["label_ids"].device)
        return tube(encoded.at(index, self.layer))


def tube(triples: Tensor) -> Tensor:
    """``1 - cos(h_t - h_r, h_r - h_s)``, summed over hidden states ``[S, 3, D]`` at places s < r < t of a text."""
    first, second, third = triples.float().unbind(dim=1)
    return apart(third - second, second - first).sum()


def _texts(batch: Batch) -> list[NDArray[np.int64]]:
    """The flat places of each record's own text that see all before them."""
    members = batch["members"]
    return [np.delete(path, alone) for path, alone in zip(members.paths, members.isolated, strict=True)]
