"""Next-token prediction: the LM loss, and the same on the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from torch import Tensor

from stepjepa.objectives.term import Context, Term, term

if TYPE_CHECKING:
    from stepjepa.batch.collate import Batch
    from stepjepa.config import JepaConfig
    from stepjepa.models.encode import Encoded


@term("lm_loss", "LM loss")
@dataclass
class LMLoss(Term):
    """Mean cross-entropy of the labelled tokens (``JepaConfig.labels``)."""

    def count(self, batch: Batch) -> int:
        """Labels."""
        return len(batch["label_ids"])

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Cross-entropy, summed; with prompt labels in the batch the head runs for their positions, too."""
        del context
        index, rows = _positions(batch, "label")
        return encoded.token_loss(index, batch["label_ids"], rows)

    @classmethod
    def from_config(cls, config: JepaConfig, seed: int) -> Self:
        """Every objective has it."""
        del seed
        return cls(weight=config.gamma)


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
        del context
        index, rows = _positions(batch, "prompt")
        return encoded.token_loss(index, batch["prompt_ids"], rows)

    @classmethod
    def from_config(cls, config: JepaConfig, seed: int) -> Self | None:
        """Where ``prompt_loss_weight`` is not 0."""
        del seed
        return cls(weight=config.prompt_loss_weight) if config.prompt_loss_weight else None


def _positions(batch: Batch, kind: str) -> tuple[Tensor, Tensor]:
    """Distinct flat positions of one kind of labels, and at which of them each label is read."""
    index, rows = batch["head_index"], batch[f"{kind}_row"]
    if not len(batch["prompt_row"]):
        return index, rows
    used, own = rows.unique(return_inverse=True)
    return index[used], own
