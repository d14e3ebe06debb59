"""Next-token prediction: the LM loss, and the same on the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.models.encode import Encoded


@term("lm_loss", "LM loss")
@dataclass
class LMLoss(Term):
    """Mean cross-entropy of the labelled tokens (``JepaConfig.labels``)."""

    def count(self, batch: Batch) -> int:
        """Labels."""
        return len(batch["label_ids"])

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Cross-entropy, summed."""
        return _cross_entropy(encoded, batch, "label")


@term("prompt_loss", "prompt LM loss")
@dataclass
class PromptLoss(Term):
    """Mean cross-entropy of the tokens of user messages; system prompt and template are not counted."""

    weight: float = 0.1

    def count(self, batch: Batch) -> int:
        """Tokens of the prompts."""
        return len(batch["prompt_ids"])

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Cross-entropy, summed."""
        return _cross_entropy(encoded, batch, "prompt")


def _cross_entropy(encoded: Encoded, batch: Batch, kind: str) -> Tensor:
    """Of one kind of labels; the head runs once for each distinct position that carries one."""
    index, rows = batch["head_index"], batch[f"{kind}_row"]
    if len(batch["prompt_row"]):
        # Both kinds have positions among these.
        used, rows = rows.unique(return_inverse=True)
        index = index[used]
    return encoded.token_loss(index, batch[f"{kind}_ids"], rows)
