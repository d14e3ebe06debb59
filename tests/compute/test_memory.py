"""What training keeps, told from shapes, against the tensors of real optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainingArguments

import tiny
from stepjepa.compute.memory import (
    Sharding,
    account,
    choose_sharding,
    nbytes,
    optimizer_bytes,
    quantized_bytes,
    trained,
)
from stepjepa.models.loading import LoraSettings, add_lora


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), report_to="none", use_cpu=True, **changes)


def stepped(model: Any, folder: Path, optim: str) -> torch.optim.Optimizer:
    """The optimizer that Trainer makes, after a step."""
    trainer = Trainer(model, arguments(folder, optim=optim))
    optimizer = trainer.create_optimizer()
    ids = torch.arange(13)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"])
def test_weights_gradients_and_states_to_the_byte(optim: str, kind: str, tmp_path: Path) -> None:
    model: Any = tiny.make_model("llama")
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "lora":
        model = add_lora(model, LoraSettings(3), [5, 7])
    parts = {part.name: part.bytes for part in account(model, optim=optim)}
    optimizer = stepped(model, tmp_path, optim)
    states = [value for value in tree_leaves(list(optimizer.state.values())) if isinstance(value, Tensor)]
    assert parts["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert parts["gradients"] == sum(
        p.grad.numel() * p.grad.element_size() for p in trained(model) if p.grad is not None
    )
    assert parts["optimizer states"] == sum(state.numel() * state.element_size() for state in states)
    assert parts.keys() == {"weights", "gradients", "optimizer states"}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit"])
def test_states_of_bitsandbytes(optim: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = tiny.make_model("llama", hidden_size=132, intermediate_size=133)
    try:
        optimizer = stepped(model, tmp_path, optim)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this build of bitsandbytes can't step here: {error}")
    # Tables of the values that 8 bits stand for are shared by all weights.
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")
    ]
    assert optimizer_bytes(model, optim) == nbytes(states)


def test_values_by_hand() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(128, 70, bias=False)
            self.head = nn.Linear(128, 11)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Whole()
    inner, head = 128 * 70, 128 * 11
    assert optimizer_bytes(model, "adamw_torch") == 2 * 4 * (inner + head + 11) + 3 * 4
    assert optimizer_bytes(model, "adafactor") == 4 * (128 + 70 + 128 + 11 + 11) + 3 * 4
    # 8,960 values have 35 blocks of 256; those of the head and its bias are below the smallest size for 8 bits.
    assert optimizer_bytes(model, "adamw_bnb_8bit") == 2 * (inner + 4 * 35) + 2 * 4 * (head + 11)
    assert optimizer_bytes(model, "galore_adamw") is None
    model.inner.requires_grad_(False)
    # 8,960 values: half a byte each, 140 scales in a byte each, one scale for these, a mean and two tables.
    assert quantized_bytes(model, "4bit") == 4480 + 140 + 4 + 4 + 4 * 16 + 4 * 256 + 4 * (head + 11)
    assert quantized_bytes(model, "8bit") == inner + 4 * 70 + 4 * (head + 11)


def test_sharding_is_read_from_the_arguments(tmp_path: Path) -> None:
    plain = arguments(tmp_path)
    assert choose_sharding(plain, None, 7) == Sharding()
    sharded = arguments(tmp_path, fsdp=True, fsdp_config={"reshard_after_forward": False}, bf16=True)
    assert choose_sharding(sharded, None, 7) == Sharding("FSDP", 7, 7, 7, upcasts=True, stays_whole=True)
    for stage, shares in enumerate([(1, 1, 1), (1, 1, 7), (1, 7, 7), (7, 7, 7)]):
        zero = {"zero_optimization": {"stage": stage}}
        assert choose_sharding(plain, zero, 7) == Sharding(f"DeepSpeed ZeRO-{stage}", *shares)
    away = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert choose_sharding(plain, away, 7).offloads


def test_what_sharding_and_mixed_precision_leave_of_it() -> None:
    model = tiny.make_model("llama", num_hidden_layers=3).to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())

    def parts(**options: Any) -> dict[str, int]:
        return {part.name: part.bytes for part in account(model, optim="adafactor", **options)}

    assert parts(processes=2)["buckets of DDP"] == 2 * count
    shared = parts(processes=7, sharding=Sharding("FSDP", 7, 7, 7, upcasts=True), mixed=torch.bfloat16)
    assert shared["weights"] == -(-4 * count // 7) == shared["gradients"]
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = count - 3 * block
    assert shared["gathered blocks"] == 2 * (2 * outside + 3 * block)
    whole = Sharding("FSDP", 7, 7, 7, stays_whole=True)
    assert parts(processes=7, sharding=whole)["gathered blocks"] == 2 * (count + outside + block)
    halves = Sharding("DeepSpeed ZeRO-2", 1, 7, 7, halves=True)
    zero = parts(processes=7, sharding=halves, mixed=torch.bfloat16)
    assert (zero["weights"], zero["master weights"], zero["gradients"]) == (
        2 * count,
        -(-4 * count // 7),
        -(-2 * count // 7),
    )
    away = parts(processes=7, sharding=Sharding("FSDP", 7, 7, 7, offloads=True))
    assert away["weights"] == away["gradients"] == away["optimizer states"] == 0
    assert parts(ema=True)["averaged weights"] == 2 * count
    # FSDP scatters gradients behind the last micro-batch of a step only.
    fsdp = Sharding("FSDP", 7, 7, 7)
    assert parts(processes=7, sharding=fsdp, accumulates=True)["whole gradients"] == 2 * count
    assert "whole gradients" not in parts(processes=7, sharding=fsdp)
    assert "whole gradients" not in parts(processes=7, accumulates=True)
