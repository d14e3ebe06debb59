"""Trees on a GPU: forward and gradient of every attention against separate passes, in single and half precision.

    pytest -m cuda

Before anything is measured on a GPU, this must pass there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from slow_trees import batch_of, random_sequences
from stepjepa.batch.mask import BLOCK
from stepjepa.batch.pack import Rows, pack
from stepjepa.batch.sequences import Sequence
from stepjepa.models.attention import enable_trees, tree_mask

ModelFactory = Callable[..., Any]

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch.compile looks at gradients, and its own code uses what is deprecated.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning"),
]

# The compiled kernel takes heads of 16 and more.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen2_window": {"hidden_size": 48, "sliding_window": 41},
    "gemma2_window": {"head_dim": 16, "sliding_window": 41},
}
MODELS = [
    pytest.param(name, attention, id=f"{name}-{attention}")
    for name in SHAPES
    for attention in ("sdpa", "eager", "flex_attention")
    if not (name == "gemma2_window" and attention == "sdpa")  # transformers refuses it: soft cap
]


def material() -> tuple[list[Sequence], Rows]:
    """Trees over several blocks, in rows of different lengths."""
    sequences = [each for seed in (1, 2, 5) for each in random_sequences(seed, longest=2 * BLOCK // 3)]
    rows = pack(sequences, row_length=3 * BLOCK)
    assert rows.ids.shape[1] > 2 * BLOCK
    return sequences, rows


def together(model: Any) -> list[Tensor]:
    """``[T, D]`` of each sequence, from one pass over all."""
    _, rows = material()
    batch = type(found := batch_of(rows))(
        {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in found.items()}
    )
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with tree_mask(batch.trees):
        states = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
    flat = states.flatten(0, 1)
    return [flat[torch.from_numpy(path).to(DEVICE)] for path in rows.paths]


def apart(model: Any) -> list[Tensor]:
    """The same, one plain pass for each sequence."""
    found = []
    for each in material()[0]:
        ids = torch.from_numpy(each.ids).long()[None].to(DEVICE)
        found.append(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0])
    return found


def run(states: Callable[[Any], list[Tensor]], model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """All hidden states, and the gradients of a scalar that every entry matters to."""
    found = torch.cat(states(model))
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(7)).to(found)
    return found.detach().float(), tiny.gradients(model, (found * weights).sum())


@pytest.mark.parametrize(("architecture", "attention"), MODELS)
def test_single_precision(architecture: str, attention: str, tiny_model: ModelFactory) -> None:
    shape = SHAPES[architecture]
    plain = tiny_model(architecture, "eager", **shape).to(DEVICE)
    model = tiny_model(architecture, attention, **shape).to(DEVICE)
    enable_trees(model)
    (wanted, gradient), (found, other) = run(apart, plain), run(together, model)
    tiny.assert_same(found, wanted, 1e-4)
    tiny.assert_same_gradients(other, gradient, 3e-4)


@pytest.mark.parametrize(("architecture", "attention"), MODELS)
def test_half_precision(architecture: str, attention: str, tiny_model: ModelFactory) -> None:
    """As far from single precision as separate passes in bfloat16 are."""
    shape = SHAPES[architecture]
    plain = tiny_model(architecture, "eager", **shape).to(DEVICE)
    wanted, gradient = run(apart, plain)
    model = tiny_model(architecture, attention, **shape).to(DEVICE).bfloat16()
    enable_trees(model)

    def error(found: Tensor, gradients: dict[str, Tensor]) -> tuple[float, float]:
        difference = sum(float((gradients[name].float() - value).square().sum()) for name, value in gradient.items())
        size = sum(float(value.square().sum()) for value in gradient.values())
        return float((found - wanted).norm() / wanted.norm()), (difference / size) ** 0.5

    errors, allowed = error(*run(together, model)), error(*run(apart, plain.bfloat16()))
    assert all(0 < mine < 1.5 * other for mine, other in zip(errors, allowed, strict=True)), (errors, allowed)
