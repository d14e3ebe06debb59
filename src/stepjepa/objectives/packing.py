"""How the records of a run are packed into rows: row lengths by device and attention, and the collator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepjepa.batch.collate import Collator, Encoding, Packing
from stepjepa.batch.costs import Costs
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import base_model, drops_attention, find_decoder
from stepjepa.models.attention import segment_kernel, uses_flex
from stepjepa.models.probe import probe
from stepjepa.models.varlen_attention import HALF

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Default tokens per row: under a dense mask the cost of attention grows with the square of a row's length.
CPU_ROW, DENSE_ROW, FLEX_ROW = 1024, 2048, 8192

# Nanoseconds of the forward and backward pass of a layer on one CPU core, float32. Only their ratios matter: they
# choose between rows and segments. ``python benchmarks/fit_costs.py`` measures them again, and prints these lines.
NS_WEIGHT = 0.074  # a token through one weight of a linear layer
NS_FEATURE = 33.0  # a token through norms, activations and residual connections, for each feature of the width
NS_SCORE = 2.4  # a query against a key of one head, independent of the head's size
NS_HEAD_FEATURE = 0.175  # the same, for each feature of the head
NS_GATHER = 0.92  # one number that is gathered for attention by segments
NS_CALL = 320_000.0  # one more call of attention
NS_FORWARD = 1_650_000.0  # one more pass


def cpu_costs(model: PreTrainedModel) -> Costs:
    """Compute the cost of a layer of a model on a CPU: the mean over layers, with the experts that a token meets."""
    config = base_model(model).config.get_text_config()

    def size(names: str, default: int) -> int:
        values = (_setting(config, name) for name in names.split())
        return next((value for value in values if isinstance(value, int) and value > 0), default)

    width, heads = size("hidden_size", 1), size("num_attention_heads", 1)
    groups, head = size("num_key_value_heads", heads), size("head_dim", width // heads)
    experts = size("num_experts num_local_experts n_routed_experts", 1)
    met = min(1.0, size("num_experts_per_tok moe_topk top_k_experts", 1) / experts)  # share of a token's experts
    weights = 0.0
    for name, parameter in find_decoder(model).named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            # A weight that is not trained needs no gradient of its own: one of the three products of a step.
            share = 1.0 if parameter.requires_grad else 2 / 3
            weights += parameter.numel() * share * (met if ".experts." in name else 1.0)
    return Costs(
        token=weights / size("num_hidden_layers", 1) * NS_WEIGHT + width * NS_FEATURE,
        pair=heads * (NS_SCORE + head * NS_HEAD_FEATURE),
        query=heads * head * NS_GATHER,
        key=2 * groups * head * NS_GATHER,
        call=NS_CALL,
        forward=NS_FORWARD,
    )


def _setting(config: Any, name: str) -> object:
    """Return a setting of a configuration, that of the first layer where layers differ; None if it has none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers, for such a setting of Gemma 4
        return getattr(config.per_layer_config[0], name, None)


def packing(
    model: PreTrainedModel,
    config: JepaConfig,
    device_type: str,
    processes: int = 1,
    autocast: torch.dtype | None = None,
) -> Packing:
    """Choose how the sequences of a micro-batch are packed for a model after ``setup.set_up``.

    Args:
        model: that of ``set_up``.
        config: its ``row_length`` and ``share_prefixes``.
        device_type: of the devices that run it, such as ``cuda``.
        processes: number that train together.
        autocast: dtype in which passes will compute; None for the model's own.

    Returns:
        Keyword arguments of ``Collator``.
    """
    base = base_model(model)
    decoder, on_cpu = base.config.get_text_config(), device_type == "cpu"
    return {
        "row_length": config.row_length or (CPU_ROW if on_cpu else FLEX_ROW if uses_flex(base) else DENSE_ROW),
        "pass_length": config.row_length,
        "costs": cpu_costs(model) if on_cpu else None,
        "kernel": segment_kernel(base, device_type, varlen=runs_varlen(base, device_type, autocast or base.dtype)),
        # Processes that train together must all run equally many passes, so if there are several, each runs one.
        "one_pass": processes > 1,
        "share_prefixes": config.share_prefixes,
        "positions": getattr(decoder, "max_position_embeddings", None),
    }


def runs_varlen(model: PreTrainedModel, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether FlashAttention computes a model's attention on devices of a type: in 16 bits, without dropout.

    Args:
        model: the model.
        device_type: such as ``cuda``.
        dtype: of the hidden states: that of autocast, or of the weights.
    """
    if device_type != "cuda" or dtype not in HALF or torch.version.hip is not None or drops_attention(model):
        return False
    # A run on a GPU may be estimated on a machine without one.
    if torch.cuda.is_available():
        built = torch.backends.cuda.is_flash_attention_available()  # not in every build of torch
        if not built or torch.cuda.get_device_capability() < (8, 0):
            return False
    return probe(model).varlen


def make_collator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    *,
    encoding: Encoding,
    device_type: str,
    processes: int,
    prompt_labels: bool,
    whole_pairs: bool = False,
    autocast: torch.dtype | None = None,
) -> Collator:
    """Make the collator for a model after ``setup.set_up``.

    Args:
        model: that of ``set_up``.
        tokenizer: that of ``set_up``.
        config: that of ``set_up``.
        encoding: from ``set_up``.
        device_type: of the devices that train, such as ``cuda``.
        processes: number that train together.
        prompt_labels: also label the tokens of the prompt, for an objective with the term ``prompt_loss``.
        whole_pairs: refuse a pair of which one view alone is read, for losses of pairs and for monitors.
        autocast: dtype in which passes will compute; None for the model's own.
    """
    return Collator.of(
        config,
        predictor_ids(tokenizer, config.used_predictors),
        encoding=encoding,
        prompt_labels=prompt_labels,
        whole_pairs=whole_pairs,
        **packing(model, config, device_type, processes, autocast),
        pad_id=tokenizer.pad_token_id or 0,
    )
