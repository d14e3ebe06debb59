"""Attention by segments: gradients of its gather, windows, autocast, checkpointing, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

import tiny
from slow_trees import random_sequences
from stepjepa.batch.costs import Costs
from stepjepa.batch.mask import Trees
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.pack import pack_passes
from stepjepa.batch.segments import calls
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.probe import probe
from stepjepa.models.segment_attention import SegmentMask, gather, segment_mask

ModelFactory = Callable[..., Any]
EACH = Costs(1.0, 1.0)


def mask_of(seed: int, rule: Any) -> SegmentMask:
    (rows,) = pack_passes(random_sequences(seed, vocabulary=3), row_length=10**6, kernel="varlen")
    assert rows.segments is not None
    made = calls(rows.segments, EACH)
    trees = Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), segments=made)
    return segment_mask(trees, made, rule, torch.float32)


def by_segments(tokenizer: Any, **options: Any) -> Batch:
    batch = tiny.batch_of(tokenizer, JepaConfig(), kernel="calls", costs=EACH, **options)
    assert batch.trees is not None
    assert batch.trees.segments is not None
    return batch


def test_the_gradient_of_a_gather_is_that_of_an_index() -> None:
    draw = torch.Generator().manual_seed(2)
    states, index = torch.randn(7, 5, generator=draw, requires_grad=True), torch.randint(0, 7, (13,), generator=draw)
    weights = torch.randn(13, 5, generator=draw)
    result, wanted = gather(states, index), states[index]
    assert torch.equal(result, wanted)
    gradients = [torch.autograd.grad((each * weights).sum(), states)[0] for each in (result, wanted)]
    tiny.assert_same(*gradients)


def test_the_gradient_of_a_key_that_many_share_is_rounded_once() -> None:
    draw = torch.Generator().manual_seed(2)
    states = torch.zeros((2, 5), dtype=torch.bfloat16, requires_grad=True)
    upstream = (1 + torch.randn((1024, 5), generator=draw)).bfloat16()
    gather(states, torch.ones(1024, dtype=torch.long)).backward(upstream)
    assert states.grad is not None and states.grad.dtype == torch.bfloat16
    wanted = upstream.double().sum(0)
    assert float(((states.grad[1].double() - wanted) / wanted).abs().max()) <= 2**-8
    assert not states.grad[0].any()


@pytest.mark.parametrize(("window", "plain"), [(100, True), (3, False)])
def test_a_window_that_no_path_fills_needs_no_mask(window: int, plain: bool) -> None:
    mask = mask_of(2, sliding_window_causal_mask_function(window))
    whole = [each.mask for each in mask.of_dtype(torch.float32) if each.shape.causal]
    assert whole
    assert all((each is None) == plain for each in whole)


def test_layers_of_another_dtype_than_the_model(tiny_model: ModelFactory, trained_tokenizer: Any) -> None:
    """Under autocast masks follow the queries."""
    model = tiny_model("qwen2_window")
    enable_trees(model, segments=True)
    batch = by_segments(trained_tokenizer)
    with torch.no_grad():
        exact = tiny.hidden_states(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = tiny.hidden_states(model, batch)
    assert 0 < float((half - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(
    *, reentrant: bool, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    model, batch = tiny_model("qwen2_window").train(), by_segments(trained_tokenizer)
    enable_trees(model, segments=True)
    plain = tiny.gradients(model, tiny.hidden_states(model, batch).square().sum())
    # The older name warns in the newest version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    tiny.assert_same_gradients(tiny.gradients(model, tiny.hidden_states(model, batch).square().sum()), plain)


@pytest.mark.parametrize(
    ("architecture", "loaded", "runs"),
    [("llama", "sdpa", True), ("llama", "eager", False), ("gemma2_window", "eager", False), ("minicpm3", "sdpa", True)],
)
def test_the_probe_finds_which_models_run_segments(
    architecture: str, loaded: str, *, runs: bool, tiny_model: ModelFactory
) -> None:
    assert probe(tiny_model(architecture, loaded)).segments == runs


def test_a_model_whose_segments_differ_runs_masks(tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(call: Any, *_: Any) -> Any:
        return torch.zeros(call.shape.segments, 1, call.shape.queries, call.shape.keys)

    monkeypatch.setattr("stepjepa.models.segment_attention._call_mask", leaking)
    result = probe(tiny_model("llama", num_hidden_layers=3, rms_norm_eps=1e-4))
    assert (result.no_tree, result.segments) == (None, False)
