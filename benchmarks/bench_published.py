"""The published way to run LLM-JEPA, in plain torch, as something to compare with.

Its objective is that of layout ``separate`` with ``labels='reference'``; what differs is how the views are run:

* ``three rows``: the whole chat, the user's message with predictors and the assistant's message are three rows;
* ``two rows``: both views stand side by side in one row, and a dense float mask ``[R, 1, T, T]``, added to the
  attention scores, keeps them from seeing each other.

Every row is padded to a fixed length as shipped, or to the longest of the batch; logits are computed at every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from stepjepa.data.records import Record
from stepjepa.forests.forest import IGNORE
from stepjepa.text.predictors import predictor_token

LAST_TOKEN = -2
"""Readout counted from the end of a templated view; -2 is ChatML's end of turn, whose last token is a line end."""


class Texts(NamedTuple):
    """A record as token ids: the whole chat, the source view with its predictors, the target view."""

    chat: list[int]
    source: list[int]
    target: list[int]


def tokenize(records: Sequence[Record], tokenizer: Any, predictors: int) -> list[Texts]:
    """The three texts of every record.

    Args:
        records: their last user and assistant messages, or their explicit views, are the views.
        tokenizer: with predictor tokens.
        predictors: K.
    """
    tail = "".join(predictor_token(number) for number in range(1, predictors + 1))

    def ids(messages: Sequence[Any]) -> list[int]:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = []
    for record in records:
        user = record.messages[-2]["content"] if record.text is None else record.text
        assistant = record.answer if record.code is None else record.code
        source = ids([{"role": "user", "content": user + tail}])
        found.append(Texts(ids(record.messages), source, ids([{"role": "assistant", "content": assistant}])))
    return found


class PublishedCollator:
    """Makes the rows of a batch.

    Args:
        tokenizer: for padding and for the end of turn, which is not trained.
        rows: ``three rows`` or ``two rows``.
        pad_to: tokens of every row, more where one is longer; 0 trims to the longest.

    Raises:
        ValueError: ``rows`` is neither.

    The batch holds ``input_ids`` and ``labels`` ``[R, T]``, ``attention_mask`` ``[R, T]`` (three rows) or
    ``[R, 1, T, T]`` (two rows), ``source`` and ``target`` ``[B]`` (flat positions of the readouts), ``num_tokens`` and
    ``num_records`` (scalars).
    """

    def __init__(self, tokenizer: Any, rows: str, pad_to: int) -> None:
        if rows not in ("three rows", "two rows"):
            raise ValueError(f"rows: expected 'three rows' or 'two rows', got '{rows}'")
        self._pad, self._end = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
        self._together = rows == "two rows"
        self._pad_to = pad_to

    def __call__(self, texts: Sequence[Texts]) -> dict[str, Tensor]:
        """Collate."""
        count = len(texts)
        rows = [[text.chat] for text in texts]
        if self._together:
            rows += [[text.source, text.target] for text in texts]
        else:
            rows += [[text.source] for text in texts] + [[text.target] for text in texts]
        lengths = [sum(map(len, parts)) for parts in rows]
        length = max(self._pad_to, *lengths)
        ids = torch.full((len(rows), length), self._pad)
        for row, parts in enumerate(rows):
            ids[row, : lengths[row]] = torch.tensor([token for part in parts for token in part])
        present = torch.arange(length) < torch.tensor(lengths)[:, None]
        labels = ids.masked_fill(~present | (ids == self._end), IGNORE)
        labels[count:] = IGNORE
        first = torch.arange(count)
        sizes = torch.tensor([[len(text.source), len(text.target)] for text in texts])
        source = (count + first) * length + sizes[:, 0] + LAST_TOKEN
        behind = sizes[:, 0] if self._together else torch.zeros(count, dtype=torch.long)
        target = (count * (1 if self._together else 2) + first) * length + behind + sizes[:, 1] + LAST_TOKEN
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": self._additive(rows, length) if self._together else present.long(),
            "source": source,
            "target": target,
            "num_tokens": torch.tensor(sum(lengths)),
            "num_records": torch.tensor(count),
        }

    @staticmethod
    def _additive(rows: Sequence[Sequence[Sequence[int]]], length: int) -> Tensor:
        """``[R, 1, T, T]`` float32: 0 where a query sees a key, the lowest number elsewhere."""
        allowed = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)
        for row, parts in enumerate(rows):
            start = 0
            for part in parts:
                end = start + len(part)
                allowed[row, start:end, start:end] = torch.ones(len(part), len(part), dtype=torch.bool).tril()
                start = end
        mask = torch.full(allowed.shape, torch.finfo(torch.float32).min)
        return mask.masked_fill_(allowed, 0.0)[:, None]


def published_loss(model: nn.Module, batch: dict[str, Tensor], lbd: float) -> tuple[Tensor, Tensor, Tensor]:
    """LM loss of the chats, ``1 - cos`` of the views, and their weighted sum.

    Args:
        model: a causal language model with sdpa attention.
        batch: of :class:`PublishedCollator`, on the model's device.
        lbd: weight of the alignment loss.
    """
    mask = batch["attention_mask"]
    weight = next(model.parameters())
    outputs = model(
        input_ids=batch["input_ids"],
        attention_mask=mask.to(weight.dtype) if mask.is_floating_point() else mask,
        labels=batch["labels"],
        output_hidden_states=True,
        use_cache=False,
    )
    states = outputs.hidden_states[-1].flatten(0, 1)  # [R * T, D]
    cosine = F.cosine_similarity(states[batch["source"]].float(), states[batch["target"]].float(), dim=-1)
    alignment = 1 - cosine.mean()
    return outputs.loss, alignment, outputs.loss + lbd * alignment


class PublishedTrainer(Trainer):
    """transformers' Trainer with :func:`published_loss`.

    Args:
        lbd: weight of the alignment loss.
        kwargs: as in Trainer.
    """

    def __init__(self, *, lbd: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._lbd = lbd

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one batch; there is no accumulation here."""
        del num_items_in_batch
        loss = published_loss(model, inputs, self._lbd)[2]
        return (loss, {}) if return_outputs else loss
