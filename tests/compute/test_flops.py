"""FLOPs: by hand, and derived equal to counted for architectures, adapters, encodings, checkpointing, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from stepjepa.compute import flop_probe
from stepjepa.compute.flop_probe import Cost
from stepjepa.compute.flops import FlopModel, counting, measure
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.grouping import GroupCollator
from stepjepa.models.attention import enable_forest
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.embeddings import forward_groups
from stepjepa.models.lm_loss import plain_head
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.models.predictor_head import attach_head, without_head

FORESTS = [tiny.random_forest(seed, isolated=False) for seed in range(5)]

pytestmark = [
    # PEFT knows the names of experts in other versions of a family, and says that it did not find them.
    pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning"),
    # It says that it has noticed the transposed layers of GPT-2.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]


def batch(encoding: str, *, views: bool, pass_cost: int | None = None) -> list[dict[str, torch.Tensor]]:
    forests = FORESTS if views else [forest.without_views() for forest in FORESTS]
    return GroupCollator(ForestCollator(0, encoding), pass_cost)(forests)["groups"]


def tried(model: Any) -> Any:
    """A model that has been tried out as its first pass does it, which is not to be counted."""
    plain_head(model)
    return model


def run(model: Any, groups: list[dict[str, torch.Tensor]]) -> None:
    outputs = forward_groups(model, groups)
    (outputs.lm_loss + outputs.source.sum() + outputs.target.sum()).backward()


def prepared(name: str, attention: str, adapter: str, encoding: str) -> Any:
    model = tiny.make_model(name, attention)
    if encoding == "forest":
        enable_forest(model)
    if adapter != "none":
        model = add_lora(model, LoraSettings(3), [7, 11] if adapter == "with token rows" else [])
    return tried(model.train())


def checkpoint(model: Any, *, reentrant: bool) -> None:
    # The older name warns in the newest version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def test_one_matrix_by_hand() -> None:
    layer = nn.Linear(7, 5, bias=False)
    values = torch.ones(3, 7)
    assert measure(lambda: layer(values)) == 2 * 3 * 7 * 5
    # The weight's gradient, and none of an input that needs none.
    assert measure(lambda: layer(values).sum().backward()) == 2 * (2 * 3 * 7 * 5)


def test_a_pass_by_hand() -> None:
    model = tiny.make_model("llama", "eager")
    flops = FlopModel.of(model)
    # Two layers of width 33: queries and output 30, key and value 10 each, an MLP of 37.
    matrices = 2 * (33 * 30 + 2 * 33 * 10 + 30 * 33 + 3 * 33 * 37)
    assert matrices == 12606
    # Three heads of size 10: scores, then values.
    square = 2 * 3 * (10 + 10)
    assert flops.forward == Cost(token=2 * matrices, square=2 * square, label=2 * 33 * 389)
    assert flops.backward == Cost(token=4 * matrices, square=4 * square, label=4 * 33 * 389)
    assert flops.exact
    # Two rows of 7 tokens, 3 labels.
    assert flops.of_pass(2, 7, 3, backward=False) == 14 * 25212 + 98 * 240 + 3 * 25674 == 453_510
    assert flops.of_pass(2, 7, 3) == 3 * 453_510
    # A fused kernel computes the scores a second time.
    fused = FlopModel.of(tiny.make_model("llama", "sdpa"))
    assert fused.of_pass(2, 7, 3) == 3 * 453_510 + 98 * 2 * 2 * 3 * 10


@pytest.mark.parametrize("encoding", ["forest", "rows"])
@pytest.mark.parametrize("adapter", ["none", "with token rows"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2_window", "qwen3_moe"])
def test_derived_equals_counted(name: str, attention: str, adapter: str, encoding: str) -> None:
    if name == "gemma2_window" and attention == "sdpa":
        pytest.skip("Gemma-2 refuses sdpa")
    model = prepared(name, attention, adapter, encoding)
    flops = FlopModel.of(model)
    for views in (True, False):
        groups = batch(encoding, views=views, pass_cost=13)
        assert flops.of_batch(groups) == measure(lambda: run(model, groups))  # noqa: B023  # called at once
    groups = batch(encoding, views=True)
    with torch.no_grad():
        counted = measure(lambda: forward_groups(model, groups))
    assert flops.of_batch(groups, backward=False) == counted


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapter", ["none", "with token rows"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2_window", "olmo2", "qwen3_moe"])
def test_gradient_checkpointing(name: str, adapter: str, reentrant: bool) -> None:
    model = prepared(name, "eager", adapter, "forest")
    flops = FlopModel.of(model, gradient_checkpointing=True, reentrant=reentrant)
    checkpoint(model, reentrant=reentrant)
    groups = batch("forest", views=True)
    assert flops.of_batch(groups) == measure(lambda: run(model, groups))
    assert FlopModel.of(model).of_batch(groups) < flops.of_batch(groups)


def test_frozen_layers_need_no_gradient() -> None:
    model = prepared("llama", "sdpa", "none", "forest")
    for module in (model.get_input_embeddings(), model.get_decoder().layers[0]):
        module.requires_grad_(False)
    groups = batch("forest", views=True)
    derived = FlopModel.of(model).of_batch(groups)
    assert derived == pytest.approx(measure(lambda: run(model, groups)), rel=0.01)
    model.requires_grad_(True)
    assert derived < 0.8 * FlopModel.of(model).of_batch(groups)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_predictor_head(kind: str) -> None:
    model = prepared("qwen3", "sdpa", "none", "forest")
    without = FlopModel.of(model)
    attach_head(model, kind, seed=3)
    flops = FlopModel.of(model)
    assert flops.forward.pair == 2 * 33 * 33 * (1 if kind == "linear" else 4)
    groups = batch("forest", views=True)
    assert flops.of_batch(groups) == measure(lambda: run(model, groups))
    assert flops.regular() == without


def test_averaged_decoder_runs_where_there_are_pairs() -> None:
    model = prepared("llama", "sdpa", "none", "forest")
    attach_head(model, "linear", seed=3)
    flops = FlopModel.of(model, ema=True)
    with without_head(model):
        encoder = EmaEncoder(model, 0.9)
    # One micro-batch in several passes.
    groups = batch("forest", views=True, pass_cost=0)
    assert len(groups) > 1

    def step() -> None:
        run(model, groups)
        encoder.targets(groups)

    assert flops.of_batch(groups) == measure(step)
    plain = batch("forest", views=False)
    assert flops.of_batch(plain) == flops.regular().of_batch(plain) == measure(lambda: run(model, plain))


def test_regular_training_trains_no_token_rows() -> None:
    # Tied weights: the rows are in the head, too, and autograd takes its whole gradient for them.
    flops = FlopModel.of(prepared("llama", "sdpa", "with token rows", "forest"))
    regular = FlopModel.of(prepared("llama", "sdpa", "plain", "forest"))
    assert flops.token_rows == 2 * 33 * 389
    assert flops.regular() == regular
    assert flops.regular(trains_rows=True) == flops
    # Untied ones leave the head alone.
    assert FlopModel.of(prepared("qwen3", "sdpa", "with token rows", "forest")).token_rows == 0


def test_unknown_number_of_active_experts_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared("qwen3_moe", "sdpa", "none", "forest")
    known = FlopModel.of(model)
    monkeypatch.setattr(flop_probe, "_ACTIVE_EXPERTS", ())
    unknown = FlopModel.of(model)
    assert known.exact
    assert not unknown.exact
    # All five instead of two, each of three matrices of 36 x 28, in two layers.
    assert unknown.forward.token - known.forward.token == 2 * 2 * 3 * (3 * 36 * 28)


def test_the_look_at_a_model_leaves_it_as_it_was() -> None:
    model = prepared("gpt2", "eager", "plain", "forest")
    model.get_decoder().h[0].eval()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    state = torch.get_rng_state()
    FlopModel.of(model, gradient_checkpointing=True)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_counting_changes_no_gradient_but_its_rounding() -> None:
    groups = batch("forest", views=True)
    gradients = []
    for counted in (False, True):
        model = prepared("llama", "sdpa", "none", "forest")
        if counted:
            with counting() as counter:
                run(model, groups)
            assert counter.get_total_flops() > 0
        else:
            run(model, groups)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    tiny.assert_same_gradients(*gradients)
