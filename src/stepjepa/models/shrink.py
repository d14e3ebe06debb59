"""A small copy of a model's architecture with random weights, in which every limit on what tokens see is short."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stepjepa.models.architecture import find_decoder

LIMIT = 5
"""The copy's windows, chunks and other limits on what a token sees."""
TABLE = 24
"""The copy's position table: longer than any sequence of the probe, shorter than its tree."""
VOCABULARY = 97
MOST_LAYERS = 16
MOST_KINDS = 4
MOST_PARAMETERS = 6 * 10**7
"""What can be built and run well within the time that a probe may take."""

LIMITS = (
    "sliding_window", "sliding_window_size", "window_size", "attention_window_size", "attention_chunk_size",
    "floor_scale", "index_topk", "index_block_size", "local_attention",
)  # fmt: skip
BLOCKS = ("index_topk_blocks", "index_local_blocks")
TABLES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "context_length")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAMBA_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
INDEXERS = ("index_n_heads", "indexer_n_heads")
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")


def shrink(model: PreTrainedModel) -> PreTrainedModel:
    """A small copy of a model's architecture with random weights: float32, on the CPU, in evaluation mode.

    It has one layer of each kind, but at least two, and every limit on what tokens see is shorter than what the probe
    runs through it. Head sizes are kept, and with them all that is derived from them.

    Raises:
        ValueError: none can be built that runs.
    """
    errors = []
    for narrow in (True, False):
        try:
            small = _with_all_kinds(model, narrow=narrow)
            with torch.no_grad():
                find_decoder(small)(input_ids=torch.tensor([[5, 7, 6]]), use_cache=False)
            return small
        except Exception as error:  # whatever an unknown architecture raises
            errors.append(f"{type(error).__name__}: {error}")
    raise ValueError("; ".join(errors))


def _with_all_kinds(model: PreTrainedModel, *, narrow: bool) -> PreTrainedModel:
    """A copy with as many layers as it takes to have every kind of part that the model has."""
    layers = 2
    while True:
        config = copy.deepcopy(model.config)
        _shrink_config(config, layers, narrow=narrow)
        config._attn_implementation = sdpa_or_eager(model)
        small = _build(type(model), config)
        missing = _kinds(model) - _kinds(small)
        if not missing:
            return small
        layers *= 2
        if layers > MOST_LAYERS:
            names = ", ".join(sorted(kind.__name__ for kind in missing))
            raise ValueError(f"it lacks {names}, even with {MOST_LAYERS} layers")


def _kinds(model: PreTrainedModel) -> set[type[nn.Module]]:
    """The classes of a model's parts, as far as they belong to an architecture."""
    ours = "transformers.models.", type(model).__module__
    return {type(part) for part in model.modules() if type(part).__module__.startswith(ours)}


def _build(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it would have {size / 1e6:.0f} million parameters")
    with torch.device("cpu"):
        model = kind(config).float().eval()
        _redraw(model)
    return model


@torch.no_grad()
def _redraw(model: PreTrainedModel) -> None:
    """Draw weights so large that attention is far from uniform, and no gate is closed."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=1.5 * module.in_features**-0.5)
        elif isinstance(module, Conv1D):
            module.weight.normal_(std=1.5 * len(module.weight) ** -0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _shrink_config(config: Any, layers: int, *, narrow: bool) -> None:
    """Change a configuration, and those inside it, in place."""
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _shrink_config(getattr(config, name), layers, narrow=narrow)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    _lower(config, LIMITS, LIMIT)
    _lower(config, BLOCKS, 1)
    for name in TABLES:
        if _is_size(getattr(config, name, None)):
            setattr(config, name, TABLE)
    _lower(config, EXPERTS, 8)
    _lower(config, CHOSEN_EXPERTS, 2)
    # With few heads an indexer gives many tokens the same score of 0, and chooses among them at random.
    _lower(config, INDEXERS, 16)
    _lower(config, ("n_group",), 2)
    _lower(config, ("topk_group", *MAMBA_GROUPS), 1)
    _lower(config, [name for name in vars(config) if "vocab" in name], VOCABULARY)
    for name, value in vars(config).items():
        if name.endswith("token_id") and _is_size(value) and value >= VOCABULARY:
            setattr(config, name, 3)
    _keep_layers(config, layers)
    if narrow:
        _narrow(config)


def _keep_layers(config: Any, layers: int) -> None:
    """Keep the first layers, and the first of each further kind that lists of the configuration tell apart."""
    total = getattr(config, "num_hidden_layers", None)
    if not _is_size(total):
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == total}
    # Lists of numbers of layers are as long, but tell no kinds apart.
    telling = [list(map(str, value)) for value in lists.values() if len(set(map(str, value))) <= MOST_KINDS]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    kinds = list(zip(*telling, [number >= total - shared for number in range(total)], strict=True))
    firsts = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    fill = [number for number in range(total) if number not in firsts.values()]
    kept = sorted([*firsts.values(), *fill[: max(layers - len(firsts), 0)]])
    config.num_hidden_layers = len(kept)
    if shared:
        config.num_kv_shared_layers = sum(number >= total - shared for number in kept)
    for name, value in lists.items():
        setattr(config, name, [value[number] for number in kept])


def _narrow(config: Any) -> None:
    """Take fewer heads of the same size, and widths in proportion."""
    width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not _is_size(width):
        return
    has_heads = _is_size(heads)
    old: int
    if _is_size(heads):
        groups = getattr(config, "num_key_value_heads", None)
        old, new = heads, min(heads, 4)
        if _is_size(groups) and groups < heads:
            new = min(groups, 2) * 2
        new_width = new * (width // heads)
    else:
        old, new_width = width, width
        while new_width % 2 == 0 and new_width > 64:
            new_width //= 2
        new = new_width
    for name, value in list(vars(config).items()):
        if "intermediate" in name and isinstance(value, list):
            setattr(config, name, [64] * len(value))
        elif not _is_size(value):
            continue
        elif value == width:
            setattr(config, name, new_width)
        elif ("heads" in name or name == "n_head") and name not in INDEXERS:
            setattr(config, name, max(value * new // old, 1))
        elif name.endswith(("hidden_size", "d_ssm")):
            setattr(config, name, value * new // old)
        elif "intermediate" in name or "ffn" in name or name == "n_inner":
            setattr(config, name, 64 if has_heads else value * new // old)


def _lower(config: Any, names: Iterable[str], limit: int) -> None:
    for name in names:
        value = getattr(config, name, None)
        if _is_size(value):
            setattr(config, name, min(value, limit))


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def attention_kind(model: PreTrainedModel) -> str:
    """``flash``, ``flex``, ``eager`` or ``sdpa``: the kind of a model's attention implementation."""
    name = model.config._attn_implementation or "sdpa"
    return next((kind for kind in ("flash", "flex", "eager") if kind in name), "sdpa")


def sdpa_or_eager(model: PreTrainedModel) -> str:
    """The implementation that computes the same on any device."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) and attention_kind(model) != "eager" else "eager"
