"""Checks of fast paths against slow, obvious ones, on the model, tokenizer and records that training would use."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepjepa.base.counting import counted
from stepjepa.base.files import temporary_folder
from stepjepa.base.json_object import JsonObject
from stepjepa.batch.mask import Kernel
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.inspection.served import check_served, decoded, has_unknown, shown_turns, squeezed
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import SEGMENTS, VARLEN
from stepjepa.models.encode import encode, flat_states
from stepjepa.models.probe import probe
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.packing import cpu_costs
from stepjepa.objectives.text import LMLoss
from stepjepa.views.layouts import LAYOUTS
from stepjepa.views.sequences import SampledRecord, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Rounding error of a float32 forward pass, relative to the largest number compared.
TOLERANCE = 1e-4
# Rounding error of a packed batch in 16 bits over that of plain passes: both are random, and differ a little.
MORE_ROUNDING = 1.5
SAMPLE_SIZE = 8  # records in the slow checks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass
class Subject:
    """A model with its tokenizer, settings and records, to be verified; both are set up for training, in place."""

    model: PreTrainedModel  # float32, in evaluation mode, with predictor tokens
    tokenizer: PreTrainedTokenizerBase  # with predictor tokens
    config: JepaConfig
    records: Sequence[Record]
    lora: Callable[[PreTrainedModel], nn.Module] | None = None  # adds adapters; None: no LoRA
    trust_remote_code: bool = False  # run code that comes with the tokenizer

    def __post_init__(self) -> None:
        over, device = self.config.over_length, self.model.device
        config = replace(self.config, over_length="truncate" if over == "error" else over)
        self.jepa = Jepa(self.model, self.tokenizer, config, device=device, processes=1, heads=False)
        self.collator = self.jepa.collator
        self.predictors: list[int] = self.jepa.record_tokenizer.predictors.tolist()
        self.tokenized = self.jepa.record_tokenizer.tokenize(self.records)
        whole = RecordTokenizer(self.tokenizer, replace(config, max_length=sys.maxsize, require_pairs=False))
        lengths = {it.line: max(len(text.ids) for text in it.texts) for it in whole.tokenize(self.records)}
        # Line of a record with more than ``max_length`` tokens -> number of tokens of its longest text.
        self.too_long = {line: length for line, length in lengths.items() if length > config.max_length}

    @property
    def sample(self) -> list[SampledRecord]:
        """The first records of the slow checks: those with pairs come first."""
        return [
            SampledRecord(record)
            for record in sorted(self.tokenized, key=lambda record: not record.all_pairs)[:SAMPLE_SIZE]
        ]

    def batch(self) -> Batch:
        """Collate :attr:`sample` into a micro-batch on the model's device."""
        return self.collator(self.sample).to(self.model.device)


def check_format(subject: Subject) -> str:
    """Check that the records have labels, and that training does not refuse them for their length."""
    if subject.too_long and subject.config.over_length == "error":
        (line, length), limit = next(iter(subject.too_long.items())), subject.config.max_length
        fault = f"training refuses {len(subject.too_long)} of {len(subject.records)} records"
        remedy = "raise `max_length`, or pass `over_length truncate` or skip"
        raise ValueError(f"{fault} (line {line}: {length} tokens, more than max_length {limit}); {remedy}")
    labelled = sum(len(text.labels) for record in subject.tokenized for text in record.texts)
    _require(labelled > 0, "no record can be trained on")
    return f"{len(subject.tokenized)} of {len(subject.records)} records, {counted(labelled, 'labelled token')}"


