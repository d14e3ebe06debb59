"""Losses and gradients that are not finite: what is said of them, and what is kept of the batch to look at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stepjepa.batch.collate import Batch, Members
from stepjepa.files import atomic_write, write_json
from stepjepa.objectives.term import TERMS

OnNonfinite = Literal["stop", "skip"]
"""What becomes of a step whose loss or gradient is not finite: the run stops, or the step is not taken."""

ON_NONFINITE = ("stop", "skip")

MOST_IN_A_ROW = 10
"""Steps in a row that may be left out; after them something else is wrong than a batch."""

MOST_OVERFLOWS = 30
"""Steps in a row that the scaler of fp16 may leave out: as many times its scale can be halved, from 2^24 to below 1."""

MOST_KEPT = 16
"""Batches that are kept in a run folder: a run that leaves out many must not fill a disk."""

FOLDER = "nonfinite"
"""Where they are kept."""

COUNT_FILE = "nonfinite.json"
"""In a checkpoint: how many steps had been left out."""

GRADIENT = "gradient"
"""Stands for a part where all losses are finite and it is not known which of them has the gradient that is not."""

# Records that a message names; the kept batch has them all.
_NAMED = 8

_ENDS = (".safetensors", ".json")


@dataclass
class MicroBatch:
    """One micro-batch of the step that is being computed.

    Attributes:
        batch: as collated.
        counts: what its terms are divided by; see ``Objective.means``.
        parts: the means of its terms, on their device; empty until they are there.
    """

    batch: Batch
    counts: Mapping[str, float] | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def members(self) -> Members:
        """The records it holds."""
        found: Members = self.batch["members"]
        return found

    @property
    def cells(self) -> int:
        """Tokens of all rows, padding among them."""
        return sum(each["input_ids"].numel() for each in self.batch.passes)


@dataclass(frozen=True)
class Finding:
    """A micro-batch with something in it that is not finite.

    Attributes:
        process: on which it was.
        number: of the micro-batch in its step, from 0.
        lines: of its records.
        values: parts whose loss is not finite, or whose gradient is not, to the value of the loss.
        by_gradient: the losses are finite.
    """

    process: int
    number: int
    lines: tuple[int, ...]
    values: dict[str, float]
    by_gradient: bool = False


def in_losses(process: int, micros: Sequence[MicroBatch]) -> list[Finding]:
    """The micro-batches with a loss that is not finite. Waits for the device."""
    found = []
    for number, micro in enumerate(micros):
        values = {name: float(part) for name, part in micro.parts.items() if not math.isfinite(float(part))}
        if values:
            found.append(Finding(process, number, micro.members.lines, values))
    return found


def broken_weight(model: nn.Module) -> str | None:
    """A parameter that is itself not finite, where there is one: no batch is to blame then."""
    for name, parameter in model.named_parameters():
        # Of a weight that is shared out, the part that is here.
        here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(torch.isfinite(here).all()):
            return name
    return None


def name_records(source: str, lines: Iterable[int]) -> str:
    """Records as ``file:line``, the first of them."""
    lines = list(lines)
    named = [f"{source}:{line}" for line in lines[:_NAMED]]
    return ", ".join(named) + (f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")


def describe(findings: Sequence[Finding], source: str) -> str:
    """What is not finite, and in which records, for people.

    Args:
        findings: of all processes; at least one.
        source: what the records' file is called.
    """
    found = {name for each in findings for name in each.values}
    # Terms that were not registered come last, by their names.
    names = [name for name in (*TERMS, *sorted(found - TERMS.keys())) if name in found]
    values = [next(each.values[name] for each in findings if name in each.values) for name in names]
    if all(each.by_gradient for each in findings):
        of = [_words(name) for name in names if name != GRADIENT]
        what = "the gradient" + (f" of {' and '.join(of)}" if of else "") + " is not finite (the loss is)"
    else:
        what = " and ".join(f"{_words(name)} is {value}" for name, value in zip(names, values, strict=True))
    lines = dict.fromkeys(line for each in findings for line in each.lines)
    return f"{what}, with {name_records(source, lines)}"


def _words(name: str) -> str:
    return TERMS[name].words if name in TERMS else name


def keep(
    folder: Path, step: int, finding: Finding, micro: MicroBatch, *, source: str, about: dict[str, Any]
) -> Path | None:
    """Write a micro-batch into the run folder, beside those that are there.

    Args:
        folder: of the run.
        step: that was being computed, from 1.
        finding: what is wrong.
        micro: with what.
        source: what the records' file is called.
        about: what else is to be known of it.

    Returns:
        The file of its tensors, named as in ``collate.Batch``; a JSON file of the same name says the rest. None where
        ``MOST_KEPT`` are there already.

    Raises:
        OSError: it can't be written.
    """
    place = folder / FOLDER
    if place.is_dir() and len(list(place.glob("*.safetensors"))) >= MOST_KEPT:
        return None
    name = f"step-{step}-process-{finding.process}-batch-{finding.number}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    # A run that was stopped and resumed comes to the same step again.
    free = next(each for each in names if not any((place / (each + end)).exists() for end in _ENDS))
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in micro.batch.items() if isinstance(value, Tensor)
    }
    members = micro.members
    description = {
        "step": step,
        "process": finding.process,
        "batch": finding.number,
        # JSON has no word for them.
        "not_finite": {name: str(value) for name, value in finding.values.items()},
        "by_gradient": finding.by_gradient,
        "file": source,
        "records": [{"line": a, "tokens": b} for a, b in zip(members.lines, members.lengths, strict=True)],
        **about,
    }
    write_json(place / f"{free}.json", description)
    with atomic_write(place / f"{free}.safetensors", "wb") as stream:
        stream.write(save(tensors))
    return place / f"{free}.safetensors"
