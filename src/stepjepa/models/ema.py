"""An exponential moving average of the trained weights, which encodes targets (as in BYOL and I-JEPA)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stepjepa.batch.micro_batch import Batch
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import tree_mask
from stepjepa.models.encode import decoder_inputs, flat_states

EMA_FILE = "ema.safetensors"
"""File of the averaged weights in a checkpoint folder."""

UPDATED_TOGETHER = 2**26
"""Maximum number of values that are averaged in one launch."""


class EmaEncoder:
    """A copy of a model whose weights are an exponential moving average of the model's, see :meth:`update`.

    Frozen weights, such as those below an adapter, are shared with the model and take no memory.

    Args:
        model: neither wrapped by DDP nor with heads of terms.
        decay: weight of the previous average in every update.
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
        trained = {name: parameter.detach() for name, parameter in model.named_parameters() if name in self._average}
        # A GPU updates many weights in one launch. Groups are bounded, so that float32 copies of 16-bit weights take
        # little memory.
        for names in _groups({name: weight.numel() for name, weight in trained.items()}, UPDATED_TOGETHER):
            averages = [self._average[name] for name in names]
            torch._foreach_lerp_(averages, [trained[name].float() for name in names], 1 - self.decay)
            torch._foreach_copy_([self._weights[name] for name in names], averages)

    @torch.no_grad()
    def states(self, batch: Batch, layer: int = -1) -> Tensor:
        """Run the decoder with the averaged weights, without gradients.

        Args:
            batch: on the model's device.
            layer: index in ``hidden_states``; -1 for those after the final norm.

        Returns:
            Hidden states ``[cells, D]`` at the flat positions of all passes.
        """
        decoder, states = find_decoder(self._model), []
        for one_pass in batch.passes:
            with tree_mask(one_pass.trees):
                states.append(flat_states(decoder(**decoder_inputs(one_pass, [layer])), layer))
        return torch.cat(states)

    def save(self, folder: str | Path) -> None:
        """Write the averaged weights into a checkpoint folder."""
        state = {name: value.cpu().contiguous().clone() for name, value in self._average.items()}
        save_file(state, Path(folder) / EMA_FILE)

    @torch.no_grad()
    def load(self, folder: str | Path) -> None:
        """Read the averaged weights from a checkpoint folder; ValueError if it has none, or those of another model."""
        path = Path(folder) / EMA_FILE
        if not path.is_file():
            raise ValueError(f"expected {EMA_FILE} in {folder}; the checkpoint was made without `target_grad ema`")
        state = load_file(path)
        if state.keys() != self._average.keys():
            raise ValueError(f"expected the averages of {len(self._average)} weights in {path}, got {len(state)}")
        for name, value in state.items():
            self._average[name].copy_(value)
            self._weights[name].copy_(value)


def _groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Cut names into lists of at most ``most`` values in all; a larger one gets a list of its own."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