def check_pairs(subject: Subject) -> str:
    """Check that records have pairs of views, and that sources are read at the last predictor token."""
    if not subject.config.uses_views:
        return "regular training has no views"
    with_pairs = [record for record in subject.tokenized if record.all_pairs]
    remedy = f"; {subject.jepa.record_tokenizer.step_remedy}" if subject.config.mode == "step-jepa" else ""
    _require(
        bool(with_pairs), f"{subject.jepa.record_tokenizer.without_pair or 'no record has a pair of views'}{remedy}"
    )
    last = subject.predictors[-1:]
    if last and subject.config.last_token is None and not subject.config.front_pred:
        batch = subject.collator(SampledRecord(record) for record in with_pairs)
        read_at = set(batch.token_ids[batch.source_index].tolist())
        _require(read_at == set(last), "a source is not read at the last predictor token")
    count = sum(len(record.all_pairs) for record in with_pairs)
    return f"{len(with_pairs)} of {len(subject.tokenized)} records have pairs, {count} in all"


def check_end_of_turn(subject: Subject) -> str:
    """Check that the labels are the assistant's turns, each up to the token that ends it."""
    if subject.config.labels != "assistant":
        return f"labels '{subject.config.labels}' were asked for"
    template, compared, unknown = subject.jepa.record_tokenizer.template, 0, 0
    by_line = {record.line: record for record in subject.tokenized}
    for record in subject.records:
        if record.line not in by_line or record.line in subject.too_long:
            continue  # left out, or cut
        tokenized, compared = by_line[record.line], compared + 1
        labels = [int(token_id) for text in tokenized.texts for token_id in text.ids[text.labels + 1]]
        _require(labels[-1] in template.stop_ids, f"line {record.line}: the last label is not the end of turn")
        turns = shown_turns(tokenized, subject.config.max_length)
        if any(has_unknown(subject.tokenizer, turn.answer) for turn in turns):
            unknown += 1
            continue
        answers = "".join(turn.text[turn.answer :] for turn in subject.jepa.record_tokenizer.turns(record))
        trained = decoded(subject.tokenizer, np.array(labels))
        fault = f"line {record.line}: the labels read {trained[:60]!r}, the turns are {answers[:60]!r}"
        _require(squeezed(subject.tokenizer, trained) == squeezed(subject.tokenizer, answers), fault)
    _require(compared > 0, "every record checked is cut by max_length, so no end of turn is left; raise it")
    ends = " or ".join(map(repr, template.stop_tokens))
    more = f"; not compared, for characters that the tokenizer does not know: {unknown}" if unknown else ""
    return f"{counted(compared, 'record')}: the assistant's turns up to {ends} are trained, nothing else{more}"


def check_served_folder(subject: Subject) -> str:
    """Check that plain transformers makes the prompts of training from a saved folder, and stops where turns end."""
    with temporary_folder() as folder:
        subject.tokenizer.save_pretrained(folder)
        if subject.model.generation_config is not None:
            subject.model.generation_config.save_pretrained(folder)
        skips = subject.config.over_length == "skip"
        # Of a record that is too long only some turns may be left.
        records = [record for record in subject.records if not (skips and record.line in subject.too_long)]
        trusted = subject.trust_remote_code
        return check_served(
            folder, subject.jepa.record_tokenizer, records, subject.tokenized, trust_remote_code=trusted
        )


@torch.no_grad()
def check_batch(subject: Subject) -> str:
    """Check that hidden states of packed batches equal those of plain passes over each sequence.

    It is checked for each form of attention that the model can run, not only for the default of this device.
    """
    expected = _expected_states(subject)
    comparable = ~expected.isnan().any(-1)
    scale, errors = float(expected[comparable].abs().max()), list[str]()
    for form, kernel in _forms(subject):
        error = float((_packed_states(subject, kernel) - expected)[comparable].abs().max())
        errors.append(f"{error:.1e} {form}")
        message = f"largest difference {', '.join(errors)}, at scale {scale:.1f}"
        _require(error <= TOLERANCE * max(1.0, scale), message)
    return f"{int(comparable.sum())} states, {message}"


