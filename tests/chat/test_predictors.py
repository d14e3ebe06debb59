"""Predictor tokens of a tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from stepjepa.chat.predictors import add_predictor_tokens, all_predictor_ids, predictor_ids
from stepjepa.models.presets import train_tokenizer


def fresh() -> Any:
    return train_tokenizer(["some text"], 270)


def test_ids_stand_in_the_order_of_their_numbers() -> None:
    tokenizer = fresh()
    size = len(tokenizer)
    ids = add_predictor_tokens(tokenizer, 12)
    assert ids == list(range(size, size + 12))
    assert tokenizer.convert_ids_to_tokens(ids) == [f"<|predictor_{number}|>" for number in range(1, 13)]
    assert predictor_ids(tokenizer, 12) == all_predictor_ids(tokenizer) == ids


def test_adding_again_adds_what_is_missing() -> None:
    tokenizer = fresh()
    first = add_predictor_tokens(tokenizer, 2)
    assert add_predictor_tokens(tokenizer, 2) == first
    assert add_predictor_tokens(tokenizer, 1) == first[:1]
    assert add_predictor_tokens(tokenizer, 3)[:2] == first
    assert len(all_predictor_ids(tokenizer)) == 3


def test_they_are_special_and_one_token_each() -> None:
    tokenizer = fresh()
    ids = add_predictor_tokens(tokenizer, 2)
    assert tokenizer("a<|predictor_2|><|predictor_1|>b", add_special_tokens=False)["input_ids"][1:3] == ids[::-1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    # The tokens that were special before still are.
    assert tokenizer.decode(tokenizer("<|im_start|>")["input_ids"], skip_special_tokens=True) == ""


def test_missing_tokens_are_named() -> None:
    tokenizer = fresh()
    add_predictor_tokens(tokenizer, 2)
    with pytest.raises(ValueError, match=r"<\|predictor_3\|>; call add_predictor_tokens\(tokenizer, 4\)"):
        predictor_ids(tokenizer, 4)
