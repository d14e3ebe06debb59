"""Rows of new tokens in embedding and head: spare ones first, distinct, the same for the same seed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tiny
from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.models.token_rows import adapter_ids, give_plain_tokens, give_predictors, grow

ARCHITECTURES = ["llama", "qwen3"]  # tied, untied


def weights(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embedding.detach().clone(), head.detach().clone()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_embedding_grows_where_it_must(architecture: str, plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    model = tiny.make_model(architecture, vocab_size=len(tokenizer))
    old, old_head = weights(model)
    give_predictors(model, tokenizer, 3)
    embedding, head = weights(model)
    ids = all_predictor_ids(tokenizer)
    assert embedding.shape[0] == head.shape[0] == len(tokenizer) == len(old) + 3
    assert ids == [len(old), len(old) + 1, len(old) + 2]
    assert torch.equal(embedding[: len(old)], old)
    assert torch.equal(head[: len(old)], old_head)
    distances = torch.cdist(embedding[ids], embedding[ids])[~torch.eye(3, dtype=torch.bool)]
    assert distances.min() > 0.5 * old.std(0).norm(), "the new tokens act as one"
    if architecture == "qwen3":
        # No predictor token is ever a label.
        assert torch.allclose(head[ids], old_head.mean(0).expand(3, -1), atol=1e-6)
    else:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_spare_rows_are_used_and_those_alike_drawn_anew(plain_tokenizer: Any) -> None:
    for spare in ("trained", "zeros", "alike"):
        tokenizer = copy.deepcopy(plain_tokenizer)
        model = tiny.make_model("qwen3", vocab_size=len(tokenizer) + 7)
        rows = slice(len(tokenizer), len(tokenizer) + 2)
        with torch.no_grad():
            if spare != "trained":
                model.get_input_embeddings().weight[len(tokenizer) :] = 0.0 if spare == "zeros" else 0.4
        old, old_head = weights(model)
        give_predictors(model, tokenizer, 2)
        embedding, head = weights(model)
        assert embedding.shape == old.shape
        assert torch.equal(head, old_head)
        assert torch.equal(embedding[rows], old[rows]) == (spare == "trained")
        assert (embedding[rows][0] - embedding[rows][1]).norm() > 0.5 * old[: len(tokenizer) - 1].std(0).norm()
        assert torch.equal(embedding[: rows.start], old[: rows.start])


def test_rows_depend_on_the_seed_and_are_given_once(plain_tokenizer: Any) -> None:
    found = []
    for seed in (1, 1, 2):
        tokenizer, model = copy.deepcopy(plain_tokenizer), tiny.make_model("llama", vocab_size=len(plain_tokenizer))
        give_predictors(model, tokenizer, 2, seed)
        found.append(weights(model)[0])
        give_predictors(model, tokenizer, 2, seed + 5)
        assert torch.equal(weights(model)[0], found[-1]), "tokens that were there are drawn again"
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    give_predictors(model, tokenizer, 0)
    assert torch.equal(weights(model)[0], found[-1])


def test_tokens_of_the_form_without_a_chat(plain_tokenizer: Any) -> None:
    tokenizer, model = copy.deepcopy(plain_tokenizer), tiny.make_model("llama", vocab_size=len(plain_tokenizer))
    ids = give_plain_tokens(model, tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|perception|>", "<|eot_id|>"]
    assert weights(model)[0].shape[0] == len(tokenizer)
    ends = model.generation_config.eos_token_id
    assert ids[1] in (ends if isinstance(ends, list) else [ends])
    give_predictors(model, tokenizer, 2)
    assert adapter_ids(tokenizer, plain=False) == all_predictor_ids(tokenizer)
    assert adapter_ids(tokenizer, plain=True) == sorted({*all_predictor_ids(tokenizer), *ids})


def test_nothing_grows_that_is_large_enough() -> None:
    model = tiny.make_model("llama")
    before = weights(model)[0]
    assert not grow(model, tiny.VOCABULARY)
    assert grow(model, tiny.VOCABULARY + 3)
    assert weights(model)[0].shape[0] == tiny.VOCABULARY + 3
    assert torch.equal(weights(model)[0][: tiny.VOCABULARY], before)