def check_rounding(subject: Subject) -> str:
    """Check that packed batches add no error to that of bfloat16, the default on a CUDA device.

    FlashAttention computes in 16 bits alone, so that the check in float32 does not run it.
    """
    if subject.model.device.type != "cuda":
        return "training on this device computes in float32 unless a precision is named"
    return compare_rounding(subject)


@torch.no_grad()
def compare_rounding(subject: Subject) -> str:
    """Compare the errors of bfloat16, packed and in plain passes, on any device; ValueError if packing adds to them."""
    exact = _expected_states(subject)
    comparable = ~exact.isnan().any(-1)
    with torch.autocast(subject.model.device.type, dtype=torch.bfloat16):
        plain = float((_expected_states(subject) - exact)[comparable].square().mean().sqrt())
        errors = {form: _packed_states(subject, kernel) - exact for form, kernel in _forms(subject)}
    packed = {form: float(error[comparable].square().mean().sqrt()) for form, error in errors.items()}
    message = ", ".join(f"{error:.1e} {form}" for form, error in packed.items())
    message = f"root mean square error {message}, {plain:.1e} in plain passes"
    _require(max(packed.values()) <= MORE_ROUNDING * plain, message)
    return message


def _forms(subject: Subject) -> list[tuple[str, Kernel]]:
    """Return the forms of attention on packed batches that the model can run, in words and as kernels."""
    if subject.collator.encoding != "tree":
        return [("in plain rows", "mask")]
    by_segments = subject.model.config._attn_implementation in (SEGMENTS, VARLEN)
    forms: list[tuple[str, Kernel]] = [("under a mask", "mask")]
    if by_segments:
        forms.append(("by segments", "calls"))
    if by_segments and probe(subject.model).varlen:
        forms.append(("by segments in one call", "varlen"))
    return forms


def _packed_states(subject: Subject, kernel: Kernel) -> Tensor:
    """Compute the last hidden states ``[N, D]`` of all texts, then the sources and targets, of one batch."""
    layer, costs = subject.config.jepa_layer, subject.collator.costs or cpu_costs(subject.model)
    collator = replace(subject.collator, kernel=kernel, costs=costs if kernel == "calls" else None)
    batch = collator(subject.sample).to(subject.model.device)
    texts = torch.from_numpy(np.concatenate(batch.records.paths))
    states = encode(subject.model, batch, lambda it: {"all": torch.cat([it.at(texts), *it.pairs])}, layer=layer)
    return states["all"].float()


def _expected_states(subject: Subject) -> Tensor:
    """Compute by a plain pass over each sequence what :func:`_packed_states` must return; NaN where there is none."""
    layer = subject.config.jepa_layer
    states: dict[str, list[Tensor]] = {"text": [], "source": [], "target": []}
    for item in subject.sample:
        readouts: dict[tuple[str, int], Tensor] = {}
        for sequence in subject.collator.sequences(item):
            last, inner = _plain_states(subject, sequence, layer)
            states["text"].append(last[torch.from_numpy(sequence.text).long()])
            for pair, kind, start, end in sequence.readouts:
                readouts[kind, pair] = inner[start:end].float().mean(0, keepdim=True)
        for key in sorted(readouts):
            states[key[0]].append(readouts[key])
    return torch.cat([rows for parts in states.values() for rows in parts])


def _plain_states(subject: Subject, sequence: TokenSequence, layer: int) -> tuple[Tensor, Tensor]:
    """Compute the last hidden states ``[N, D]``, and those of a layer, by plain passes.

    They are NaN at tokens whose visible tokens are not one run, such as those behind an isolated step.
    """
    decoder, device = find_decoder(subject.model), subject.model.device
    ids = torch.from_numpy(sequence.ids).long().to(device)
    start = torch.zeros(len(ids)).long() if sequence.start is None else torch.from_numpy(sequence.start).long()
    shape = 2, len(ids), subject.model.get_input_embeddings().weight.shape[1]
    states = torch.full(shape, torch.nan, device=device)
    for first in start.unique().tolist():
        end = first + int((start[first:] == first).long().cumprod(0).sum())
        positions: dict[str, Tensor] = {"position_ids": torch.arange(first, end, device=device)[None]} if first else {}
        output = decoder(input_ids=ids[None, first:end], use_cache=False, output_hidden_states=layer != -1, **positions)
        states[:, first:end] = torch.stack([flat_states(output, -1), flat_states(output, layer)])
    return states[0], states[1]


