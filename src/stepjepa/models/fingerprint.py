"""A fingerprint of the weights that a model was loaded with, before training adds rows of tokens to them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stepjepa.chat.special_tokens import END_OF_TURN, PERCEPTION, all_predictor_ids
from stepjepa.models.architecture import HEADS, base_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK, CHUNKS = 2**16, 256
"""Bytes and number of evenly spaced chunks that are hashed of a tensor of more than 16 MiB: training changes all."""

# Parts of names that PEFT adds to weights that it wraps, and parts that mark weights of its own.
_WRAPPERS = ("base_layer", "original_module", "token_adapter")
_ADAPTERS = ("lora_", "trainable_tokens_", "modules_to_save")


def weights_fingerprint(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash the weights of a model without those that training adds; None if they are not all in this process.

    The hash leaves out adapters, heads of terms, and the embedding rows of predictor tokens, of the tokens of the plain
    format and of ids beyond the tokenizer. So it is the same before and after a model is set up for an objective.
    """
    base = base_model(model)
    special = tokenizer.get_added_vocab()
    added = {
        *all_predictor_ids(tokenizer),
        *(special[token] for token in (PERCEPTION, END_OF_TURN) if token in special),
    }
    rows = [index for index in range(len(tokenizer)) if index not in added]
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    by_token = {id(weight) for module in embeddings if module is not None for weight in module.parameters()}
    digest = hashlib.sha256()
    # A tied weight has one name, the first.
    weights = {_plain_name(name): weight for name, weight in base.named_parameters() if not _is_added(name)}
    for name, weight in sorted(weights.items()):
        if weight.is_meta or hasattr(weight, "ds_id"):  # of DeepSpeed, which shards while it loads
            return None
        values = _select(weight.detach(), rows) if id(weight) in by_token else weight.detach()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(_bytes_to_hash(values))
    return digest.hexdigest()


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _is_added(name: str) -> bool:
    parts = name.split(".")
    return HEADS in parts or any(part.startswith(_ADAPTERS) for part in parts)


def _select(weight: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of a weight, without those that it lacks; a view, not a copy, if they are the first ones."""
    rows = [row for row in rows if row < len(weight)]
    if rows == list(range(len(rows))):
        return weight[: len(rows)]
    return weight[torch.tensor(rows, device=weight.device)]


def _bytes_to_hash(values: Tensor) -> memoryview:
    """Return the bytes of a tensor; of a large one, evenly spaced chunks of them."""
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    size = flat.numel()
    if size > CHUNK * CHUNKS:
        starts = [number * (size - CHUNK) // (CHUNKS - 1) for number in range(CHUNKS)]
        # Joined first: a GPU is waited for at every copy.
        flat = torch.cat([flat[start : start + CHUNK] for start in starts])
    return flat.cpu().numpy().data
