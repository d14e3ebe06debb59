"""Small copies of an architecture with random weights, in which every limit on what a token sees is short."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stepjepa.models.attention import plain_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Sizes in the shrunken copy: LIMIT for sliding windows, chunks and similar limits; TABLE for the table of positions,
# which is longer than any sequence of the probe and shorter than their tree; VOCABULARY for the vocabulary.
LIMIT, TABLE, VOCABULARY = 5, 24, 97
MOST_PARAMETERS = 6 * 10**7

_LARGEST = {
    LIMIT: "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size local_attention "
    "floor_scale index_topk index_block_size",
    TABLE: "max_position_embeddings n_positions max_seq_len max_target_positions context_length",
    # With few heads an indexer scores many tokens 0, and chooses among them at random.
    16: "index_n_heads indexer_n_heads",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts",
    2: "num_experts_per_tok moe_topk moe_top_k top_k_experts moe_k n_group",
    1: "topk_group n_groups mamba_n_groups mamba_ngroups num_kv_shared_layers index_topk_blocks index_local_blocks",
}
# Setting in the copy's configuration -> its largest value.
LARGEST = {name: most for most, names in _LARGEST.items() for name in names.split()}


def shrink(model: PreTrainedModel) -> PreTrainedModel:
    """Make a small copy of a model's architecture with random weights: float32, on the CPU, in evaluation mode.

    It has 2, 4, 8 or 16 layers, the fewest with every kind of part that the model has. Head sizes are kept, and with
    them everything derived from them. ValueError if the copy would be too large, or need more layers.
    """
    for layers in (2, 4, 8, 16):
        config = copy.deepcopy(model.config)
        _shrink_config(config, layers)
        config._attn_implementation = plain_attention(model)
        with torch.device("meta"):
            trial = type(model)(copy.deepcopy(config))
        if not (missing := _kinds(model) - _kinds(trial)):
            break
    if missing:
        raise ValueError(f"with {layers} layers it lacks {', '.join(sorted(missing))}")
    if (size := trial.num_parameters()) > MOST_PARAMETERS:
        raise ValueError(f"it would have {size / 1e6:.0f} million parameters")
    with torch.device("cpu"):
        small = type(model)(config).float().eval()
        _redraw(small)
    return small


def _kinds(model: PreTrainedModel) -> set[str]:
    """Return the class names of the modules of a model, and the layer types of its configuration."""
    packages = "transformers.models.", type(model).__module__
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return {type(part).__name__ for part in model.modules() if type(part).__module__.startswith(packages)} | set(
        layer_types
    )


@torch.no_grad()
def _redraw(model: PreTrainedModel) -> None:
    """Draw random weights, large enough that attention is far from uniform and no gate is closed."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            inputs = module.in_features if isinstance(module, nn.Linear) else len(module.weight)
            module.weight.normal_(std=1.5 * inputs**-0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _shrink_config(config: PreTrainedConfig, layers: int) -> None:
    """Shrink a configuration, and those inside it, in place: fewer heads of the same size, widths in proportion."""
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _shrink_config(getattr(config, name), layers)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    total = getattr(config, "num_hidden_layers", None)
    for name, most in {**LARGEST, "num_hidden_layers": layers}.items():
        if _is_size(value := getattr(config, name, None)):
            setattr(config, name, min(value, most))
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    width, heads, groups = (value if _is_size(value := getattr(config, name, None)) else 0 for name in sizes)
    fewer = 0  # number of heads in the copy; 0 if the configuration names none
    if width and heads:
        fewer = min(groups, 2) * 2 if 0 < groups < heads else min(heads, 4)
    for name, value in list(vars(config).items()):
        if isinstance(value, list):
            setattr(config, name, [64] * len(value) if fewer and "intermediate" in name else value)
            if len(value) == total:
                setattr(config, name, getattr(config, name)[:layers])
        elif _is_size(value):
            setattr(config, name, _smaller(name, value, width, heads, fewer))


def _smaller(name: str, value: int, width: int, heads: int, fewer: int) -> int:
    """Return the size of a field in the copy, which has ``fewer`` heads; 0 if ``width`` and ``heads`` are not known."""
    if "vocab" in name:
        return VOCABULARY if name == "vocab_size" else min(value, VOCABULARY)
    if name.endswith("token_id"):
        return value if value < VOCABULARY else 3
    if fewer and value == width:
        return value // heads * fewer
    number_of_heads = ("heads" in name and not name.startswith("index")) or name == "n_head"
    if fewer and (number_of_heads or name.endswith(("hidden_size", "d_ssm"))):
        return max(value * fewer // heads, 1)
    return 64 if fewer and ("intermediate" in name or "ffn" in name or name == "n_inner") else value


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
