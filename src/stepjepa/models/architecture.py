"""Access to the decoder of a model under PEFT, DDP or FSDP wrappers, and to the heads of terms.

Heads are trained with the model but saved in files of their own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel

# The submodule of a model that holds the heads, each under its own name.
HEADS = "term_heads"

_TURNS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""The lock of each model that threads read in turn."""


def base_model(model: Any) -> Any:
    """Return the transformers model under a PEFT wrapper, or the model itself.

    Raises:
        ValueError: it is the model from inside of a wrapper, or one that transformers itself added an adapter to.
    """
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"expected a model or its PEFT wrapper, got a {type(model).__name__} with an adapter and no wrapper; pass "
            "the PeftModel of get_peft_model(model, ...) or of PeftModel.from_pretrained(model, folder)"
        )
    return model


def causal_model(model: nn.Module) -> Any:
    """Return the causal language model inside wrappers such as DDP; a PEFT wrapper stays around it."""
    while not hasattr(model, "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module  # type: ignore[assignment]  # checked on the line above
    return model


def check_unwrapped(model: nn.Module) -> None:
    """Raise a ``ValueError`` for a model inside a wrapper such as DDP, where new tokens can't be added to it."""
    if causal_model(model) is not model:
        raise ValueError(
            f"model: expected it without a wrapper, got it in a {type(model).__name__}; pass its .module, and in a "
            "loop of your own wrap it afterwards"
        )


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module, training or evaluation, at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode inside the block; afterwards every module is in its own mode again.

    Threads take turns, since embedding puts hooks on the model and layers out of it.
    """
    with _TURNS.setdefault(model, RLock()), keeping_modes(model):
        model.eval()
        yield


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """Return the decoder of a causal language model: everything below its LM head.

    Args:
        model: the model, under any wrapper (PEFT, DDP, FSDP).

    Raises:
        ValueError: the model has no decoder.
    """
    causal = causal_model(model)
    if hasattr(causal, "get_base_model"):  # a PEFT wrapper; the model inside has a `peft_config`, too
        causal = causal.get_base_model()
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else None
    if decoder is causal or not isinstance(decoder, PreTrainedModel):
        # Some models do not override get_decoder, and the inherited method does not find their decoder.
        decoder = getattr(causal, "model", None)
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"expected a causal language model with a decoder, got {type(causal).__name__} without one")
    return decoder


def hidden_size(model: nn.Module) -> int:
    """Return the width D of the hidden states of a causal language model, under any wrapper."""
    return int(base_model(model).config.get_text_config().hidden_size)


def number_of_layers(model: nn.Module) -> int:
    """Return the number of layers of a causal language model, under any wrapper."""
    return int(base_model(model).config.get_text_config().num_hidden_layers)


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has mixture-of-experts layers, so that a step may leave some weights unused."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


class PredictorHead(nn.Module):
    """``[P, D]`` to ``[P, D]``: one ``linear`` layer, or an ``mlp`` of two with a GELU and inner width ``2 * D``."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        if kind not in ("linear", "mlp"):
            raise ValueError(f"predictor_head: expected linear or mlp, got '{kind}'")
        layers = [nn.Linear(width, width)]
        if kind == "mlp":
            # The layer that they replace is drawn first, too, so that runs of earlier versions can be repeated.
            layers = [nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]
        self.layers = nn.ModuleList(layers)

    def forward(self, source: Tensor) -> Tensor:
        """Map source embeddings ``[P, D]`` to predictions of their targets ``[P, D]``, in the dtype of the head."""
        values = source.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]  # a Linear's weight
        for index, layer in enumerate(self.layers):
            values = layer(nn.functional.gelu(values) if index else values)
        return values


def attach_heads(model: nn.Module, heads: Mapping[str, nn.Module]) -> None:
    """Make heads submodules of a model, replacing earlier ones: they are trained, sharded and moved with it."""
    _detach_heads(model)
    if not heads:
        return
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]  # a method of every PreTrainedModel
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    # The dtype of the weights trained beside them: an adapter is in float32 even if its base is not.
    dtype = torch.float32 if torch.float32 in trained else embedding.dtype
    model.add_module(HEADS, nn.ModuleDict(dict(heads)).to(device=embedding.device, dtype=dtype))


def _detach_heads(model: nn.Module) -> nn.ModuleDict | None:
    """Remove the heads from a model, and return them; None if it has none."""
    # Not getattr: a PEFT wrapper would answer with its base model's.
    heads = dict(model.named_children()).get(HEADS)
    if heads is None:
        return None
    delattr(model, HEADS)
    return cast(nn.ModuleDict, heads)


def find_heads(model: nn.Module) -> nn.ModuleDict | None:
    """Return the heads of a model, under any wrapper; None if it has none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == HEADS and isinstance(module, nn.ModuleDict):
            return module
    return None


@contextmanager
def without_heads(model: nn.Module) -> Iterator[nn.ModuleDict | None]:
    """Remove the heads of a model while the model alone is saved or loaded; yields the heads, or None."""
    heads = _detach_heads(model)
    try:
        yield heads
    finally:
        if heads is not None:
            model.add_module(HEADS, heads)


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a model's weights into those outside the heads, and those of the heads (named as in the heads)."""
    outside = {name: value for name, value in state.items() if not name.startswith(f"{HEADS}.")}
    return outside, {name.removeprefix(f"{HEADS}."): value for name, value in state.items() if name not in outside}


def save_heads(state: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write the weights of heads into a model's folder, one file per head (``predictor_head.safetensors``)."""
    heads: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        head, _, inner = name.partition(".")
        heads.setdefault(head, {})[inner] = value.detach().cpu().contiguous()
    for head, weights in heads.items():
        save_file(weights, Path(folder) / f"{head}.safetensors")


def load_heads(heads: nn.ModuleDict, folder: str | Path) -> None:
    """Read the weights of heads from a model's folder; ValueError if it lacks one."""
    for name, head in heads.items():
        path = Path(folder) / f"{name}.safetensors"
        if not path.is_file():
            raise ValueError(f"expected {path.name} in {folder}, got none; the checkpoint was made without this head")
        state: dict[str, Any] = load_file(path)
        set_model_state_dict(head, state, options=StateDictOptions(full_state_dict=True))


def drops_attention(model: PreTrainedModel) -> bool:
    """Return whether a model drops attention weights while it trains, by the names that configurations have for it."""
    config = model.config.get_text_config()
    names = "attention_dropout attn_dropout attn_pdrop attention_dropout_prob attention_probs_dropout_prob"
    return any(getattr(config, name, None) for name in names.split())
