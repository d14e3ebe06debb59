"""Before anything is timed on a device: a forest's loss and gradients there against separate rows."""

from __future__ import annotations

from typing import Any

import torch
from bench_forests import Shape, make_forests
from bench_training import SEED
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.objective import Objective

MODEL = {
    "vocab_size": 512,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 320,
    "max_position_embeddings": 2048,
}
JEPA: dict[str, dict[str, Any]] = {
    "llm-jepa separate": {"mode": "llm-jepa", "layout": "separate"},
    "llm-jepa branched": {"mode": "llm-jepa", "layout": "branched"},
    "step-jepa all": {"mode": "step-jepa", "pairs": "all"},
}
ATTENTIONS = {"sdpa dense mask": "sdpa", "flex block mask": "flex_attention"}
# No multiple of a block.
SHAPE = Shape(length=300, steps=5, vocabulary=512)
RECORDS = 3
SINGLE, HALF = 1e-3, 1.5
"""Relative errors allowed: of single precision; and of half precision, as a multiple of that of separate rows."""


def check(task: dict[str, Any]) -> dict[str, Any]:
    """Compare every layout and attention, in single and half precision.

    Args:
        task: ``device``.

    Returns:
        ``checks``: what was compared, ``loss`` and ``gradient`` (relative errors; the latter None where there is no
        backward pass), ``allowed`` likewise, and ``passed``.
    """
    device = torch.device(task["device"])
    checks = []
    for name, fields in JEPA.items():
        config = JepaConfig(**fields, max_length=SHAPE.length, lbd=1.0)
        wanted = _run(config, "sdpa", "rows", torch.float32, device)
        in_half = _errors(_run(config, "sdpa", "rows", torch.bfloat16, device), wanted)
        for attention, implementation in ATTENTIONS.items():
            for dtype in (torch.float32, torch.bfloat16):
                found = _errors(_run(config, implementation, "forest", dtype, device), wanted)
                allowed = [SINGLE, SINGLE] if dtype is torch.float32 else [HALF * (error or 0.0) for error in in_half]
                passed = all(error is None or error <= most for error, most in zip(found, allowed, strict=True))
                checks.append(
                    {
                        "what": f"{name}, {attention}, {str(dtype).removeprefix('torch.')}",
                        "embeddings": found[0],
                        "gradient": found[1],
                        "allowed": allowed,
                        "passed": passed,
                    }
                )
    return {"checks": checks}


def _run(
    config: JepaConfig, attention: str, encoding: str, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(SEED)
    shape = AutoConfig.for_model("llama", **MODEL, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # So large that attention is far from uniform: what is wrongly seen shows.
            torch.nn.init.normal_(parameter, std=0.08)
    model.to(device=device, dtype=dtype)
    if encoding == "forest":
        enable_forest(model)
    batch = ForestCollator(0, encoding)(make_forests(config, SHAPE, RECORDS, SEED))
    batch = {key: value.to(device) for key, value in batch.items()}
    objective = Objective.from_config(config)
    counts = torch.tensor([batch["label_ids"].numel(), batch["source_index"].numel(), 0], device=device)
    trains = not (device.type == "cpu" and attention == "flex_attention")
    with torch.set_grad_enabled(trains):
        outputs = forward(model, batch)
        loss = objective.parts(objective.sums(outputs), counts)["loss"]
    embeddings = torch.cat([outputs.source, outputs.target]).detach().float().flatten()
    if not trains:
        return embeddings, None
    loss.backward()
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return embeddings, torch.cat(gradients)


def _errors(found: tuple[Tensor, Tensor | None], wanted: tuple[Tensor, Tensor | None]) -> tuple[float, float | None]:
    embeddings = float((found[0] - wanted[0]).norm() / wanted[0].norm())
    if found[1] is None or wanted[1] is None:
        return embeddings, None
    return embeddings, float((found[1] - wanted[1]).norm() / wanted[1].norm())
