"""Predictor tokens taken out again: the kept rows are as they were, and so is the text's tokenisation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tiny
from stepjepa.chat.predictors import add_predictor_tokens, all_predictor_ids, saved_with_predictors
from stepjepa.errors import UserError
from stepjepa.models.token_rows import give_predictors, strip_rows, strip_tokenizer

TEXT = "3+4=7.\n\nSo it is 12 <|im_end|> Rot 🌋"


def with_predictors(tokenizer: Any, rows: int, count: int = 3, name: str = "llama") -> tuple[Any, Any]:
    """A model of so many rows, before it was given predictor tokens, and its tokenizer."""
    made = copy.deepcopy(tokenizer)
    model = tiny.make_model(name, vocab_size=rows)
    give_predictors(model, made, count)
    model.generation_config.suppress_tokens = all_predictor_ids(made)
    return model, made


@pytest.mark.parametrize("name", ["llama", "qwen3"], ids=["tied", "untied"])
@pytest.mark.parametrize("known", [True, False])
def test_added_rows_go_and_the_others_stay_to_the_last_bit(name: str, known: bool, plain_tokenizer: Any) -> None:
    size = len(plain_tokenizer)
    model, tokenizer = with_predictors(plain_tokenizer, size, name=name)
    assert len(model.get_input_embeddings().weight) == size + 3
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    before = [weight.weight[:size].clone() for weight in (model.get_input_embeddings(), model.get_output_embeddings())]
    with torch.no_grad():
        logits = model(ids).logits
        assert strip_rows(model, tokenizer, size if known else None) == 3
        assert torch.equal(model(ids).logits, logits[..., :size])
    for weight, old in zip((model.get_input_embeddings(), model.get_output_embeddings()), before, strict=True):
        assert torch.equal(weight.weight, old)
    assert model.config.vocab_size == size
    assert model.generation_config.suppress_tokens is None


def test_spare_rows_of_the_base_stay_and_are_still_not_generated(plain_tokenizer: Any) -> None:
    size = len(plain_tokenizer)
    model, tokenizer = with_predictors(plain_tokenizer, size + 11)
    weight = model.get_input_embeddings().weight.clone()
    assert strip_rows(model, tokenizer) == 0
    assert torch.equal(model.get_input_embeddings().weight, weight)
    assert model.generation_config.suppress_tokens == [size, size + 1, size + 2]


def test_of_a_base_with_too_few_spare_rows_those_come_back(plain_tokenizer: Any) -> None:
    size = len(plain_tokenizer)
    model, tokenizer = with_predictors(plain_tokenizer, size + 2)
    assert strip_rows(model, tokenizer, size + 2) == 1
    assert model.config.vocab_size == size + 2
    # As many as the base had, so that what took a spare row is still there.
    assert model.generation_config.suppress_tokens == [size, size + 1]


def test_what_can_not_be_stripped_is_refused(plain_tokenizer: Any) -> None:
    model, tokenizer = with_predictors(plain_tokenizer, len(plain_tokenizer))
    with pytest.raises(UserError, match="has no predictor tokens"):
        strip_rows(model, plain_tokenizer)
    tokenizer.add_tokens(["<later>"])
    with pytest.raises(UserError, match=r"1 tokens stand behind the predictor tokens .*<later>"):
        strip_rows(model, tokenizer)


def test_a_tokenizer_is_as_it_was_before(plain_tokenizer: Any, tmp_path: Path) -> None:
    _, tokenizer = with_predictors(plain_tokenizer, len(plain_tokenizer))
    tokenizer.save_pretrained(tmp_path)
    assert saved_with_predictors(tmp_path)
    strip_tokenizer(tmp_path, tokenizer, AutoTokenizer.from_pretrained)
    assert not saved_with_predictors(tmp_path)
    stripped = AutoTokenizer.from_pretrained(tmp_path)
    assert not all_predictor_ids(stripped)
    assert len(stripped) == len(plain_tokenizer)
    assert stripped.get_vocab() == plain_tokenizer.get_vocab()
    assert stripped(TEXT).input_ids == plain_tokenizer(TEXT).input_ids
    assert stripped.chat_template == plain_tokenizer.chat_template
    assert "predictor" not in "".join(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    # Its text is text again.
    assert stripped.decode(stripped("<|predictor_1|>").input_ids) == "<|predictor_1|>"


def test_one_that_names_its_tokens_elsewhere_is_refused(plain_tokenizer: Any, tmp_path: Path) -> None:
    _, tokenizer = with_predictors(plain_tokenizer, len(plain_tokenizer))
    with pytest.raises(UserError, match="TokenizersBackend names its tokens in files"):
        strip_tokenizer(tmp_path, tokenizer, lambda folder: tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind"])
def test_real_tokenizers(name: str, shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "tokenizers" / name
    original, tokenizer = (AutoTokenizer.from_pretrained(folder) for _ in range(2))
    add_predictor_tokens(tokenizer, 3)
    tokenizer.save_pretrained(tmp_path)
    assert saved_with_predictors(tmp_path)
    strip_tokenizer(tmp_path, tokenizer, AutoTokenizer.from_pretrained)
    assert not saved_with_predictors(tmp_path)
    stripped = AutoTokenizer.from_pretrained(tmp_path)
    assert stripped.get_vocab() == original.get_vocab()
    assert stripped(TEXT).input_ids == original(TEXT).input_ids
