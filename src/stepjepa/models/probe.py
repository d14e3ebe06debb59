"""Find out by running it whether a model can be trained here: on trees, on plain rows only, or not at all.

Run is a shrunken copy of the architecture with random weights, and the loaded model itself where its weights are whole.
Three things are checked: that a later token changes no earlier state, that rows padded on the right give the states of
sequences run alone, and that a tree gives them, too. No list of names is kept. The page ``docs/design.md`` has a table
of which model types are found by which check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from stepjepa.batch.collate import Batch
from stepjepa.batch.pack import pack
from stepjepa.batch.sequences import Sequence
from stepjepa.models.attention import enable_trees
from stepjepa.models.encode import encode
from stepjepa.models.lm_head import LMHead
from stepjepa.models.shrink import attention_kind, sdpa_or_eager, shrink

BOUNDS = "probe_bounds"
"""Stands in for FlashAttention, which runs on no CPU: it only asks where concatenated sequences begin."""

EXACT, ROUGH = 1e-3, 0.1
"""Relative differences of states that are put down to rounding, in single precision on a CPU and elsewhere."""


@dataclass(frozen=True)
class Findings:
    """What a probe found; each is None where all is well.

    Attributes:
        no_rows: why the model can't be trained on plain causal rows, and so not at all.
        no_tree: why it can't run trees.
        note: to be said with the result.
    """

    no_rows: str | None = None
    no_tree: str | None = None
    note: str | None = None


# Configuration -> what the copy shows, or why there is none.
_by_configuration: dict[str, Findings | str] = {}
_by_model: WeakKeyDictionary[nn.Module, tuple[str, Findings]] = WeakKeyDictionary()


def choose_encoding(model: PreTrainedModel, wanted: str) -> tuple[str, str]:
    """Settle how a model's micro-batches are laid out.

    Args:
        model: not a PEFT wrapper but the transformers model itself; any device, also meta. It is left as it was.
        wanted: ``auto``, ``tree`` or ``rows``.

    Returns:
        The encoding, see ``collate.Encoding``, and the reason in words.

    Raises:
        ValueError: the model can't do what is wanted; the message names the remedy.
    """
    found = probe(model)
    if found.no_rows is not None:
        raise ValueError(f"{found.no_rows}; no encoding serves it, choose a causal language model")
    attention = model.config._attn_implementation or "sdpa"
    no_tree, remedy = found.no_tree, "use encoding 'rows'"
    if no_tree is None and not (attention in ("sdpa", "eager", "flex_attention") or attention.startswith("tree_")):
        no_tree = f"attention implementation '{attention}' takes no mask of trees"
        remedy += ", or attention implementation 'sdpa'"
    if wanted == "tree" and no_tree is not None:
        raise ValueError(f"{no_tree}; {remedy}")
    note = f" ({found.note})" if found.note else ""
    if wanted != "rows" and no_tree is None:
        same = f"a probe of {type(model).__name__} found the states of a tree to be those of plain rows"
        return "tree", ("as asked for" if wanted == "tree" else same) + note
    # What keeps a tree from being exact (a recurrent layer) lets concatenated sequences hear each other as well.
    if attention_kind(model) == "flash" and found.no_tree is None:
        return "concatenated", f"attention implementation '{attention}' is told where sequences begin{note}"
    return "rows", ("as asked for" if wanted == "rows" else str(no_tree)) + note


def probe(model: PreTrainedModel) -> Findings:
    """What a model's architecture and weights allow, found once for a configuration and once for a model."""
    key = _key(model)
    if model not in _by_model or _by_model[model][0] != key:
        _by_model[model] = key, _probe(model, key)
    return _by_model[model][1]


def _probe(model: PreTrainedModel, key: str) -> Findings:
    if getattr(model.config, "is_encoder_decoder", False):
        return Findings(no_rows=f"{type(model).__name__} is an encoder-decoder")
    if key not in _by_configuration:
        with _apart():
            try:
                small = shrink(model)
            except Exception as error:  # whatever an unknown architecture raises
                _by_configuration[key] = str(error)
            else:
                _by_configuration[key] = _check(small, _sequences(small), flash=attention_kind(model) == "flash")
    found = _by_configuration[key]
    if isinstance(found, str):
        why = f"no small copy of {type(model).__name__} could be made: {found}"
        if not _whole(model):
            return Findings(no_tree=f"nothing was probed, since {why}")
        with _apart(), _as_for_evaluation(model):
            itself = _check(model, _sequences(model), flash=attention_kind(model) == "flash")
        return replace(itself, note=f"the model itself was probed, since {why}")
    if found.no_rows is None and _whole(model):
        with _apart(), _as_for_evaluation(model):
            if _runs(model):
                itself = _check(model, _short(model))
                return Findings(itself.no_rows, found.no_tree or itself.no_tree)
    return found


