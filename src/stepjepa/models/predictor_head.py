"""A trained map on the source embedding: part of the model while it is trained, never of what is saved as the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from stepjepa.models.embeddings import HEAD

HEAD_FILE = "predictor_head.safetensors"


class PredictorHead(nn.Module):
    """``[P, D]`` to ``[P, D]``: one linear layer, or two with a GELU between them.

    Args:
        kind: ``linear`` or ``mlp``.
        width: D; the hidden layer of the MLP is twice as wide.
    """

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        if kind not in ("linear", "mlp"):
            raise ValueError(f"predictor_head: expected linear or mlp, got '{kind}'")
        layers = [nn.Linear(width, width)]
        if kind == "mlp":
            layers = [nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]
        self.layers = nn.ModuleList(layers)

    def forward(self, source: Tensor) -> Tensor:
        """Map the source embeddings, in the head's own dtype."""
        values = source.to(self.layers[0].weight.dtype)  # type: ignore[arg-type]  # a Linear's weight
        for index, layer in enumerate(self.layers):
            values = layer(nn.functional.gelu(values) if index else values)
        return values


def attach_head(model: nn.Module, kind: str, seed: int) -> None:
    """Make a head a submodule of a model, so that it is trained, sharded and moved with it.

    Args:
        model: a causal language model, or a PEFT wrapper of one; changed in place.
        kind: ``linear`` or ``mlp``.
        seed: of its weights, which depend on nothing else.
    """
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]  # a method of every PreTrainedModel
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr,operator]  # likewise
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = PredictorHead(kind, width)
    # As what is trained beside it: an adapter is in single precision also where its base is not.
    dtype = torch.float32 if torch.float32 in trained else embedding.dtype
    model.add_module(HEAD, head.to(device=embedding.device, dtype=dtype))


@contextmanager
def without_head(model: nn.Module) -> Iterator[nn.Module | None]:
    """Take the head out of a model while the model alone is saved or loaded; gives the head, or None."""
    head = model._modules.pop(HEAD, None)
    try:
        yield head
    finally:
        if head is not None:
            model.add_module(HEAD, head)


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a model in two: without those of the head, and those alone, by their names in the head."""
    rest = {name: value for name, value in state.items() if not name.startswith(f"{HEAD}.")}
    own = {name.removeprefix(f"{HEAD}."): value for name, value in state.items() if name not in rest}
    return rest, own


def save_head(state: dict[str, Tensor], folder: str | Path) -> None:
    """Write a head's weights into the folder of a model."""
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, Path(folder) / HEAD_FILE)


def load_head(head: nn.Module, folder: str | Path) -> None:
    """Read them back.

    Raises:
        ValueError: the folder has none, or one of another shape.
    """
    path = Path(folder) / HEAD_FILE
    if not path.is_file():
        raise ValueError(
            f"expected {HEAD_FILE} in {folder}, got none; the checkpoint was made without a predictor head"
        )
    try:
        if any(isinstance(parameter, DTensor) for parameter in head.parameters()):
            set_model_state_dict(head, {**load_file(path)}, options=StateDictOptions(full_state_dict=True))
        else:
            head.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"expected a predictor head of the same kind and width in {path}: {error}") from None
