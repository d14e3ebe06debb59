"""Modules beside a model: trained with it, saved beside it, never as a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.models.architecture import (
    PredictorHead,
    attach_heads,
    find_heads,
    load_heads,
    save_heads,
    split_state,
    without_heads,
)
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.objective import Objective


def test_by_hand() -> None:
    values = torch.tensor([[1.0, -2.0]])
    linear, mlp = PredictorHead("linear", 2), PredictorHead("mlp", 2)
    with torch.no_grad():
        for parameter in [*linear.parameters(), *mlp.parameters()]:
            parameter.fill_(0.5)
    # 0.5 * (1 - 2) + 0.5
    assert torch.allclose(linear(values), torch.zeros(1, 2))
    # GELU(0) four times, times 0.5, plus 0.5
    assert torch.allclose(mlp(values), torch.full((1, 2), 0.5))
    with pytest.raises(ValueError, match="expected linear or mlp, got 'deep'"):
        PredictorHead("deep", 2)


def test_weights_depend_on_the_seed_alone() -> None:
    config, objective = tiny.make_model("llama").config, Objective([Alignment(head="mlp")])
    state = torch.random.get_rng_state()
    first, second, other = (objective.heads(config, seed)["predictor_head"].state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state), "heads must not move the global generator"
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, other[name])


def test_attached_found_taken_out_and_replaced() -> None:
    model = tiny.make_model("llama")
    names = set(model.state_dict())
    attach_heads(model, {"one": nn.Linear(3, 5), "two": nn.Linear(5, 3)})
    wrapped = nn.Sequential(model)
    found = find_heads(wrapped)
    assert found is not None
    with without_heads(model) as taken:
        assert taken is found
        assert find_heads(wrapped) is None
        assert set(model.state_dict()) == names
    assert find_heads(model) is found
    attach_heads(model, {"one": nn.Linear(7, 5)})
    assert list(find_heads(model) or ()) == ["one"]
    attach_heads(model, {})
    assert set(model.state_dict()) == names


@pytest.mark.parametrize(("lora", "wanted"), [(False, torch.bfloat16), (True, torch.float32)])
def test_in_the_dtype_of_what_is_trained(lora: bool, wanted: torch.dtype, tiny_tokenizer: Any) -> None:
    """An adapter is in single precision also where its base is not, and so is the head."""
    model: Any = tiny.make_model("llama").bfloat16()
    if lora:
        model = add_lora(model, LoraSettings(3), all_predictor_ids(tiny_tokenizer))
    attach_heads(model, {"head": PredictorHead("linear", 33)})
    assert model.term_heads["head"](torch.randn(2, 33).bfloat16()).dtype == wanted


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    attach_heads(model, {"first": PredictorHead("mlp", 6), "second": nn.Linear(7, 3)})
    heads = find_heads(model)
    assert heads is not None
    rest, own = split_state(model.state_dict())
    assert rest.keys() == tiny.make_model("llama").state_dict().keys()
    assert own.keys() == heads.state_dict().keys()
    save_heads(own, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first.safetensors", "second.safetensors"]
    again = nn.ModuleDict({"first": PredictorHead("mlp", 6), "second": nn.Linear(7, 3)})
    load_heads(again, tmp_path)
    for name, value in heads.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    with pytest.raises(
        ValueError, match=r"expected third\.safetensors in .*, got none; the checkpoint was made without"
    ):
        load_heads(nn.ModuleDict({"third": nn.Linear(7, 3)}), tmp_path)
    for other in (nn.Linear(7, 4), nn.Bilinear(7, 3, 3), nn.Linear(7, 3, bias=False)):
        with pytest.raises(ValueError, match=r"expected a head of the same kind and width in .*second\.safetensors"):
            load_heads(nn.ModuleDict({"second": other}), tmp_path)
