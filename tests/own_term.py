"""A term as a user writes it, with weights of its own and a hidden layer that nothing else reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.encode import Encoded
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.term import Context, Term


def objective_with(config: JepaConfig, *more: Term) -> Objective:
    """The objective of a configuration, and further terms."""
    described = Objective.from_config(config)
    return Objective([*described.terms.values(), *more], described.layer)


@dataclass
class NextLatent(Term):
    """Squared distance of a linear map of one hidden state to the next one, over the text of every record."""

    name: ClassVar[str] = "latent_loss"
    words: ClassVar[str] = "next latent"
    layers: ClassVar[tuple[int, ...]] = (1,)

    def count(self, batch: Batch) -> int:
        """Neighbours."""
        return sum(len(path) - 1 for path in batch["members"].paths)

    def __call__(self, encoded: Encoded, batch: Batch, context: Context) -> Tensor:
        """Summed over them, a mean over dimensions."""
        del context
        paths = [torch.from_numpy(path) for path in batch["members"].paths]
        none = torch.empty(0, dtype=torch.long)
        here = encoded.at(torch.cat([none, *(path[:-1] for path in paths)]), 1)
        there = encoded.at(torch.cat([none, *(path[1:] for path in paths)]), 1)
        return (encoded.heads[self.name](here) - there.detach()).square().mean(-1).sum()

    def modules(self, config: Any) -> nn.Module:
        """The map."""
        return nn.Linear(config.hidden_size, config.hidden_size)