@torch.no_grad()
def check_lm_loss(subject: Subject) -> str:
    """Check that the LM loss is the cross-entropy of plain passes over the main texts alone."""
    if LAYOUTS[subject.collator.layout].changes_text:
        return f"layout '{subject.collator.layout}' changes the main text by design"
    packed_loss = float(jepa_loss(subject.model, subject.batch(), Objective([LMLoss()])).loss)
    total, count = 0.0, 0
    for record in (text for item in subject.sample for text in item.record.texts):
        ids, labels = torch.from_numpy(record.ids).long(), torch.from_numpy(record.labels).long()
        logits = subject.model(input_ids=ids[None].to(subject.model.device), use_cache=False).logits[0].float().cpu()
        total += float(F.cross_entropy(logits[labels], ids[labels + 1], reduction="sum"))
        count += len(labels)
    mean = total / count
    _require(abs(packed_loss - mean) <= TOLERANCE * max(mean, 1.0), f"{packed_loss:.6f} against {mean:.6f}")
    return f"{packed_loss:.4f} nats per token, difference {abs(packed_loss - mean):.1e}"


def check_step(subject: Subject) -> str:
    """Check that two optimisation steps change all trained weights, the predictor rows among them, and no others."""
    model: PreTrainedModel = copy.deepcopy(subject.model)
    model = subject.lora(model) if subject.lora is not None else model
    config = replace(subject.config, lbd=max(subject.config.lbd, 0.1))
    objective = Jepa(model, subject.tokenizer, config, device=subject.model.device, processes=1, rows=False).objective
    model.train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    # One LoRA factor is zero at first, so the other one changes only in the second step.
    for _ in range(2):
        jepa_loss(model, subject.batch(), objective).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    # Experts that got no token have no gradient.
    unexpected = {name for name in trained.keys() ^ moved if name in moved or "expert" not in name}
    fault = f"{len(unexpected)} parameters did not move though trained, or moved though frozen: {[*unexpected][:1]}"
    _require(not unexpected, fault)
    ids = subject.predictors
    if ids and any(item.record.all_pairs for item in subject.sample):
        rows = torch.tensor(ids, device=subject.model.device)
        after = model.get_input_embeddings()(rows)
        still = (after == subject.model.get_input_embeddings()(rows)).all(-1)
        _require(not bool(still.any()), f"{int(still.sum())} of {len(ids)} predictor rows did not move")
    return f"{len(moved)} of {len(before)} parameter tensors moved, {len(ids)} predictor rows among them"


CHECKS: tuple[tuple[str, Callable[[Subject], str]], ...] = (
    ("encoding by probe", lambda subject: f"{subject.jepa.encoding}: {subject.jepa.encoding_reason}"),
    ("data format", check_format),
    ("pairs of views", check_pairs),
    ("end of turn is trained", check_end_of_turn),
    ("served", check_served_folder),
    ("batch against separate passes", check_batch),
    ("batch in bfloat16", check_rounding),
    ("LM loss against transformers", check_lm_loss),
    ("one optimisation step", check_step),
)


def verify(subject: Subject) -> Iterator[JsonObject]:
    """Run all checks; yield for each its ``name``, ``passed``, and ``detail``, a sentence on the comparison."""
    for name, check in CHECKS:
        try:
            yield {"name": name, "passed": True, "detail": check(subject)}
        except (ValueError, RuntimeError) as error:
            yield {"name": name, "passed": False, "detail": str(error)}