def _runs(model: PreTrainedModel) -> bool:
    """Whether a loaded model runs where it is now; one in 16 bits, or with kernels of a GPU, need not on a CPU."""
    try:
        (states,) = _states(model, _short(model)[:1])
    except Exception:  # whatever an unknown architecture raises
        return False
    return bool(states.isfinite().all())


# -- The checks --------------------------------------------------------------------------------------------------------


def _sequences(model: PreTrainedModel) -> list[Sequence]:
    """Sequences with common beginnings of several lengths, all of them beyond ``LIMIT``; one with an isolated span."""
    ids = _random_ids(model, 64)
    own = np.split(ids, [19, 28, 39, 46, 56])
    isolated = np.repeat([0, 5, 0], [5, 6, 4]).astype(np.int32)
    return [
        Sequence(own[0]),
        Sequence(np.concatenate([own[0][:8], own[1]])),
        Sequence(np.concatenate([own[0][:3], own[2]])),
        Sequence(own[3]),
        Sequence(np.concatenate([own[0][:5], own[4]]), start=isolated),
    ]


def _short(model: PreTrainedModel) -> list[Sequence]:
    ids = _random_ids(model, 16)
    return [Sequence(ids[:11]), Sequence(np.concatenate([ids[:6], ids[13:]]))]


def _random_ids(model: PreTrainedModel, size: int) -> Any:
    vocabulary = model.config.get_text_config().vocab_size
    # The first few are often special tokens, which some models treat by their ids.
    return np.random.default_rng(0).integers(min(5, vocabulary - 2), vocabulary, size).astype(np.int32)


def _check(model: PreTrainedModel, sequences: list[Sequence], *, flash: bool = False) -> Findings:
    """Run the three checks, and one more for FlashAttention; the model must be in evaluation mode."""
    name = type(model).__name__
    plain = [sequence for sequence in sequences if sequence.start is None]
    try:
        alone = [_states(model, [sequence])[0] for sequence in plain]
        no_rows = _why_no_rows(model, plain, alone)
    except Exception as error:  # whatever an unknown architecture raises
        no_rows = f"fails on plain rows ({type(error).__name__}: {error})"
    if no_rows is not None:
        return Findings(no_rows=f"{name} {no_rows}")
    if not getattr(model, "_supports_attention_backend", False):
        return Findings(no_tree=f"{name} does not use transformers' attention interface, which brings masks to layers")
    try:
        no_tree = _why_no_tree(model, sequences, alone)
        if no_tree is None and flash:
            _check_bounds(model)
    except Exception as error:  # whatever an unknown architecture raises
        no_tree = f"fails on trees ({type(error).__name__}: {error})"
    return Findings(no_tree=None if no_tree is None else f"{name} {no_tree}")


def _why_no_rows(model: PreTrainedModel, plain: list[Sequence], alone: list[Tensor]) -> str | None:
    changed = plain[0].ids.copy()
    place = len(changed) * 2 // 3
    changed[place] = plain[0].ids[place - 1] if plain[0].ids[place - 1] != changed[place] else changed[0]
    *rows, other = _states(model, [*plain, Sequence(changed)])
    if not all(bool(states.isfinite().all()) for states in alone):
        return "gives states that are not finite"
    seen = _difference(model, [other[:place]], [rows[0][:place]])
    if seen is not None:
        return f"is not causal: a later token changes earlier states (by {seen:.1%})"
    leaked = _difference(model, rows, alone)
    if leaked is not None:
        return f"gives rows padded on the right other states than the sequences alone (by {leaked:.1%})"
    return None


def _why_no_tree(model: PreTrainedModel, sequences: list[Sequence], alone: list[Tensor]) -> str | None:
    with _implementation(model):
        enable_trees(model)
        branches = _states(model, sequences, tree=True)
    expected = list(alone)
    for number, sequence in enumerate(sequences):
        if sequence.start is not None:
            # What is isolated has the states that it has alone at the same positions.
            (span,) = (sequence.start > 0).nonzero()
            branches[number] = branches[number][span[0] : span[-1] + 1]
            expected.append(_states(model, [Sequence(sequence.ids[span])], first=int(span[0]))[0])
    wrong = _difference(model, branches, expected)
    return None if wrong is None else f"gives a tree other states than plain rows (by {wrong:.1%})"


