"""Test whether a model can be trained on prefix trees, on plain rows only, or not at all.

The probe runs a small copy of the architecture with random weights, in which every limit on what a token sees is short.
``docs/design.md`` describes the checks and has a table of the model types that fail each of them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from stepjepa.batch.collate import Collator, Encoding
from stepjepa.batch.costs import Costs
from stepjepa.batch.mask import Kernel
from stepjepa.models.architecture import HEADS, base_model
from stepjepa.models.attention import enable_trees, plain_attention
from stepjepa.models.encode import encode
from stepjepa.models.shrinking import VOCABULARY, shrink
from stepjepa.models.varlen_attention import refusals
from stepjepa.views.sequences import Ids, SampledRecord, TokenizedRecord

# Largest relative difference between states that counts as rounding.
ROUNDING = 1e-3


class Findings(NamedTuple):
    """Results of the probe: reasons why a model can't run rows or trees, and weights that text does not reach."""

    no_rows: str | None = None  # why it can't run plain causal rows, and so can't be trained; None if it can
    no_tree: str | None = None  # why it can't run prefix trees; None if it can
    unreached: frozenset[str] = frozenset()  # parameter_pattern of each weight that gets no gradient from a text
    partly: bool = False  # of some patterns some weights get a gradient, and others do not
    segments: bool = False  # it can also run trees by segments, without a mask
    varlen: bool = False  # and FlashAttention can compute its attention, so that a GPU runs all segments as one call


_findings: dict[str, Findings] = {}  # by class and configuration


class EncodingChoice(NamedTuple):
    """The encoding of a model's micro-batches.

    Attributes:
        encoding: ``tree`` or ``rows``.
        reason: why, in words.
    """

    encoding: Encoding
    reason: str  # for this encoding, in words


def choose_encoding(model: PreTrainedModel, wanted: str) -> EncodingChoice:
    """Choose the encoding of a model's micro-batches.

    Args:
        model: of transformers, on any device; it is not run itself.
        wanted: ``auto``, ``tree`` or ``rows``.

    Raises:
        ValueError: the model can't run the wanted encoding, or none.
    """
    findings = probe(model)
    if findings.no_rows is not None:
        raise ValueError(f"{findings.no_rows}; no encoding can train it, choose a causal language model")
    attention = model.config._attn_implementation or "sdpa"
    no_tree = findings.no_tree
    if no_tree is None and not (attention in ("sdpa", "eager", "flex_attention") or attention.startswith("tree_")):
        no_tree = f"attention implementation '{attention}' does not take the mask of a prefix tree, as 'sdpa' does"
    if wanted == "tree" and no_tree is not None:
        raise ValueError(f"{no_tree}; use encoding 'rows'")
    requested = None if wanted == "auto" else "as asked for"
    if wanted != "rows" and no_tree is None:
        probed = f"a probe of {type(model).__name__} found the states of a tree to be those of plain rows"
        return EncodingChoice("tree", requested or probed)
    return EncodingChoice("rows", requested or str(no_tree))


def probe(model: PreTrainedModel) -> Findings:
    """Return what a model's architecture supports; each class and configuration is probed once in a process."""
    if getattr(model.config, "is_encoder_decoder", False):
        return Findings(no_rows=f"{type(model).__name__} is an encoder-decoder")
    architecture = [str(type(model)), model.config.to_dict(), plain_attention(model)]
    key = json.dumps(architecture, sort_keys=True, default=str)
    if key not in _findings:
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # transformers warns of small configurations
        try:
            # On the CPU also where the model is being built under another default device, such as meta.
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.default_generator.manual_seed(0)
                _findings[key] = _check(model)
        finally:
            logging.set_verbosity(verbosity)
    return _findings[key]


