"""What trees are held to: every sequence in a pass of its own, and masks by a double loop over its tokens.

Nothing here knows of rows, prefixes or subtrees, only of sequences; see ``stepjepa.views.sequences``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.pack import Rows
from stepjepa.views.sequences import Readout, TokenizedRecord, TokenSequence

Rule = Any
"""(query position, key position) -> whether the model's own rule lets one see the other."""


def random_sequences(
    seed: int, *, isolated: bool = False, longest: int = 7, vocabulary: int = 389
) -> list[TokenSequence]:
    """Sequences that begin like others, go on from them, are equal to them or are beginnings of them.

    With ``isolated``, runs of tokens inside some see nothing before them; ``longest`` is the most tokens that one adds.
    """
    draw = np.random.default_rng(seed)
    sequences: list[TokenSequence] = []
    for index in range(int(draw.integers(3, 9))):
        ids, start = np.empty(0, np.int32), np.empty(0, np.int32)
        if index and draw.random() < 0.7:
            other = sequences[int(draw.integers(index))]
            length = int(draw.integers(1, len(other) + 1))
            ids, start = other.ids[:length], _starts(other)[:length]
        added = int(draw.integers(0 if len(ids) else 1, longest + 1))
        own = np.zeros(added, np.int32)
        if isolated and draw.random() < 0.5:
            own += len(ids)
        ids = np.concatenate([ids, draw.integers(0, vocabulary, added)]).astype(np.int32)
        start = np.concatenate([start, own]).astype(np.int32)
        places = draw.permutation(len(ids))[: int(draw.integers(len(ids) + 1))]
        labels = np.stack([np.sort(places), draw.integers(0, vocabulary, len(places))], axis=1).astype(np.int32)
        end = int(draw.integers(1, len(ids) + 1))
        kind = ("source", "target")[int(draw.integers(2))]
        readout = Readout(index, kind, int(draw.integers(end)), end)  # type: ignore[arg-type]
        sequences.append(TokenSequence(ids, labels, start=start if start.any() else None, readouts=(readout,)))
    return sequences


def random_records(seed: int, *, vocabulary: int = 380) -> list[TokenizedRecord]:
    """Records that share a prefix, are equal, are equal up to the middle of the answer, or begin alike and stop."""
    draw = np.random.default_rng(seed)

    def record(prompt: NDArray[Any], answer: NDArray[Any], line: int) -> TokenizedRecord:
        ids = np.concatenate([prompt, answer]).astype(np.int32)
        labels = np.arange(len(prompt) - 1, len(ids) - 1, dtype=np.int32)
        return TokenizedRecord(ids, labels, np.arange(3, len(prompt) - 2, dtype=np.int32), line=line)

    system, question, other = (draw.integers(0, vocabulary, size) for size in (5, 7, 11))
    first, second = draw.integers(0, vocabulary, 13), draw.integers(0, vocabulary, 6)
    asked = np.concatenate([system, question])
    return [
        record(asked, first, 1),
        record(asked, np.concatenate([first[:6], second]), 2),
        record(np.concatenate([system, other]), second, 3),
        record(asked, first, 4),
        record(asked, first[:6], 5),
        record(draw.integers(0, vocabulary, 9), second[:3], 6),
    ]


def batch_of(rows: Rows) -> Batch:
    """What a model is called with for packed sequences, without labels and readouts."""
    named = {"input_ids": rows.ids, "position_ids": rows.positions, "start": rows.start, "end": rows.end}
    tensors = {name: torch.from_numpy(value) for name, value in named.items()}
    return Batch(tensors, attention_mask=torch.ones_like(tensors["input_ids"]), isolates=bool(rows.start.any()))


def _starts(sequence: TokenSequence) -> NDArray[np.int32]:
    return np.zeros(len(sequence), np.int32) if sequence.start is None else sequence.start


