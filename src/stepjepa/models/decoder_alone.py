"""A decoder that transformers' ``AutoModel`` loads from a folder, with the layers that are read alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import MODEL_MAPPING
from transformers.utils import logging

from stepjepa.models.architecture import base_model, evaluating, find_decoder, number_of_layers
from stepjepa.models.first_layers import running_up_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 19
"""Length of the text on which a decoder of fewer layers is compared with the whole one."""

_ROUNDING = 0.05
"""Largest difference of a token's hidden states that counts as equal, relative to their length; bfloat16 rounds."""


class DecoderAlone(NamedTuple):
    """A model to save, and the index of the hidden states that are read from it."""

    decoder: PreTrainedModel
    layer: int

    def reads_alike(self, ids: Sequence[int], copies: Sequence[int]) -> bool:
        """Return whether two texts of equal length have equal hidden states, one for each token."""
        states, of_copies = (
            _states(self.decoder, self.layer, torch.tensor([each], device=self.decoder.device))
            for each in (ids, copies)
        )
        return states.ndim == 3 and _equal(states, of_copies)


def loadable(model: nn.Module) -> PreTrainedModel:
    """Return the part of a causal language model below its LM head that ``AutoModel`` loads.

    Mostly it is the decoder, of some models what is around it; of a class that is not of transformers, the decoder.

    Raises:
        ValueError: it would load another class, whose weights would be new ones.
    """
    decoder = find_decoder(model)
    for part in (decoder, base_model(model).base_model):
        loaded = MODEL_MAPPING.get(type(part.config), None)
        if not _of_transformers(part) or type(part) in (loaded if isinstance(loaded, tuple | list) else [loaded]):
            return part
    raise ValueError(f"AutoModel of transformers does not load a {type(decoder).__name__}")


def with_first_layers(model: nn.Module, layer: int) -> DecoderAlone:
    """Return :func:`loadable` without the layers that some hidden states don't need; it shares the model's weights.

    It is whole where a configuration of fewer layers describes something else, such as a model whose last layers use
    the keys and values of others: what is built from it is compared with the model's decoder.

    Args:
        model: the model.
        layer: index in ``hidden_states`` of its decoder.
    """
    decoder = find_decoder(model)
    whole = DecoderAlone(loadable(model), layer)
    if whole.decoder is not decoder or not _of_transformers(decoder):
        return whole
    with evaluating(decoder):
        with running_up_to(model, [layer]) as (index,):
            weights = decoder.state_dict()
        if len(weights) == len(decoder.state_dict()):
            return whole
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # transformers warns of some configurations that are tried
        tokens = torch.arange(_TOKENS, device=decoder.device)[None] % decoder.config.vocab_size
        try:
            shorter = _built(decoder, index + 1, weights)
            same = _equal(*(_states(part, at, tokens) for part, at in ((shorter, index), (decoder, layer))))
        except Exception:  # an unknown architecture may raise anything; it is then saved whole
            return whole
        finally:
            logging.set_verbosity(verbosity)
    return DecoderAlone(shorter, index) if same else whole


def _of_transformers(part: PreTrainedModel) -> bool:
    return type(part).__module__.startswith("transformers.")


def _built(decoder: PreTrainedModel, layers: int, weights: dict[str, Tensor]) -> PreTrainedModel:
    """Build a decoder of the first layers from what a folder would say about it, with these weights."""
    config = copy.deepcopy(decoder.config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == number_of_layers(decoder):
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    # Buffers that are not among the weights, such as the angles of positions, are computed here.
    with init_empty_weights():
        shorter = type(decoder)(type(config).from_dict(config.to_dict()))
    shorter.load_state_dict(weights, assign=True)
    return shorter.to(decoder.device).eval()


def _states(decoder: PreTrainedModel, layer: int, tokens: Tensor) -> Tensor:
    """Return the hidden states ``[1, T, D]`` of tokens ``[1, T]``, in float32; some layers give several a token."""
    with evaluating(decoder), torch.no_grad():
        options = {"use_cache": False, "output_hidden_states": layer != -1}
        output = decoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
    states: Tensor = output[0] if layer == -1 else output.hidden_states[layer]
    return states.float()


def _equal(states: Tensor, expected: Tensor) -> bool:
    """Return whether hidden states ``[..., D]`` are equal for every token: the first one is often far the longest."""
    return bool(((states - expected).norm(dim=-1) <= _ROUNDING * expected.norm(dim=-1)).all())
