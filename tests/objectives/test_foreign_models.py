"""Models that a ``Jepa`` can't train, and those that it was not made for, are named before they give a wrong loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

import tiny
from stepjepa import Jepa, JepaConfig


def test_a_compiled_model_is_refused(tiny_tokenizer: Any) -> None:
    """A run saved its weights as ``_orig_mod...``, of which transformers loads none."""
    compiled: Any = torch.compile(tiny.make_model("llama"), backend="eager")
    with pytest.raises(ValueError, match=r"expected a model that is not compiled yet: .*; pass model._orig_mod, and"):
        Jepa(compiled, tiny_tokenizer)
    Jepa(compiled._orig_mod, tiny_tokenizer)


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_a_head_for_tokens_is_named(kind: Any, tiny_tokenizer: Any) -> None:
    """It was ``AttributeError: ... has no attribute 'generation_config'``."""
    model = kind.from_config(tiny.make_model("llama").config)
    with pytest.raises(ValueError, match=rf"got a {type(model).__name__}; load it with AutoModelForCausalLM"):
        Jepa(model, tiny_tokenizer)


def test_a_loss_of_another_model_is_refused(tiny_tokenizer: Any) -> None:
    """Its attention had no tree mask, so that tokens saw other sequences; the loss was another one."""
    model: Any = tiny.make_model("llama")
    jepa = Jepa(model, tiny_tokenizer, JepaConfig())
    batch = jepa.collate(tiny.records())
    expected = jepa.loss(model, batch).loss
    with pytest.raises(ValueError, match=r"not the one that this Jepa has set up, .*; make a Jepa"):
        jepa.loss(tiny.make_model("llama"), batch)
    tiny.assert_same(jepa.loss(copy.deepcopy(model), batch).loss, expected)  # a copy is set up, too


def test_a_batch_of_another_collator_is_named(tiny_tokenizer: Any) -> None:
    model: Any = tiny.make_model("llama")
    with pytest.raises(TypeError, match=r"batch: expected one of jepa.collate\(records\), got dict"):
        Jepa(model, tiny_tokenizer).loss(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)})  # type: ignore[arg-type]
