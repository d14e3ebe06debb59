"""How a model's micro-batches are packed by device, attention and number of processes; what a layer costs by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.probe import probe
from stepjepa.objectives import packing as constants
from stepjepa.objectives.packing import cpu_costs, packing

ModelFactory = Callable[..., Any]


@pytest.mark.parametrize("trained", [True, False])
def test_the_costs_of_a_layer_by_hand(*, trained: bool, tiny_model: ModelFactory) -> None:
    """Width 33, three heads of size 10 over one of keys, an MLP of 37; a frozen weight has no gradient of its own."""
    result = cpu_costs(tiny_model("llama").requires_grad_(trained))
    weights = 33 * 30 + 2 * 33 * 10 + 30 * 33 + 3 * 33 * 37
    assert weights == 6303
    linear = weights * constants.NS_WEIGHT * (1 if trained else 2 / 3)
    assert result.token == pytest.approx(linear + 33 * constants.NS_FEATURE)
    assert result.pair == pytest.approx(3 * (constants.NS_SCORE + 10 * constants.NS_HEAD_FEATURE))
    assert (result.query, result.key) == (30 * constants.NS_GATHER, 20 * constants.NS_GATHER)


def test_a_token_meets_some_of_the_experts(tiny_model: ModelFactory) -> None:
    two, all_five = (cpu_costs(tiny_model("qwen3_moe", num_experts_per_tok=number)).token for number in (2, 5))
    experts = 5 * 3 * 36 * 28
    assert all_five - two == pytest.approx(3 / 5 * experts * constants.NS_WEIGHT)


@pytest.mark.parametrize("architecture", ["gpt2", "mamba", "lfm2", "minicpm3"])
def test_every_architecture_has_costs(architecture: str, tiny_model: ModelFactory) -> None:
    result = cpu_costs(tiny_model(architecture))
    assert min(result.token, result.pair, result.query, result.key) > 0


def test_settings_that_layers_do_not_share_are_those_of_the_first() -> None:
    """transformers refuses to say what the head size of Gemma 4 is: it may be another one in each layer."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Gemma 4")
    sizes = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 37}
    few = {"vocab_size": 101, "vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 8}
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=2, head_dim=12, **sizes, **few)
    with pytest.raises(RuntimeError, match="per-layer"):
        _ = config.head_dim
    result = cpu_costs(AutoModelForCausalLM.from_config(config))
    assert result.pair == pytest.approx(3 * (constants.NS_SCORE + 12 * constants.NS_HEAD_FEATURE))


def test_processes_run_one_pass_each_and_a_gpu_no_calls(tiny_model: ModelFactory) -> None:
    model = tiny_model("llama")
    enable_trees(model, segments=True)
    alone, two = (packing(model, JepaConfig(row_length=7), "cpu", processes) for processes in (1, 2))
    assert (alone["one_pass"], two["one_pass"]) == (False, True)
    assert (alone["kernel"], two["kernel"]) == ("cheapest", "cheapest")
    assert (alone["row_length"], alone["pass_length"]) == (7, 7)
    assert packing(model, JepaConfig(), "cpu")["pass_length"] is None
    gpu = packing(model, JepaConfig(), "cuda")
    assert (gpu["kernel"], gpu["costs"]) == ("mask", None)


@pytest.mark.parametrize(
    ("attention", "on_cpu", "on_gpu"), [("tree_sdpa", "mask", "mask"), ("tree_varlen", "cheapest", "varlen")]
)
def test_attention_by_name(attention: str, on_cpu: str, on_gpu: str, tiny_model: ModelFactory) -> None:
    model = tiny_model("llama", attention)
    for _ in range(2):  # a second set-up changes nothing
        enable_trees(model, segments=probe(model).segments)
    half = torch.bfloat16
    assert packing(model, JepaConfig(), "cpu")["kernel"] == on_cpu
    assert packing(model, JepaConfig(), "cuda", autocast=half)["kernel"] == on_gpu
