"""LM loss and alignment loss as one objective with named parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepjepa.alignment import AlignmentLoss, make_alignment
from stepjepa.config import JepaConfig
from stepjepa.embeddings import Outputs


class Sums(NamedTuple):
    """The parts of a batch before they are divided by counts.

    Attributes:
        lm: sum over labelled tokens of the cross-entropy, in nats; a scalar.
        jepa: sum over pairs of the alignment loss; a scalar.
    """

    lm: Tensor
    jepa: Tensor


class Parts(NamedTuple):
    """The named parts of the loss.

    Attributes:
        lm_loss: cross-entropy per labelled token.
        jepa_loss: alignment loss per pair.
        loss: ``gamma * lm_loss + lbd * jepa_loss``.
    """

    lm_loss: Tensor
    jepa_loss: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Objective:
    """``gamma * LM loss + lbd * alignment loss`` (arXiv 2509.14252, eq. 2).

    Both are means over an optimizer step: sums over the batch divided by the counts of the whole step, so that neither
    accumulation nor the number of processes changes the gradient.

    Args:
        alignment: distance between paired embeddings.
        gamma: weight of the LM loss.
        lbd: weight of the alignment loss.
    """

    alignment: AlignmentLoss
    gamma: float = 1.0
    lbd: float = 0.1

    @classmethod
    def from_config(cls, config: JepaConfig) -> Objective:
        """The objective that a configuration describes."""
        return cls(make_alignment(config.jepa_loss_type, config.infonce_temperature), config.gamma, config.lbd)

    def sums(self, outputs: Outputs, label_ids: Tensor) -> Sums:
        """The undivided parts of one batch.

        Args:
            outputs: of ``embeddings.forward``.
            label_ids: ``[N]``, the tokens to be predicted at the N rows of the logits.
        """
        lm = F.cross_entropy(outputs.logits.float(), label_ids, reduction="sum")
        if len(outputs.source):
            return Sums(lm, self.alignment(outputs.source, outputs.target))
        # Nothing to align, and still part of the graph: every process must take part in every backward pass.
        return Sums(lm, outputs.source.float().sum())

    def parts(self, sums: Sums, counts: Tensor) -> Parts:
        """Divide by the counts of the step and weigh.

        Args:
            sums: of this batch, or of several added up.
            counts: ``[2]``, labelled tokens and pairs of the whole optimizer step; zeros count as one.
        """
        labels, pairs = counts.clamp(min=1).to(torch.float32)
        lm_loss, jepa_loss = sums.lm / labels, sums.jepa / pairs
        return Parts(lm_loss, jepa_loss, self.gamma * lm_loss + self.lbd * jepa_loss)
