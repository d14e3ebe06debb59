"""Target embeddings encoded with an exponential moving average of the trained weights (as in BYOL and I-JEPA)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from stepjepa.batch.collate import Batch
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import tree_mask
from stepjepa.models.encode import decoder_inputs, flat_states

EMA_FILE = "ema.safetensors"


class EmaEncoder:
    """A copy of a model whose weights are an exponential moving average of the model's.

    Frozen weights, such as those below an adapter, are shared with the model and take no memory.

    Args:
        model: not wrapped by DDP, and without heads of terms (``architecture.attach_heads``).
        decay: weight of the previous average in every update, at least 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        shared = {id(p): p for name, p in model.named_parameters() if name not in trained}
        self._model = copy.deepcopy(model, dict(shared)).eval()
        self._weights = {name: p.requires_grad_(False) for name, p in self._model.named_parameters() if name in trained}
        # In half precision most of an update would be rounded away, so the average is kept in float32.
        self._average = {name: p.detach().float() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Set ``average = decay * average + (1 - decay) * weight``; call it after an optimizer step."""
        for name, parameter in model.named_parameters():
            if name in self._average:
                self._average[name].lerp_(parameter.detach().float(), 1 - self.decay)
                self._weights[name].copy_(self._average[name])

    @torch.no_grad()
    def states(self, batch: Batch, layer: int = -1) -> Tensor:
        """``[R * T, D]`` hidden states under the averaged weights: one more pass of the decoder, without gradients."""
        decoder, states = find_decoder(self._model), []
        for each in batch.passes:
            with tree_mask(each.trees):
                states.append(flat_states(decoder(**decoder_inputs(each, [layer])), layer))
        return torch.cat(states)

    def save(self, folder: str | Path) -> None:
        """Write the averaged weights into a checkpoint folder."""
        save_file(
            {name: value.cpu().contiguous().clone() for name, value in self._average.items()}, Path(folder) / EMA_FILE
        )

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read the averaged weights from a checkpoint folder; ValueError if it has none, or those of another model."""
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(
                f"expected {EMA_FILE} in {folder}, got none; the checkpoint was made without --target_grad ema"
            )
        state = load_file(path)
        if state.keys() != self._average.keys():
            raise ValueError(f"expected the averages of {len(self._average)} weights in {path}, got {len(state)}")
        for name, value in state.items():
            self._average[name].copy_(value)
            self._weights[name].copy_(value)


class EmaCallback(TrainerCallback):
    """Updates the averaged weights after every optimizer step."""

    def __init__(self, encoder: EmaEncoder, model: nn.Module) -> None:
        self._encoder, self._model = encoder, model

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._encoder.update(self._model)
