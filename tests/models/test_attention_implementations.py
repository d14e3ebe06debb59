"""Attention under the mask of trees: which kind a model gets, and that it is plain outside of trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import sliding_window_causal_mask_function

import tiny
from slow_trees import random_sequences, row_mask
from stepjepa.batch.mask import Trees
from stepjepa.batch.pack import pack
from stepjepa.config import JepaConfig
from stepjepa.models import attention
from stepjepa.models.attention import EAGER, FLEX, FLEX_UNFUSED, SDPA, enable_trees, tree_mask

ModelFactory = Callable[..., Any]


@pytest.mark.parametrize(
    ("architecture", "given", "wanted"),
    [
        ("llama", "sdpa", SDPA),
        ("llama", "eager", EAGER),
        ("llama", "flex_attention", FLEX),
        ("gemma2_window", "eager", EAGER),
        ("gemma2_window", "flex_attention", FLEX_UNFUSED),
        ("gpt2", "sdpa", SDPA),
    ],
)
def test_the_kind_that_suits_a_model(architecture: str, given: str, wanted: str, tiny_model: ModelFactory) -> None:
    model = tiny_model(architecture, given)
    for _ in range(2):
        enable_trees(model)
        assert model.config._attn_implementation == wanted


PLAIN = [("llama", "eager"), ("gemma3_window", "sdpa"), ("gpt2", "sdpa")]
PLAIN += [("llama", "flex_attention"), ("gemma2_window", "flex_attention")]


@pytest.mark.parametrize(("architecture", "given"), PLAIN)
def test_outside_the_block_the_model_is_plain(architecture: str, given: str, tiny_model: ModelFactory) -> None:
    """Generation and evaluation run the same model without trees, padding on the left included; gradients, too."""
    plain, model = tiny_model(architecture, "eager"), tiny_model(architecture, given)
    enable_trees(model)
    ids = torch.randint(0, tiny.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    first, second = (each(ids, attention_mask=mask).logits[mask.bool()] for each in (model, plain))
    tiny.assert_same(first, second)
    gradients = [tiny.gradients(each, logits.square().sum()) for each, logits in ((model, first), (plain, second))]
    tiny.assert_same_gradients(*gradients)
    answers = [each.generate(ids[:1], max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*answers)


def test_the_block_ends_also_with_an_error(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    trees = tiny.batch_of(trained_tokenizer, JepaConfig()).trees
    with pytest.raises(RuntimeError, match="inside"), tree_mask(trees):
        assert attention._current.get() is trees
        with tree_mask(None):
            assert attention._current.get() is None
        assert attention._current.get() is trees
        raise RuntimeError("inside")
    assert attention._current.get() is None


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_numbers_and_show_what_the_sequences_see(kind: str, window: int | None) -> None:
    """A boolean mask would be added to the scores by eager attention: silently wrong."""
    sequences = random_sequences(2, isolated=True)
    rows = pack(sequences, row_length=17)
    trees = Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), isolates=True)
    make = AttentionMaskInterface()[SDPA if kind == "sdpa" else EAGER]
    rule = {} if window is None else {"mask_function": sliding_window_causal_mask_function(window)}
    with tree_mask(trees):
        mask = make(dtype=torch.bfloat16, **rule)
    count, length = rows.ids.shape
    assert mask.shape == (count, 1, length, length)
    assert mask.dtype == torch.bfloat16
    seen = row_mask(sequences, rows, lambda query, key: window is None or query - key < window)
    here = torch.arange(length) < torch.from_numpy(rows.lengths)[:, None]
    real = here[:, :, None] & here[:, None, :]
    assert torch.equal((mask[:, 0] == 0) & real, seen)
    hidden = mask[:, 0][real & ~seen]
    assert (hidden == (-torch.inf if kind == "sdpa" else torch.finfo(torch.bfloat16).min)).all()


def test_layers_of_another_dtype_than_the_model(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Under autocast the mask follows the queries."""
    model = tiny_model("llama")
    enable_trees(model)
    batch = tiny.batch_of(trained_tokenizer, JepaConfig())
    with torch.no_grad():
        exact = tiny.hidden_states(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = tiny.hidden_states(model, batch)
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.05
