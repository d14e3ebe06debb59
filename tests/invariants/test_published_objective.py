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
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.objective import Objective, jepa_loss

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
    # Its collator masks the padding token wherever it stands: where that is the end of turn, none is trained.
    labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
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


@pytest.mark.sample(7)
@pytest.mark.parametrize("encoding", ["tree", "rows"])
@pytest.mark.parametrize("last_token", [-1, -2, -3])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(
    ("architecture", "padded_with"), [("llama", "pad"), ("llama", "eos"), ("gemma2_window", "pad")]
)
def test_equals_the_published_objective(
    *,
    architecture: str,
    padded_with: str,
    k: int,
    last_token: int,
    encoding: str,
    tiny_model: ModelFactory,
    tiny_tokenizer: Any,
) -> None:
    tokenizer = tiny_tokenizer
    if padded_with == "eos":
        tokenizer.pad_token = tokenizer.eos_token
    lbd, gamma = 2.0, 0.7
    attention = "eager" if architecture == "gemma2_window" else "sdpa"
    records = tiny.records()
    plain, model = tiny_model(architecture, attention), tiny_model(architecture, attention)
    expected = published_loss(plain, tokenizer, records, k=k, last_token=last_token, lbd=lbd, gamma=gamma)

    config = JepaConfig(mode="llm-jepa", labels="reference", predictors=k, last_token=last_token, lbd=lbd, gamma=gamma)
    batch = tiny.batch_of(tokenizer, config, records, encoding=encoding)
    if encoding == "tree":
        enable_trees(model)
    losses = jepa_loss(model, batch, Objective.from_config(config))
    for one, other in zip((*losses.parts.values(), losses.loss), expected, strict=True):
        tiny.assert_same(one, other)
    assert 0.05 < float(expected[1].detach()) < 1.95
    tiny.assert_same_gradients(tiny.gradients(model, losses.loss), tiny.gradients(plain, expected[2]))
