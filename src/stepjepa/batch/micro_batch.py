"""A micro-batch: what the model and the terms of the objective are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepjepa.batch.mask import Trees
from stepjepa.batch.sequences import Ids, Numbers


@dataclass(frozen=True)
class Members:
    """The records of a micro-batch. No tensor, so that no device is sent it."""

    lines: tuple[int, ...] = ()  # of each in its file, counted from 1
    lengths: tuple[int, ...] = ()  # tokens of each record's sequences, nothing shared
    draws: tuple[tuple[int, int], ...] = ()  # epoch and index of each
    paths: tuple[Numbers, ...] = ()  # of each the flat places of its own text, in its order
    isolated: tuple[Numbers, ...] = ()  # of each the numbers of its path's tokens that do not see all text before them
    labels: tuple[Ids, ...] = ()  # of each which tokens of its path are trained to predict the next
    prompt: tuple[Ids, ...] = ()  # of each which tokens of its path come before one of a user message, trained or not
    plain_tokens: int = 0  # of the records as plain rows without padding


class Batch(dict[str, Any]):
    """A micro-batch, with R rows of T tokens, U positions whose logits are needed, N labels and P pairs.

    ``input_ids``, ``attention_mask`` (all ones: padding stands on the right, where no causal token sees it) and
    ``position_ids`` are ``[R, T]``, the last only where rows are more than plain causal text. A flat position is
    ``row * T + column``. A position that several records share carries the labels and readouts of all of them.

    * ``head_index`` ``[U]`` distinct flat positions that predict a token; ``label_row`` ``[N]`` which of them each
      label is read at, ``label_ids`` ``[N]`` the token that it must predict; ``prompt_row``, ``prompt_ids`` the same
      for tokens of the prompt.
    * ``source_index``, ``target_index`` ``[P]`` flat positions of the readouts, the last one where several are
      averaged; only then: ``source_tokens``, ``source_pair`` (``target_...``), the flat positions and which pair each
      belongs to.
    * ``start``, ``end`` ``[R, T]`` of trees, see ``mask.Trees``.
    * ``num_tokens`` ``[1]`` tokens that are computed, without padding; ``num_records`` ``[2]`` records, and those
      without a pair.
    * ``members``: whose they are, see :class:`Members`.
    * ``further``: only where a micro-batch is run in several passes of rows of like length: a batch for each pass after
      the first, with ``input_ids`` to ``end`` alone. Flat positions go on from pass to pass.
    """

    def to(self, device: torch.device | str) -> Batch:
        """The same with its tensors on a device."""
        moved = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in self.items()}
        if "further" in moved:
            moved["further"] = [each.to(device) for each in moved["further"]]
        return Batch(moved)

    @property
    def passes(self) -> list[Batch]:
        """All forward passes, the first of which is this batch."""
        return [self, *self.get("further", ())]

    @property
    def token_ids(self) -> Tensor:
        """``[cells]`` token id at each flat position."""
        return torch.cat([each["input_ids"].flatten() for each in self.passes])

    @property
    def pairs(self) -> int:
        """P."""
        return len(self["source_index"])

    @property
    def trees(self) -> Trees | None:
        """Who sees whom; None where rows are plain causal text."""
        if "end" not in self:
            return None
        return Trees(self["start"], self["end"], self["position_ids"], bool(self["isolates"]))
