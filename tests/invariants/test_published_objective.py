"""Layout ``separate`` with the reference's labels is the published objective: three padded rows, three passes.

The published code is written out here in plain terms and compared in loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.segments import ForestBuilder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.objective import Objective

ModelFactory = Callable[..., Any]


def padded(tokenizer: Any, chats: Sequence[Sequence[dict[str, str]]]) -> tuple[Tensor, Tensor]:
    """Chats in the template, padded on the right, with their attention mask."""
    texts = [tokenizer.apply_chat_template(list(chat), tokenize=False) for chat in chats]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    length = max(map(len, rows)) + 3
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


def published_loss(
    model: Any, tokenizer: Any, records: Sequence[Record], *, k: int, last_token: int, lbd: float, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    ids, mask = padded(tokenizer, [record.messages for record in records])
    labels = ids.masked_fill((mask == 0) | (ids == tokenizer.eos_token_id), -100)
    lm = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    def embed(chats: Sequence[Sequence[dict[str, str]]]) -> Tensor:
        ids, mask = padded(tokenizer, chats)
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return out.hidden_states[-1][torch.arange(len(ids)), mask.sum(1) + last_token]

    predictors = "".join(f"<|predictor_{number}|>" for number in range(1, k + 1))
    user = embed([[{"role": "user", "content": record.messages[-2]["content"] + predictors}] for record in records])
    assistant = embed([[{"role": "assistant", "content": record.answer}] for record in records])
    jepa = 1 - F.cosine_similarity(user, assistant, dim=-1).mean()
    return lm, jepa, gamma * lm + lbd * jepa


@pytest.mark.parametrize("encoding", ["forest", "rows"])
@pytest.mark.parametrize("last_token", [-1, -2, -3])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("architecture", ["llama", "gemma2_window"])
def test_equals_the_published_objective(
    *, architecture: str, k: int, last_token: int, encoding: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    lbd, gamma = 2.0, 0.7
    attention = "eager" if architecture == "gemma2_window" else "sdpa"
    records = tiny.records()
    plain, model = tiny_model(architecture, attention), tiny_model(architecture, attention)
    expected = published_loss(plain, trained_tokenizer, records, k=k, last_token=last_token, lbd=lbd, gamma=gamma)

    config = JepaConfig(mode="llm-jepa", labels="reference", predictors=k, last_token=last_token, lbd=lbd, gamma=gamma)
    batch = ForestCollator(0, encoding)(ForestBuilder(trained_tokenizer, config).build(records))
    if encoding == "forest":
        enable_forest(model)
    objective = Objective.from_config(config)
    sums = objective.sums(forward(model, batch))
    counts = torch.tensor([batch["label_ids"].numel(), batch["source_index"].numel(), 0])
    found = objective.parts(sums, counts)
    for one, other in zip((found[name] for name in ("lm_loss", "jepa_loss", "loss")), expected, strict=True):
        tiny.assert_same(one, other)
    assert 0.05 < float(expected[1].detach()) < 1.95
    tiny.assert_same_gradients(tiny.gradients(model, found["loss"]), tiny.gradients(plain, expected[2]))
