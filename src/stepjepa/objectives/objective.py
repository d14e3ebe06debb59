"""The LM loss, the alignment loss and whatever else is switched on, as one objective with named parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stepjepa.config import JepaConfig, LbdSchedule
from stepjepa.models.embeddings import Outputs
from stepjepa.objectives.alignment import AlignmentLoss, InfoNCE, make_alignment
from stepjepa.objectives.regularizers import Covariance, Regularizer, SIGReg, Variance, tube

Sums = dict[str, Tensor]
"""Part of the objective -> its sum over the labels, pairs or triples of a batch, a scalar."""

Parts = dict[str, Tensor]
"""Part of the objective -> its mean, a scalar; ``loss`` is their weighted sum."""

Gather = Callable[[Tensor], tuple[Tensor, int]]
"""Rows ``[P, D]`` to those of all processes, and the index of the first of one's own; see ``gathering.gather_rows``."""

UNITS = {"lm_loss": 0, "stp_loss": 2}
"""What a part is a mean over: 0 labels, 2 triples; the others are means over pairs (1)."""

PART_WORDS = {
    "lm_loss": "LM loss",
    "jepa_loss": "alignment loss",
    "sigreg_loss": "SIGReg",
    "variance_loss": "variance",
    "covariance_loss": "covariance",
    "stp_loss": "STP",
}
"""What people are told that a part is."""


def alone(rows: Tensor) -> tuple[Tensor, int]:
    """The ``Gather`` of a single process."""
    return rows, 0


@dataclass(frozen=True)
class Objective:
    """``gamma * LM loss + lbd * alignment loss`` (arXiv 2509.14252, eq. 2), and further weighted terms.

    All are means over an optimizer step: sums over the batch divided by the counts of the whole step, so that neither
    accumulation nor the number of processes changes the gradient. Terms that compare the pairs of a batch (InfoNCE,
    the regularizers) see those of all processes, but of one micro-batch.

    Args:
        alignment: distance between paired embeddings; None where there are no views.
        gamma: weight of the LM loss.
        lbd: weight of the alignment loss.
        regularizers: part -> its weight and the term. It acts on all source and on all target embeddings of a batch;
            the values are added up, or averaged for SIGReg, as their papers do.
        stp: weight of Semantic Tube Prediction.
        through_target: let the alignment loss train the model through the target, too.
        schedule: of ``lbd`` over the run; see ``JepaConfig.lbd_schedule``.
        warmup: share of the run over which ``lbd`` rises, for ``warmup``.
    """

    alignment: AlignmentLoss | None
    gamma: float = 1.0
    lbd: float = 0.1
    regularizers: dict[str, tuple[float, Regularizer]] = field(default_factory=dict)
    stp: float = 0.0
    through_target: bool = True
    schedule: LbdSchedule = "constant"
    warmup: float = 0.1

    @classmethod
    def from_config(cls, config: JepaConfig, seed: int = 42) -> Objective:
        """The objective that a configuration describes.

        Args:
            config: see ``JepaConfig``.
            seed: of what is drawn at random, the directions of SIGReg.
        """
        terms: dict[str, tuple[float, Regularizer]] = {
            "sigreg_loss": (config.sigreg, SIGReg(seed=seed)),
            "variance_loss": (config.variance, Variance()),
            "covariance_loss": (config.covariance, Covariance()),
        }
        return cls(
            make_alignment(config.jepa_loss_type, config.infonce_temperature) if config.uses_views else None,
            config.gamma,
            config.lbd,
            {name: term for name, term in terms.items() if term[0] and config.uses_views},
            config.stp,
            config.target_grad == "on",
            config.lbd_schedule,
            config.lbd_warmup,
        )

    @property
    def names(self) -> list[str]:
        """The parts that are switched on."""
        aligned = ["jepa_loss", *self.regularizers] if self.alignment is not None else []
        return ["lm_loss", *aligned, *(["stp_loss"] if self.stp else [])]

    def lbd_at(self, progress: float) -> float:
        """The weight of the alignment loss at a share of the run, 0 to 1."""
        if self.schedule == "warmup":
            return self.lbd * min(1.0, progress / self.warmup)
        if self.schedule == "cosine":
            return self.lbd * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lbd

    def sums(self, outputs: Outputs, *, step: int = 0, gather: Gather = alone) -> Sums:
        """The undivided parts of one batch.

        Args:
            outputs: of ``embeddings.forward``.
            step: number of the optimizer step, which decides what is drawn at random.
            gather: brings in the embeddings of other processes; called equally often on each.
        """
        sums = {"lm_loss": outputs.lm_loss}
        if self.alignment is not None:
            sums |= self._aligned(self.alignment, outputs, step, gather)
        if self.stp:
            sums["stp_loss"] = tube(outputs.triples)
        return sums

    def _aligned(self, alignment: AlignmentLoss, outputs: Outputs, step: int, gather: Gather) -> Sums:
        source = outputs.source
        target = outputs.target if self.through_target else outputs.target.detach()
        if isinstance(alignment, InfoNCE):
            candidates, first = gather(target)
            sums = {"jepa_loss": alignment(source, candidates, first)}
        else:
            sums = {"jepa_loss": alignment(source, target)}
        if self.regularizers:
            every = gather(source)[0], gather(outputs.target)[0]
            for name, (_, term) in self.regularizers.items():
                value = term(every[0], step) + term(every[1], step)
                # Each process brings in its own share of pairs, so that all together bring in one for every pair.
                sums[name] = value * len(source) / (2 if isinstance(term, SIGReg) else 1)
        return sums

    def parts(self, sums: Sums, counts: Tensor, progress: float | None = None) -> Parts:
        """Divide by the counts of the step and weigh.

        Args:
            sums: of this batch, or of several added up.
            counts: ``[3]``, labelled tokens, pairs and triples of the whole optimizer step; zeros count as one.
            progress: share of the run that is over, for the schedule of ``lbd``; None takes ``lbd`` itself.
        """
        divisors = counts.clamp(min=1).to(torch.float32)
        parts = {name: value / divisors[UNITS.get(name, 1)] for name, value in sums.items()}
        weights = {"lm_loss": self.gamma, "stp_loss": self.stp}
        weights["jepa_loss"] = self.lbd if progress is None else self.lbd_at(progress)
        weights |= {name: weight for name, (weight, _) in self.regularizers.items()}
        return parts | {"loss": torch.stack([weights[name] * part for name, part in parts.items()]).sum()}
