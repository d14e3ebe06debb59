"""No part of a step waits for a GPU, or mixes its tensors with those of the host, whatever the terms of the objective.

The step runs on a device without values, see ``fake_device``, by the code that runs on CUDA: segments in one
variable-length call, under autocast. What waits outside of it is the trainer's one look at the norm of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from fake_device import DEVICE, fake_device
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models import lm_head, varlen_attention
from stepjepa.models.architecture import without_heads
from stepjepa.models.attention import SDPA
from stepjepa.models.ema import EmaEncoder
from stepjepa.models.loading import add_lora
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.objective import jepa_loss
from stepjepa.objectives.term import Context
from stepjepa.training.callbacks import NonfiniteGuard
from stepjepa.training.meter import Meter

ALL = {"prompt_loss_weight": 0.1, "sigreg": 0.05, "stp": 0.02, "variance": 1.0, "covariance": 0.04, "pooling": "mean"}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "regular": ({"mode": "regular"}, set()),
    "all terms": ({"layout": "branched", "jepa_loss_type": "infonce", "predictor_head": "mlp", **ALL}, set()),
    "separate": ({"layout": "separate", "jepa_loss_type": "cosine", "jepa_layer": 1, **ALL}, set()),
    "inplace": ({"mode": "step-jepa", "layout": "inplace", "jepa_loss_type": "infonce", "pairs": "all"}, set()),
    "averaged weights": ({"layout": "branched", "target_grad": "ema", **ALL}, {"ema"}),
    "adapter": ({"layout": "branched", "jepa_loss_type": "infonce", **ALL}, {"lora"}),
    "weights in 16 bits": ({"layout": "branched", "jepa_loss_type": "infonce", **ALL}, {"bfloat16"}),
    "checkpointing": ({"layout": "branched", "jepa_loss_type": "infonce"}, {"checkpointing"}),
    "mask": ({"layout": "branched", "jepa_loss_type": "infonce", **ALL}, {"mask"}),
}


def step(model: Any, jepa: Jepa, batch: Any, parts: set[str]) -> None:
    """What ``JepaTrainer`` does with a micro-batch up to the norm of the gradient, and averaged weights after it."""
    ema = None
    if "ema" in parts:
        with without_heads(model):
            ema = EmaEncoder(model, 0.9)
    meter = Meter(jepa.objective, list, 1)
    guard = NonfiniteGuard(SimpleNamespace())  # type: ignore[arg-type]  # it only looks at losses here
    counts = jepa.objective.counts([batch])
    meter.begin_step(counts)
    half = torch.autocast(DEVICE.type, torch.bfloat16) if "bfloat16" not in parts else nullcontext()
    with half:
        context = Context(step=3, progress=0.5, ema_states=None if ema is None else ema.states)
        losses = jepa_loss(model, batch.to(DEVICE), jepa.objective, counts, context)
    meter.add(batch, losses, counts)
    guard.watch(losses).backward()
    if ema is not None:
        ema.update(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits(case: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, parts = CASES[case]
    model = tiny.make_model("llama", SDPA if "mask" in parts else "sdpa", head_dim=16)
    if "lora" in parts:
        model = add_lora(model, LoraSettings(), all_predictor_ids(tiny_tokenizer))
    if "bfloat16" in parts:
        model = model.to(torch.bfloat16)
    jepa = Jepa(model, tiny_tokenizer, JepaConfig(**settings), device="cuda", processes=1, autocast=torch.bfloat16)
    batch = jepa.collate(tiny.records())
    calls: list[torch.dtype] = []

    def runs_flash(query: Tensor) -> bool:
        calls.append(query.dtype)
        return query.dtype in varlen_attention.HALF

    monkeypatch.setattr(varlen_attention, "_runs_flash", runs_flash)
    with fake_device(model.train()) as faked:
        lm_head._around[lm_head.causal_model(faked)] = lm_head._around[lm_head.causal_model(model)]
        for module in faked.modules():
            module.__dict__.pop("_index_on_device", None)  # of the trained rows; another device has its own copy
        if "checkpointing" in parts:
            enable = getattr(faked, "activation_checkpointing_enable", None) or faked.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        step(faked, jepa, batch, parts)
        trained = {name: parameter for name, parameter in faked.named_parameters() if parameter.requires_grad}
        assert [name for name, parameter in trained.items() if parameter.grad is None] == []
    assert {*calls} == (set() if "mask" in parts else {torch.bfloat16})


HOST = np.arange(3)
WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda values: values.sum().item(),
    "float": lambda values: float(values.sum()),
    "bool": lambda values: bool((values > 0).any()),
    "list": lambda values: values.tolist(),
    "copy": lambda values: values.cpu(),
    "copy by name": lambda values: values.to("cpu"),
    "equal": lambda values: torch.equal(values, values),
    "nonzero": lambda values: values.nonzero(),
    "mask": lambda values: values[values > 0],
    "selected": lambda values: values.masked_select(values > 0),
    "unique": lambda values: values.unique(),
    "bincount": torch.bincount,
    "repeat": lambda values: values.repeat_interleave(values),
    "tensor of the host": lambda values: values + torch.tensor([1, 2, 3]),
    "range of the host": lambda values: values[torch.arange(2)] + torch.arange(2),
    "array of the host": lambda values: values * torch.from_numpy(HOST),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_waits_is_found(case: str) -> None:
    with fake_device(torch.nn.Identity()):
        values = torch.from_numpy(HOST).to(DEVICE)
        assert (values + torch.arange(3, device=values.device)).shape == (3,)
        with pytest.raises((AssertionError, RuntimeError), match=r"waits|Please convert|aten"):
            WAITS[case](values)