def own_mask(sequence: TokenSequence) -> Tensor:
    """``[N, N]`` bool: what each token (dim 0) of a sequence sees, token by token."""
    start = _starts(sequence)
    return torch.tensor([[start[q] <= k <= q for k in range(len(sequence))] for q in range(len(sequence))])


def row_mask(sequences: Sequence[TokenSequence], rows: Rows, rule: Rule = lambda query, key: True) -> Tensor:
    """``[R, T, T]`` bool: the masks of all sequences, put where their tokens stand; padding sees and shows nothing."""
    count, length = rows.ids.shape
    sees = torch.zeros(count, length, length, dtype=torch.bool)
    for sequence, path in zip(sequences, rows.paths, strict=True):
        mask = own_mask(sequence)
        (row,) = set((path // length).tolist())
        for query, to in enumerate(path % length):
            for key, of in enumerate(path % length):
                sees[row, to, of] |= bool(mask[query, key]) and rule(query, key)
    return sees


def separate_states(model: Any, sequence: TokenSequence, layer: int = -1) -> Tensor:
    """``[N, D]``: a plain pass over one sequence; with isolated tokens under its mask, which eager attention takes."""
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(sequence.ids.astype(np.int64))[None]}
    if sequence.start is not None:
        allowed = own_mask(sequence)
        lowest = torch.finfo(torch.float32).min
        inputs["attention_mask"] = torch.zeros(allowed.shape).masked_fill(~allowed, lowest)[None, None]
        inputs["position_ids"] = torch.arange(len(sequence))[None]
    if layer != -1:
        return model(**inputs, use_cache=False, output_hidden_states=True).hidden_states[layer][0]
    return model.get_decoder()(**inputs, use_cache=False).last_hidden_state[0]


def logits_of(model: Any, states: Tensor) -> Tensor:
    """``[..., V]``: the head on states, scaled and capped as the configuration says, BERT's dense layer first."""
    if model.config.model_type == "bert":
        states = model.cls.predictions.transform(states)
    config, logits = model.config.get_text_config(), model.get_output_embeddings()(states)
    logits = logits * (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


@dataclass
class Slow:
    """Everything of a micro-batch, by separate passes."""

    states: list[Tensor]  # [N, D] of each sequence
    lm_loss: Tensor  # cross-entropy of the labels, summed
    prompt_loss: Tensor  # the same of the prompts
    source: Tensor  # [P, D] embeddings, by record and pair
    target: Tensor


def separately(model: Any, parts: Sequence[Sequence[TokenSequence]], layer: int = -1) -> Slow:
    """Run every sequence of some records by itself on a plain model; embeddings are read from ``layer``."""
    states, losses = [], {"labels": [torch.zeros(())], "prompt": [torch.zeros(())]}
    read: dict[str, list[tuple[int, int, Tensor]]] = {"source": [], "target": []}
    for owner, sequences in enumerate(parts):
        for sequence in sequences:
            last = separate_states(model, sequence)
            states.append(last)
            for name, result in losses.items():
                for place, token in getattr(sequence, name).tolist():
                    result.append(F.cross_entropy(logits_of(model, last[place]), torch.tensor(token)))
            inner = last if layer == -1 else separate_states(model, sequence, layer)
            for pair, kind, start, end in sequence.readouts:
                read[kind].append((owner, pair, inner[start:end].mean(0)))
    width = states[0].shape[-1] if states else 1
    embeddings = {
        kind: torch.stack([value for *_, value in sorted(result, key=lambda each: each[:2])])
        if result
        else torch.zeros(0, width)
        for kind, result in read.items()
    }
    sums = [torch.stack(losses[name]).sum() for name in ("labels", "prompt")]
    return Slow(states, *sums, **embeddings)


def probe(states: Tensor, seed: int = 7) -> Tensor:
    """A scalar that every entry of the states matters to, each in its own way."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return (states * weights).sum() + 0.1 * (states.square() * weights.flip(0)).sum()
