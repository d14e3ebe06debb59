"""An estimate for people and for programs."""

from __future__ import annotations

from typing import Any

from stepjepa.compute.memory import GIB, Part
from stepjepa.training.activations import OTHERS
from stepjepa.training.estimate import Estimate


def describe(found: Estimate) -> list[str]:
    """Model, data, memory and FLOPs on one screen, as lines."""
    data, tokens = found.data, found.tokens
    records = len(data.dataset)
    padding = f", {1 - found.text:.1%} of it padding; {found.plain_tokens:,.0f} as plain rows"
    mean = sum(tokens) / len(tokens)
    lines = [
        f"model      {found.model}",
        f"encoding   {found.encoding}",
        f"data       {data.describe()}",
        f"           {data.tokens['all'] / records:,.1f} tokens a record, {max(data.dataset.lengths):,} in the longest",
        f"step       {found.step}: {mean:,.0f} tokens on average, {max(tokens):,} at most{padding}",
        f"run        {found.steps:,} steps, {found.epoch_steps:,} an epoch",
        f"memory     GiB of {'each process' if found.processes > 1 else 'the process'}",
    ]
    lines += [_line(part) for part in [*found.memory, *activation_parts(found)]]
    lines.append(_line(Part("peak", found.peak, _peak_words(found))))
    if found.activations is None:
        lines.append("  activations are not in it: this model can't be run on shapes alone")
    lines.append("  not in it: what kernels use inside, what the allocator loses, and the libraries of the device")
    if found.flops is not None and found.regular_flops is not None:
        lines.append(
            f"compute    {found.flops:.4g} FLOPs a step, {found.flops * found.steps:.4g} in all; "
            f"{found.flops / found.regular_flops:.3f} of regular training on the same records"
        )
    else:
        lines.append("compute    not known: this model can't be run on shapes alone")
    return lines


def activation_parts(found: Estimate) -> list[Part]:
    """The parts of the activations that are there at their worst moment."""
    if found.activations is None:
        return []
    shape = found.largest
    words = f"{shape.rows} rows of up to {shape.length} tokens, {shape.labels} labels"
    return [
        Part(name, size, words if name == OTHERS else "")
        for name, size in found.activations.kinds.items()
        if size or name == OTHERS
    ]


def _peak_words(found: Estimate) -> str:
    parts = sum(part.bytes for part in [*found.memory, *activation_parts(found)])
    return "gradients are made while activations are freed" if found.peak < parts else ""


def _line(part: Part) -> str:
    return f"  {part.name:<18}{part.bytes / GIB:>9.3f}  {part.words}".rstrip()


def as_dict(found: Estimate) -> dict[str, Any]:
    """The same for programs: bytes, FLOPs, tokens."""
    tokens = found.tokens
    return {
        "model": found.model,
        "encoding": found.encoding,
        "processes": found.processes,
        "data": {**found.data.counts, **{f"{name}_tokens": count for name, count in found.data.tokens.items()}},
        "step": {
            "records": found.step,
            "tokens": sum(tokens) / len(tokens),
            "plain_tokens": found.plain_tokens,
            "most_tokens": max(tokens),
            "text_share": found.text,
        },
        "steps": found.steps,
        "steps_per_epoch": found.epoch_steps,
        "memory": {
            "parts": {part.name: part.bytes for part in [*found.memory, *activation_parts(found)]},
            "largest_batch": found.largest._asdict(),
            "peak": found.peak,
        },
        "flops": {"step": found.flops, "regular_step": found.regular_flops},
        "communication": {one.name: one.bytes for one in found.transfers},
    }
