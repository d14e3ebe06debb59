"""Attention by segments: gradients of its gather, windows, autocast, checkpointing, refusals, variable-length calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

import tiny
from slow_trees import random_sequences
from stepjepa.batch.costs import Costs
from stepjepa.batch.mask import Ragged, Trees
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.pack import pack_passes
from stepjepa.batch.segments import calls, ragged
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import SDPA, SEGMENTS, VARLEN, enable_trees, segment_kernel
from stepjepa.models.probe import probe
from stepjepa.models.segment_attention import (
    RaggedMask,
    SegmentMask,
    gather,
    ragged_forward,
    segment_forward,
    segment_mask,
)

ModelFactory = Callable[..., Any]
EACH = Costs(1.0, 1.0)


def trees_of(seed: int, kind: str) -> Trees:
    (rows,) = pack_passes(random_sequences(seed, vocabulary=3), row_length=10**6, kernel="ragged")
    assert rows.segments is not None
    made = calls(rows.segments, EACH) if kind == "calls" else ragged(rows.segments)
    return Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), segments=made)


def by_segments(tokenizer: Any, **options: Any) -> Batch:
    batch = tiny.batch_of(tokenizer, JepaConfig(), kernel="calls", costs=EACH, **options)
    assert batch.trees is not None
    assert batch.trees.segments is not None
    return batch


def test_the_gradient_of_a_gather_is_that_of_an_index() -> None:
    draw = torch.Generator().manual_seed(2)
    states, index = torch.randn(7, 5, generator=draw, requires_grad=True), torch.randint(0, 7, (13,), generator=draw)
    weights = torch.randn(13, 5, generator=draw)
    found, wanted = gather(states, index), states[index]
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad((each * weights).sum(), states)[0] for each in (found, wanted)]
    tiny.assert_same(*gradients)


@pytest.mark.parametrize(("window", "plain"), [(100, True), (3, False)])
def test_a_window_that_no_path_fills_needs_no_mask(window: int, plain: bool) -> None:
    mask = segment_mask(trees_of(2, "calls"), sliding_window_causal_mask_function(window), torch.float32)
    assert isinstance(mask, SegmentMask)
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


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
@pytest.mark.parametrize(("kind", "forward"), [("calls", segment_forward), ("ragged", ragged_forward)])
def test_changed_scores_are_refused(kind: str, forward: Any, name: str) -> None:
    states = torch.zeros(1, 1, 3, 2)
    mask = segment_mask(trees_of(2, kind), None, torch.float32)
    with pytest.raises(ValueError, match=f"no {name}; load the model with attn_implementation 'eager'"):
        forward(torch.nn.Identity(), states, states, states, mask, **{name: torch.ones(1)})


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
    found = probe(tiny_model("llama", num_hidden_layers=3, rms_norm_eps=1e-4))
    assert (found.no_tree, found.segments) == (None, False)


def test_which_attention_runs_where(tiny_model: ModelFactory) -> None:
    for name, segments, wanted, kernels in [
        (None, False, SDPA, ("mask", "mask")),
        (None, True, SEGMENTS, ("cheapest", "mask")),
        (VARLEN, True, VARLEN, ("cheapest", "ragged")),
        (VARLEN, False, SDPA, ("mask", "mask")),
    ]:
        model = tiny_model("llama")
        if name is not None:
            model.set_attn_implementation(name)
        enable_trees(model, segments=segments)
        assert model.config._attn_implementation == wanted
        assert (segment_kernel(model, "cpu"), segment_kernel(model, "cuda")) == kernels


# -- one variable-length call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "layer_window", "wanted"),
    [
        (None, None, -1),
        (sliding_window_causal_mask_function(5), 5, 5),
        (sliding_window_causal_mask_function(5), 4, None),
        (sliding_window_causal_mask_function(5), None, None),
        (chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long)), 5, None),
    ],
    ids=["causal", "window", "another window", "unnamed window", "chunks"],
)
def test_only_a_sliding_window_becomes_one_of_the_kernel(rule: Any, layer_window: Any, wanted: Any) -> None:
    trees = trees_of(2, "ragged")
    assert isinstance(trees.segments, Ragged)
    assert RaggedMask(trees, trees.segments, rule).window(layer_window) == wanted


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)])
def test_the_variable_length_call_gets_the_segments(
    heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain loop stands for the kernel: causal, aligned at the end, ``window_size`` keys before each query."""

    def loop(query: Any, key: Any, value: Any, bounds: Any, key_bounds: Any, *most: int, **given: Any) -> Any:
        assert given["enable_gqa"] == (heads[0] != heads[1])
        assert most == (int(bounds.diff().max()), int(key_bounds.diff().max()))
        before, behind = given["window_size"]
        assert behind == 0
        out = torch.empty_like(query)
        times = query.shape[1] // key.shape[1]
        for segment in range(len(bounds) - 1):
            for place in range(int(bounds[segment]), int(bounds[segment + 1])):
                last = int(key_bounds[segment + 1]) - (int(bounds[segment + 1]) - place)
                first = max(int(key_bounds[segment]), last - before) if before >= 0 else int(key_bounds[segment])
                keys, values = (each[first : last + 1].repeat_interleave(times, 1) for each in (key, value))
                scores = torch.einsum("hd,khd->hk", query[place], keys) * given["scale"]
                out[place] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        return out

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop)
    monkeypatch.setattr("stepjepa.models.segment_attention._takes_varlen", lambda query: True)
    draw = torch.Generator().manual_seed(3)
    trees = trees_of(2, "ragged")
    length = trees.start.shape[1]
    query, key, value = (torch.randn(1, count, length, 5, generator=draw) for count in (heads[0], heads[1], heads[1]))
    rule = None if window is None else sliding_window_causal_mask_function(window)
    mask: Any = segment_mask(trees, rule, torch.float32)
    found, _ = ragged_forward(torch.nn.Identity(), query, key, value, mask, scaling=0.4, sliding_window=window)
    same: Any = segment_mask(trees_of(2, "calls"), rule, torch.float32)
    wanted, _ = segment_forward(torch.nn.Identity(), query, key, value, same, scaling=0.4)
    tiny.assert_same(found, wanted)