def _difference(model: PreTrainedModel, found: list[Tensor], expected: list[Tensor]) -> float | None:
    """The relative difference of states, unless it is rounding: the largest of a token, or the mean where it is rough.

    In 16 bits rounding alone may send a token to another expert.
    """
    first, second = torch.cat(found).float(), torch.cat(expected).float()
    each = (first - second).norm(dim=-1) / second.norm(dim=-1).clamp_min(1e-6)
    exact = found[0].dtype == torch.float32 and found[0].device.type == "cpu"
    difference = float(each.max() if exact else each.mean())
    return None if difference <= (EXACT if exact else ROUGH) else difference


def _states(
    model: PreTrainedModel, sequences: list[Sequence], *, tree: bool = False, first: int | None = None
) -> list[Tensor]:
    """Last hidden states of each sequence, ``[N, D]``, by the pass that training makes.

    Args:
        model: that is run.
        sequences: of a batch.
        tree: share common beginnings; else a padded row for each.
        first: position of the first token of every row; None leaves positions to the model.
    """
    pad = max(getattr(model.config.get_text_config(), "pad_token_id", None) or 0, 0)
    rows = pack(sequences, row_length=10**6 if tree else 1, one_each=not tree, pad_id=pad)
    batch = Batch(input_ids=torch.from_numpy(rows.ids), attention_mask=torch.ones(rows.ids.shape, dtype=torch.long))
    if tree or first is not None:
        batch["position_ids"] = torch.from_numpy(rows.positions) + (first or 0)
    if tree:
        batch["start"], batch["end"] = torch.from_numpy(rows.start), torch.from_numpy(rows.end)
        batch["isolates"] = bool(rows.start.any())
    device = model.get_input_embeddings().weight.device
    batch = Batch({name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    every = torch.arange(rows.ids.size, device=device)
    with torch.no_grad():
        states = encode(model, batch, lambda encoded: {"states": encoded.at(every)})["states"]
    return [states[torch.from_numpy(path).to(device)] for path in rows.paths]


def _asks_for_bounds(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("cu_seq_lens_q") is None:
        raise ValueError(f"{type(module).__name__} is not told where concatenated sequences begin")
    return sdpa_attention_forward(module, *args, **kwargs)


AttentionInterface.register(BOUNDS, _asks_for_bounds)
AttentionMaskInterface.register(BOUNDS, sdpa_mask)


def _check_bounds(model: PreTrainedModel) -> None:
    """See that all attention hears where concatenated sequences begin.

    Raises:
        ValueError: some does not.
    """
    device = model.get_input_embeddings().weight.device
    batch = Batch(
        input_ids=torch.from_numpy(_random_ids(model, 7)).to(device).long()[None],
        attention_mask=torch.ones(1, 7, dtype=torch.long, device=device),
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2]], device=device),
        cu_seq_lens=torch.tensor([0, 4, 7], dtype=torch.int32, device=device),
        longest=4,
    )
    LMHead(model)  # tried out on a row of its own, which has no bounds
    with torch.no_grad(), _implementation(model):
        model.set_attn_implementation(BOUNDS)
        encode(model, batch, lambda encoded: {"states": encoded.at(torch.arange(7, device=device))})


# -- Leaving everything as it was --------------------------------------------------------------------------------------


def _key(model: PreTrainedModel) -> str:
    kind = type(model)
    described = [kind.__module__, kind.__qualname__, model.config.to_dict(), attention_kind(model)]
    return json.dumps(described, sort_keys=True, default=str)


def _whole(model: PreTrainedModel) -> bool:
    """Whether a model's weights are numbers that are all here: not on meta, sharded, quantised or spread."""
    if getattr(model, "is_quantized", False) or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return False
    return all(
        parameter.device.type != "meta"
        and parameter.is_floating_point()
        and parameter.numel()
        and not isinstance(parameter, DTensor)
        and not hasattr(parameter, "ds_id")
        for parameter in model.parameters()
    )


@contextmanager
def _apart() -> Iterator[None]:
    """Draw no random numbers that others would have drawn, and hold back the warnings of small configurations."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _as_for_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, and attention that runs anywhere."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _implementation(model):
            if attention_kind(model) in ("flash", "flex"):
                model.set_attn_implementation(sdpa_or_eager(model))
            yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def _implementation(model: PreTrainedModel) -> Iterator[None]:
    """Give a model, and all models inside it, the attention implementation back that they have now."""
    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    for config in list(configs.values()):
        for name in config.sub_configs:
            if getattr(config, name, None) is not None:
                configs[id(getattr(config, name))] = getattr(config, name)
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
