"""Attention by segments as one variable-length call: its arguments and gradients, what it refuses, where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

import tiny
from slow_trees import random_sequences
from stepjepa.batch.pack import pack_passes
from stepjepa.batch.segments import varlen_segments
from stepjepa.config.jepa import JepaConfig
from stepjepa.models import varlen_attention
from stepjepa.models.attention import SDPA, SEGMENTS, VARLEN, enable_trees, segment_kernel
from stepjepa.models.probe import probe
from stepjepa.models.varlen_attention import VarlenCall, VarlenMask, refusals, segment_by_segment, varlen_forward
from stepjepa.objectives.packing import packing

ModelFactory = Callable[..., Any]
NO_LAYER = torch.nn.Identity()


def mask_of(seed: int, rule: Any, *, shared: bool = True) -> VarlenMask:
    sequences = random_sequences(seed, vocabulary=3 if shared else 97)
    groups = None if shared else range(len(sequences))
    (rows,) = pack_passes(sequences, row_length=10**6, kernel="varlen", groups=groups)
    assert rows.segments is not None
    made = varlen_segments(rows.segments)
    assert (made.key_index is not None) == shared
    return VarlenMask(torch.from_numpy(rows.positions)[0], made, rule)


def attended(query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall) -> Tensor:
    """A plain loop in place of the kernel: causal, aligned at the end, so many keys before each query."""
    bounds, key_bounds, most_queries, most_keys, dropout, causal = call.arguments
    assert (most_queries, most_keys) == (int(bounds.diff().max()), int(key_bounds.diff().max()))
    assert dropout == 0
    assert causal == (call.window < 0)
    before = call.named["window_size_left"]
    assert call.named["window_size_right"] == 0
    rows, times = [], query.shape[1] // keys.shape[1]
    for segment in range(len(bounds) - 1):
        for place in range(int(bounds[segment]), int(bounds[segment + 1])):
            last = int(key_bounds[segment + 1]) - (int(bounds[segment + 1]) - place)
            first = max(int(key_bounds[segment]), last - int(before)) if before >= 0 else int(key_bounds[segment])
            own, of_own = (each[first : last + 1].repeat_interleave(times, 1) for each in (keys, values))
            scores = torch.einsum("hd,khd->hk", query[place], own) * call.named["scale"]
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), of_own))
    return torch.stack(rows)


@pytest.fixture
def loop_for_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall) -> tuple[Tensor, ...]:
        return attended(query, keys, values, call), *torch.zeros(3, 1)

    def backward(gradient: Tensor, saved: tuple[Tensor, ...], call: VarlenCall) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in saved[:3]]
            output = attended(*given, call)
        assert torch.equal(output, saved[3])
        return torch.autograd.grad(output, given, gradient)

    monkeypatch.setattr(varlen_attention, "flash_forward", forward)
    monkeypatch.setattr(varlen_attention, "flash_backward", backward)
    monkeypatch.setattr(varlen_attention, "_runs_flash", lambda query: True)


@pytest.mark.usefixtures("loop_for_kernel")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "nothing shared"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "of_value"), [((3, 3), 8), ((6, 2), 8), ((6, 2), 5)])
def test_output_and_gradients_are_those_of_each_segment(
    heads: tuple[int, int], of_value: int, window: int | None, *, shared: bool
) -> None:
    draw = torch.Generator().manual_seed(3)
    mask = mask_of(2, None if window is None else sliding_window_causal_mask_function(window), shared=shared)
    length, (count, groups) = len(mask.positions), heads
    sizes = ((count, 8), (groups, 8), (groups, of_value))
    states = [torch.randn(1, number, length, size, generator=draw, requires_grad=True) for number, size in sizes]
    weights = torch.randn(1, length, count, of_value, generator=draw)
    output, _ = varlen_forward(NO_LAYER, *states, mask, scaling=0.4, sliding_window=window)
    expected = segment_by_segment(*states, mask, scaling=0.4)
    tiny.assert_same(output, expected)
    for actual, wanted in zip(
        torch.autograd.grad((output * weights).sum(), states),
        torch.autograd.grad((expected * weights).sum(), states),
        strict=True,
    ):
        tiny.assert_same(actual, wanted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "nothing shared"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "of_value"), [((3, 3), 16), ((6, 2), 16), ((6, 2), 5)])
def test_on_cuda(
    heads: tuple[int, int], of_value: int, window: int | None, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """The kernel in bfloat16 against each segment in float64; rounding to bfloat16 is off by up to 0.4 %."""
    monkeypatch.setattr(varlen_attention, "segment_by_segment", None)  # no way around the kernel
    draw, cuda = torch.Generator().manual_seed(3), torch.device("cuda", torch.cuda.current_device())
    mask = mask_of(2, None if window is None else sliding_window_causal_mask_function(window), shared=shared).on(cuda)
    length, (count, groups) = len(mask.positions), heads
    sizes = (count, 16), (groups, 16), (groups, of_value)
    states = [torch.randn(1, number, length, size, generator=draw).to(cuda, torch.bfloat16) for number, size in sizes]
    weights = torch.randn(1, length, count, of_value, generator=draw).to(cuda, torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [each.to(dtype).requires_grad_() for each in states]
        if dtype == torch.bfloat16:
            output = varlen_forward(NO_LAYER, *inputs, mask, scaling=0.4, sliding_window=window)[0]
        else:
            output = segment_by_segment(*inputs, mask, scaling=0.4)
        gradients = torch.autograd.grad((output * weights.to(dtype)).sum(), inputs)
        results.append([output.detach(), *gradients])
    for actual, wanted in zip(*results, strict=True):
        assert float((actual.double() - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.usefixtures("loop_for_kernel")
def test_without_a_scale_it_is_that_of_sdpa() -> None:
    mask, draw = mask_of(2, None), torch.Generator().manual_seed(5)
    states = [torch.randn(1, 3, len(mask.positions), 8, generator=draw) for _ in range(3)]
    tiny.assert_same(varlen_forward(NO_LAYER, *states, mask)[0], segment_by_segment(*states, mask))


@pytest.mark.parametrize(
    ("rule", "layer_window", "wanted"),
    [
        (None, None, -1),
        (sliding_window_causal_mask_function(5), 5, 5),
        (sliding_window_causal_mask_function(5), 4, None),
        (sliding_window_causal_mask_function(5), None, None),
        (chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long)), 5, None),
        (chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.long)), 2, None),
    ],
    ids=["causal", "window", "another window", "unnamed window", "chunks", "short chunks"],
)
def test_only_a_sliding_window_becomes_one_of_the_kernel(rule: Any, layer_window: Any, wanted: Any) -> None:
    assert mask_of(2, rule).window(layer_window) == wanted


def test_a_rule_is_looked_at_once_for_all_layers() -> None:
    asked: list[int] = []

    def rule(*indices: Tensor) -> Tensor:
        asked.append(1)
        return sliding_window_causal_mask_function(5)(*indices)  # type: ignore[no-any-return]

    mask = mask_of(2, rule)
    assert [mask.window(size) for size in (5, 5, 4, 5)] == [5, 5, None, 5]
    assert len(asked) == 2


@pytest.mark.usefixtures("loop_for_kernel")
def test_layers_on_another_device_get_the_mask_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model that is spread over several devices, whose layers get the mask of the first one."""
    calls: list[VarlenCall] = []

    def forward(query: Tensor, keys: Tensor, values: Tensor, call: VarlenCall) -> tuple[Tensor, ...]:
        calls.append(call)
        assert {each.device.type for each in (query, keys, values)} == {"meta"}
        return query, *torch.zeros(3, 1)

    monkeypatch.setattr(varlen_attention, "flash_forward", forward)
    mask = mask_of(2, None)
    states = torch.zeros(1, 3, len(mask.positions), 8, device="meta")
    for _ in range(2):
        assert varlen_forward(NO_LAYER, states, states, states, mask)[0].device.type == "meta"
    first, second = ([each for each in call.segments if isinstance(each, Tensor)] for call in calls)
    assert {each.device.type for each in first} == {"meta"}
    assert all(one is other for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("loop_for_kernel")
def test_numbers_of_a_head_are_behind_each_other_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention refuses other states, and models view the output as rows of all heads."""

    def forward(*given: Any) -> tuple[Tensor, ...]:
        assert [each.stride(-1) for each in given[:3]] == [1, 1, 1]
        return attended(*given), *torch.zeros(3, 1)

    monkeypatch.setattr(varlen_attention, "flash_forward", forward)
    mask, draw = mask_of(2, None, shared=False), torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(1, 3, size, len(mask.positions), generator=draw).transpose(2, 3) for size in (8, 8, 5)
    )
    output, _ = varlen_forward(NO_LAYER, query, key, value, mask)
    tiny.assert_same(output.view(1, len(mask.positions), 15), segment_by_segment(query, key, value, mask).flatten(2))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_changed_scores_are_refused(name: str) -> None:
    states = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=f"no {name}; load the model with attn_implementation 'eager'"):
        AttentionInterface()[SEGMENTS](NO_LAYER, states, states, states, mask_of(2, None), **{name: torch.ones(1)})


@pytest.mark.parametrize(
    ("size", "of_value", "options", "reason"),
    [
        (8, 5, {}, None),
        (5, 5, {}, "heads of 5 for keys and 5 for values"),
        (192, 128, {}, None),
        (224, 224, {}, "heads of 224"),
        (256, 256, {}, None),
        (264, 264, {}, "heads of 264"),
        (8, 16, {}, "heads of 8 for keys and 16 for values"),
        (8, 8, {"dropout": 0.5}, "dropout of 0.5"),
    ],
)
def test_what_flash_attention_does_not_compute_runs_by_segments(
    size: int, of_value: int, options: dict[str, float], reason: str | None
) -> None:
    mask, draw = mask_of(2, None), torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 3, len(mask.positions), n, generator=draw) for n in (size, size, of_value))
    with refusals() as reasons:
        output, _ = varlen_forward(NO_LAYER, query, key, value, mask, **options)
    assert [reason is not None] == [bool(reasons)]
    assert all(str(reason) in each for each in reasons)
    if not options:
        tiny.assert_same(output, segment_by_segment(query, key, value, mask))


@pytest.mark.parametrize(
    ("architecture", "options", "runs"),
    [
        ("llama", {"head_dim": 16}, True),
        ("llama", {}, False),  # heads of 10
        ("qwen2_window", {"head_dim": 16}, True),
        ("gpt2", {"n_embd": 48, "n_head": 3, "attn_pdrop": 0.0}, True),
    ],
)
def test_the_probe_finds_which_models_flash_attention_computes(
    architecture: str, options: dict[str, Any], *, runs: bool, tiny_model: ModelFactory
) -> None:
    assert probe(tiny_model(architecture, "sdpa", **options)).varlen == runs


def test_which_attention_runs_where(tiny_model: ModelFactory) -> None:
    for name, segments, wanted, kernels in [
        (None, False, SDPA, ("mask", "mask", "mask")),
        (None, True, SEGMENTS, ("cheapest", "mask", "varlen")),
        (VARLEN, True, VARLEN, ("cheapest", "varlen", "varlen")),
        (VARLEN, False, SDPA, ("mask", "mask", "mask")),
    ]:
        model = tiny_model("llama")
        if name is not None:
            model.set_attn_implementation(name)
        enable_trees(model, segments=segments)
        assert model.config._attn_implementation == wanted
        places = (("cpu", False), ("cuda", False), ("cuda", True))
        assert tuple(segment_kernel(model, device, varlen=varlen) for device, varlen in places) == kernels


@pytest.mark.parametrize(
    ("dtype", "autocast", "options", "kernel"),
    [
        (torch.float32, None, {}, "mask"),
        (torch.float32, torch.bfloat16, {}, "varlen"),
        (torch.float16, None, {}, "varlen"),
        (torch.float32, torch.bfloat16, {"attention_dropout": 0.1}, "mask"),
    ],
)
def test_sixteen_bits_on_a_gpu_take_it(
    dtype: torch.dtype, autocast: torch.dtype | None, options: dict[str, Any], kernel: str, tiny_model: ModelFactory
) -> None:
    model = tiny_model("llama", head_dim=16, **options).to(dtype)
    enable_trees(model, segments=True)
    assert packing(model, JepaConfig(), "cuda", autocast=autocast)["kernel"] == kernel
    assert packing(model, JepaConfig(), "cpu", autocast=autocast)["kernel"] == "cheapest"


@pytest.mark.parametrize(
    ("built", "capability", "kernel"), [(True, (8, 0), "varlen"), (True, (7, 5), "mask"), (False, (9, 0), "mask")]
)
def test_a_device_or_a_torch_without_flash_attention_takes_a_mask(
    built: bool, capability: tuple[int, int], kernel: str, tiny_model: ModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    model = tiny_model("llama", head_dim=16).to(torch.float16)
    enable_trees(model, segments=True)
    assert packing(model, JepaConfig(), "cuda")["kernel"] == kernel