def _check(model: PreTrainedModel) -> Findings:
    """Run a small copy of a model on texts of which one is changed, and return the findings."""
    name, sequences = type(model).__name__, _sequences()
    changed, place = sequences[0].copy(), len(sequences[0]) * 2 // 3
    changed[place] += 1
    try:
        small = shrink(model)
        alone = [_states(small, [sequence], "rows")[0] for sequence in sequences]
        *rows, other = _states(small, [*sequences, changed], "rows")
    except Exception as error:  # an unknown architecture may raise anything
        return Findings(no_tree=f"no small copy of {name} could be probed ({type(error).__name__}: {error})")
    if (change := _difference([other[:place]], [rows[0][:place]])) > ROUNDING:
        no_rows = f"{name} is not causal: a later token changes earlier states (by {change:.1%})"
        return Findings(no_rows=no_rows)
    if (leaked := _difference(rows, alone)) > ROUNDING:
        no_rows = f"{name} gives rows padded on the right other states than sequences alone (by {leaked:.1%})"
        return Findings(no_rows=no_rows)
    unreached, partly = _unreached(small, sequences)
    findings = Findings(unreached=unreached, partly=partly)
    if (no_tree := _tree_fault(small, sequences, alone)) is not None:
        return findings._replace(no_tree=no_tree)
    if plain_attention(small) != "sdpa":
        return findings
    segments, varlen = (_runs_segments(small, sequences, alone, kernel) for kernel in SEGMENT_KERNELS)
    return findings._replace(segments=segments, varlen=segments and varlen)


def _tree_fault(small: PreTrainedModel, sequences: Sequence[Ids], alone: Sequence[Tensor]) -> str | None:
    """Return why a small copy can't run prefix trees under a mask; None if it can, and is set up to do so.

    Args:
        small: a copy that runs plain rows.
        sequences: share prefixes.
        alone: the states of each sequence run alone.
    """
    name = type(small).__name__
    if not getattr(small, "_supports_attention_backend", False):
        return f"{name} does not use transformers' attention interface, which brings masks to layers"
    try:
        enable_trees(small)
        gap = _difference(_states(small, sequences, "tree"), alone)
    except Exception as error:  # an unknown architecture may raise anything; the message shows it
        return f"{name} fails on prefix trees ({type(error).__name__}: {error})"
    if gap > ROUNDING:
        return f"{name} computes other hidden states for a prefix tree than for plain rows ({gap:.1%} apart)"
    return None


SEGMENT_KERNELS: tuple[Kernel, Kernel] = ("calls", "varlen")
"""The forms of attention by segments that ``Findings.segments`` and ``Findings.varlen`` stand for, in this order."""


def _runs_segments(model: PreTrainedModel, sequences: Sequence[Ids], alone: Sequence[Tensor], kernel: Kernel) -> bool:
    """Return whether a small copy that runs trees also computes, by segments, the states of sequences alone."""
    try:
        model.set_attn_implementation("sdpa")  # a model under tree_sdpa would stay there
        enable_trees(model, segments=True)
        with refusals() as refused:
            return _difference(_states(model, sequences, "tree", kernel), alone) <= ROUNDING and not refused
    except Exception:  # an unknown architecture may raise anything; it then runs trees under a mask
        return False


def parameter_pattern(name: str) -> str:
    """Return the name of a weight with its layer numbers replaced: a small copy has fewer layers."""
    return re.sub(r"\d+", "#", name)


def _unreached(model: PreTrainedModel, sequences: Sequence[Ids]) -> tuple[frozenset[str], bool]:
    """Return ``Findings.unreached`` and ``partly`` of a small copy; nothing if it has no backward pass."""
    ids = torch.from_numpy(sequences[0][None].astype(np.int64))
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.square().sum().backward()
    except Exception:  # an unknown architecture may raise anything
        return frozenset(), True
    reached: set[str] = set()
    lost: set[str] = set()
    for name, parameter in model.named_parameters():
        (lost if parameter.grad is None else reached).add(parameter_pattern(name))
    model.zero_grad(set_to_none=True)
    # An expert without a gradient may only have got no token of this text.
    return frozenset(lost - reached), any("expert" not in pattern for pattern in lost & reached)


