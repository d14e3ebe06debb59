"""A term as a user writes it, with weights of its own and a hidden layer that nothing else reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from stepjepa import Batch, Context, Encoded, JepaConfig, Objective, Term

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def objective_with(config: JepaConfig, *more: Term, model: nn.Module | None = None) -> Objective:
    """The objective of a configuration, for a model, and further terms."""
    described = Objective.from_config(config, model)
    return Objective([*described.terms.values(), *more], described.layer)


@dataclass(frozen=True)
class Margin:
    """A contrastive distance of a user's own: ``max(0, 1 - cos(s, t) + cos(s, t'))``, a mean over all other t'."""

    compares_pairs = True

    def __call__(self, source: Tensor, target: Tensor, first: int = 0) -> Tensor:
        """Row ``first + i`` of the targets ``[Q, D]`` is the partner of source i."""
        cosines = torch.nn.functional.normalize(source, dim=-1) @ torch.nn.functional.normalize(target, dim=-1).T
        partners = cosines.diagonal(first)[:, None]
        hinges = (1 - partners + cosines).clamp(min=0)
        # The partner itself has a hinge of 1.
        return ((hinges.sum(1) - 1) / max(cosines.shape[1] - 1, 1)).sum()


@dataclass
class NextLatent(Term):
    """Squared distance of a linear map of one hidden state to the next one, over the text of every record."""

    name: ClassVar[str] = "latent_loss"
    label: ClassVar[str] = "next latent"
    layers: ClassVar[tuple[int, ...]] = (1,)

    def count(self, batch: Batch) -> int:
        """Neighbours."""
        return sum(len(path) - 1 for path in batch.records.paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Summed over them, a mean over dimensions."""
        del context
        paths = [torch.from_numpy(path) for path in batch.records.paths]
        none = torch.empty(0, dtype=torch.long)
        here = encoded.at(torch.cat([none, *(path[:-1] for path in paths)]), 1)
        there = encoded.at(torch.cat([none, *(path[1:] for path in paths)]), 1)
        return (encoded.heads[self.name](here) - there.detach()).square().mean(-1).sum()

    def modules(self, config: PreTrainedConfig) -> nn.Module:
        """The map."""
        return nn.Linear(config.hidden_size, config.hidden_size)
