"""Bytes that training keeps, told from shapes, against the tensors of real optimizers and passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

import tiny
from stepjepa.config.lora import LoraSettings
from stepjepa.models.architecture import PredictorHead, attach_heads, without_heads
from stepjepa.models.ema import EMA_FILE, EmaEncoder
from stepjepa.models.loading import add_lora
from stepjepa.running.memory import Sharding, activations, averaged, converted_bytes, resident_bytes
from stepjepa.training.recomputation import Recomputation


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, **changes)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_weights_gradients_and_states_of_a_real_step(optim: str, kind: str, tmp_path: Path) -> None:
    model: Any = tiny.make_model("llama")
    model = model.to(torch.bfloat16) if kind == "bfloat16" else model
    model = add_lora(model, LoraSettings(3), [5, 7]) if kind == "lora" else model
    parts = resident_bytes(model, optim)
    optimizer = Trainer(model, arguments(tmp_path, optim=optim)).create_optimizer()
    ids = torch.arange(13)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trained = [p for p in model.parameters() if p.requires_grad]
    states = [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
    assert parts["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert parts["gradients"] == sum(p.grad.numel() * p.grad.element_size() for p in trained)
    # But for the number of steps that each tensor keeps.
    steps = 4 * sum(value.numel() == 1 for value in states)
    assert parts["optimizer states"] == sum(state.numel() * state.element_size() for state in states) - steps


def test_sharding_and_mixed_precision_by_hand(tmp_path: Path) -> None:
    model: Any = tiny.make_model("llama").to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    assert resident_bytes(model, "adamw_torch", processes=3) == {
        "weights": 2 * count,
        "gradients": 2 * count,
        "optimizer states": 4 * count,
        "buckets of DDP": 2 * count,
    }
    mixed = arguments(tmp_path, bf16=True)
    assert Sharding.of(mixed, None, 3) is None
    stage = Sharding.of(mixed, {"zero_optimization": {"stage": 2}}, 3)
    assert stage == Sharding(1, 3, 3, "beside")
    # Weights and gradients of 16 bits; a copy in float32 and two averages of it, spread out.
    result = resident_bytes(model, "adamw_torch", processes=3, sharding=stage)
    assert result == {
        "weights": 2 * count,
        "gradients": round(2 * count / 3),
        "optimizer states": round(12 * count / 3),
    }
    whole = resident_bytes(model, "adamw_torch", processes=3, sharding=Sharding(3, 3, 3, "instead"), ema=True)
    assert (whole["weights"], whole["averaged weights"]) == (round(4 * count / 3), 4 * count)
    assert "optimizer states" not in resident_bytes(model, "adafactor")
    # Two averages of a byte for each weight.
    assert resident_bytes(model, "paged_adamw_8bit")["optimizer states"] == 2 * count


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
def test_averages_are_those_of_a_real_encoder(kind: str, tmp_path: Path) -> None:
    """In 16 bits a copy of the weights runs, beside the average in float32; in float32 both are one."""
    model: Any = tiny.make_model("llama")
    model = model.to(torch.bfloat16) if kind == "bfloat16" else model
    model = add_lora(model, LoraSettings(3), [5, 7]) if kind == "lora" else model
    attach_heads(model, {"predictor_head": PredictorHead("linear", 33)})
    with without_heads(model):
        encoder = EmaEncoder(model, 0.9)
        own = {each.untyped_storage()._cdata for each in model.parameters()}
    tensors = [*encoder._model.parameters(), *encoder._average.values()]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    kept = sum(size for place, size in storages.items() if place not in own)
    assert resident_bytes(model, "sgd", ema=True)["averaged weights"] == kept > 0
    encoder.save(tmp_path)
    assert sum(each.numel() * each.element_size() for each in load_file(tmp_path / EMA_FILE).values()) == sum(
        4 * each.numel() for each in averaged(model)
    )


def test_quantized_weights_by_hand() -> None:
    model: Any = add_lora(tiny.make_model("llama"), LoraSettings(3), [])
    # Two layers of width 33: queries and output 30, key and value 10 each, an MLP of 37.
    linear = 2 * (33 * 30 + 2 * 33 * 10 + 30 * 33 + 3 * 33 * 37)
    plain, small = (resident_bytes(model, "sgd", quantized=kind)["weights"] for kind in (None, "4bit"))
    assert plain - small == pytest.approx(linear * (4 - 0.516), abs=1)


def test_activations_are_about_those_of_a_real_pass() -> None:
    """Of a model whose matrices outweigh its norms; the bytes of what torch keeps are counted by its hooks."""
    model: Any = tiny.make_model("llama", hidden_size=264, intermediate_size=704, head_dim=88).train()
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    remaining: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        remaining.update({} if storage._cdata in own else {storage._cdata: tensor})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(2, 31, dtype=torch.long), use_cache=False)
    result = sum(tensor.untyped_storage().nbytes() for tensor in remaining.values())
    assert activations(model, 62) == pytest.approx(result, rel=0.34)
    assert activations(model, 62, mixed=True) == activations(model, 62) // 2  # type: ignore[operator]
    # Two blocks; of each its input, and of one all the rest.
    assert activations(model, 62, recomputed=Recomputation()) == 62 * 4 * 2 * 264 + activations(model, 62) // 2  # type: ignore[operator]
    assert activations(tiny.make_model("qwen3_moe"), 62) is None


@pytest.mark.parametrize(("every_n_layers", "whole", "inputs"), [(1, 1, 7), (2, 4, 4), (3, 5, 3), (11, 7, 1)])
def test_blocks_that_are_not_recomputed_keep_their_values(every_n_layers: int, whole: int, inputs: int) -> None:
    """Of seven: the blocks between those that are recomputed, and one of these; and the inputs of all of these."""
    model: Any = tiny.make_model("llama", num_hidden_layers=7)
    recomputed, of_inputs = Recomputation(every_n_layers), inputs * 62 * 4 * 33
    values, copies = activations(model, 62), converted_bytes(model)
    assert values is not None
    assert activations(model, 62, recomputed=recomputed) == of_inputs + values * whole // 7
    assert activations(model, 62, recomputed=recomputed._replace(offload=True)) == values * whole // 7
    assert converted_bytes(model, recomputed=recomputed) == copies * whole // 7


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_keeps_a_copy_of_each_matrix(frozen: bool) -> None:
    """Of frozen ones, too, through which the gradient flows; norms are computed in float32."""
    model: Any = tiny.make_model("llama", hidden_size=264, intermediate_size=704, head_dim=88).train()
    model.requires_grad_(not frozen)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.update({} if storage._cdata in own else {storage._cdata: tensor})
        return tensor

    states = torch.zeros(2, 31, 264, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model.model(inputs_embeds=states, use_cache=False)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    # No other tensor of two dimensions is kept than states, which have 62 rows.
    matrices = [tensor for tensor in kept.values() if tensor.ndim == 2 and 62 not in tensor.shape]
    copies = sum(tensor.untyped_storage().nbytes() for tensor in matrices)
    assert {tensor.dtype for tensor in matrices} == {torch.bfloat16}
    assert converted_bytes(model) == copies == 2 * converted_bytes(model, recomputed=Recomputation())
    assert activations(model, 62, mixed=True) == pytest.approx(size - copies, rel=0.4)
    assert converted_bytes(model.to(torch.bfloat16)) == 0