def _sequences() -> list[Ids]:
    """Make sequences that share prefixes of several lengths; each is longer than ``LIMIT``."""
    # The first few ids are often special tokens, which some models treat differently.
    ids = np.random.default_rng(0).integers(5, VOCABULARY - 1, 46).astype(np.int32)
    return [ids[:19], np.r_[ids[:8], ids[19:28]], np.r_[ids[:3], ids[28:39]], ids[39:]]


def _states(
    model: PreTrainedModel, sequences: Sequence[Ids], encoding: Encoding, kernel: Kernel = "mask"
) -> list[Tensor]:
    """Compute the last hidden states of each sequence, ``[N, D]``, as in training."""
    pad = max(getattr(model.config.get_text_config(), "pad_token_id", None) or 0, 0)
    none = np.empty(0, np.int32)
    # With these costs each segment is a call of its own: the first one as a whole path, the others under a mask.
    costs = Costs(token=1.0, pair=1.0) if kernel == "calls" else None
    collator = Collator("separate", none, encoding=encoding, row_length=10**6, costs=costs, kernel=kernel, pad_id=pad)
    batch = collator(SampledRecord(TokenizedRecord(ids, none)) for ids in sequences)
    every = torch.arange(batch.input_ids.numel())
    with torch.no_grad():
        states = encode(model, batch, lambda encoded: {"states": encoded.at(every)})["states"]
    if not bool(states.isfinite().all()):
        raise ValueError("states are not finite")
    return [states[torch.from_numpy(path)] for path in batch.records.paths]


def _difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference between the two states of a token."""
    first, second = torch.cat([*actual]), torch.cat([*expected])
    return float(((first - second).norm(dim=-1) / second.norm(dim=-1).clamp_min(1e-6)).max())


# -- Parts that text does not reach -----------------------------------------------------------------------------------


def unreached_parts(model: nn.Module) -> list[str]:
    """Return the names of modules, or single weights, that get no gradient from a text, such as vision towers.

    Of nested modules the outermost is named. ``model`` is a transformers model or a PEFT wrapper of one; names are
    those of the model without the adapter.
    """
    base = base_model(model)
    patterns = probe(base).unreached
    if not patterns:
        return []
    prefix = getattr(model.base_model, "prefix", None) if hasattr(model, "peft_config") else None
    total, lost = Counter[str](), Counter[str]()
    names = []
    for name, _ in base.named_parameters():
        # Weights of adapters and of heads are no part of the architecture.
        plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
        if plain.startswith(f"{HEADS}.") or (prefix and f".{prefix}" in plain):
            continue
        parents = [plain[: place.start()] for place in re.finditer(r"\.", plain)]
        total.update([*parents, plain])
        names.append((plain, parents))
        if parameter_pattern(plain) in patterns:
            lost.update([*parents, plain])
    outermost: dict[str, None] = {}
    for name, parents in names:
        if part := next((part for part in [*parents, name] if total[part] == lost[part]), None):
            outermost[part] = None
    return list(outermost)


def freeze_unreached(model: nn.Module) -> None:
    """Freeze the parts that text does not reach, with the adapters inside them.

    DDP would wait for their gradients, and weight decay would shrink them.
    """
    base = base_model(model)
    if parts := unreached_parts(model):
        inside = re.compile(inside_of(parts))
        for name, parameter in base.named_parameters():
            if inside.fullmatch(name):
                parameter.requires_grad_(False)


def inside_of(parts: list[str]) -> str:
    """Return a regular expression that matches the names of these parts and of everything inside them."""
    return rf"({'|'.join(map(re.escape, parts))})(\..*)?"


def describe_unreached(model: nn.Module) -> str | None:
    """Return a line for the first screen; None if text reaches all parts."""
    parts = unreached_parts(model)
    return f"{', '.join(parts)} (no text reaches it)" if parts else None


def leaves_weights_unused(model: PreTrainedModel) -> bool:
    """Return whether text reaches only some of the layers of one kind, so that a step leaves weights unused."""
    return probe(base_model(model)).partly
