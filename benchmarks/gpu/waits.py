"""Where a training step waits for the device, and how much of the time the device is busy."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from .result import Result, rounded, wait
from .trainers import make_trainer
from .world import World, make_records


def part_sync(world: World, result: Result) -> None:
    """Where the host waits for the device in a step of JepaTrainer, and how busy the device is."""
    shape, length, batch = world.sizes(("0.5B", 512, 16), ("toy", 60, 4))
    records = make_records(batch * 16, length)
    arms: dict[str, dict[str, Any]] = {
        "branched infonce": {"mode": "llm-jepa", "layout": "branched"},
        "regular": {"mode": "regular"},
        "all terms": {"mode": "llm-jepa", "layout": "branched", "prompt_loss_weight": 0.1, "sigreg": 0.05,
                      "pooling": "mean", "stp": 0.02, "variance": 1.0},
    }  # fmt: skip

    def measure(name: str, call: Callable[[], dict[str, Any]], needs: float) -> None:
        with result.trying(name, needs=needs) as go:
            if go:
                result.put(name, call())

    def waits(name: str) -> None:
        measure(name, partial(waits_of, world, shape, arms[name], records, batch), 8)

    def busy(name: str, kind: str) -> None:
        measure(name, partial(profile, world, shape, arms["branched infonce"], records, batch, kind), 10)

    waits("branched infonce")
    waits("all terms")
    busy("busy, varlen", "tree_varlen")
    waits("regular")
    busy("busy, mask", "tree_sdpa")


def waits_of(
    world: World, shape: str, arm: dict[str, Any], records: list[dict[str, Any]], batch: int
) -> dict[str, Any]:
    """Count where the host waits in four steps of a training."""
    trainer, stopwatch = make_trainer(
        world, shape, arm, records, steps=14, batch=batch, logging=5, attention="tree_varlen"
    )
    places: Counter[str] = Counter()
    first, last = 6, 10  # the steps in which waits are counted

    def warned(message: Any, *_: Any) -> None:
        if "called a synchronizing" in str(message):  # not torch's note that it does not see all of them
            frames = [
                f for f in traceback.extract_stack() if "benchmarks" not in f.filename and "warnings" not in f.filename
            ]
            ours = [f for f in frames if any(name in f.filename for name in ("stepjepa", "transformers", "accelerate"))]
            chosen = (ours or frames)[-1]
            places["/".join(Path(chosen.filename).parts[-2:]) + f":{chosen.lineno} {chosen.line}"[:110]] += 1

    def on_step(number: int) -> None:
        if world.cuda:
            torch.cuda.set_sync_debug_mode("warn" if first <= number < last else "default")

    stopwatch.on_step = on_step
    before: Any = warnings.showwarning
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = warned  # type: ignore[assignment]  # it needs the message alone
            trainer.train()
    finally:
        warnings.showwarning = before
        if world.cuda:
            torch.cuda.set_sync_debug_mode("default")
    steps = last - first
    return {
        "waits a step": round(sum(places.values()) / steps, 2),
        "where": {place: round(count / steps, 2) for place, count in places.most_common(25)},
        "step ms": stopwatch.summary(),
    }


def profile(world: World, shape: str, arm: dict[str, Any], records: Any, batch: int, kind: str) -> dict[str, Any]:
    """Share of the time in which the device runs a kernel, and the kernels that take longest, in three steps."""
    trainer, stopwatch = make_trainer(world, shape, arm, records, steps=12, batch=batch, attention=kind)
    state: dict[str, Any] = {}

    def on_step(number: int) -> None:
        if number == 6:
            wait()
            state["profiler"] = profiled(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if world.cuda else [])]
            )
            state["profiler"].__enter__()
            state["begin"] = time.perf_counter()
        elif number == 9:
            wait()
            state["wall"] = time.perf_counter() - state["begin"]
            state["profiler"].__exit__(None, None, None)

    stopwatch.on_step = on_step
    trainer.train()
    spans: list[tuple[float, float]] = []
    names: Counter[str] = Counter()
    for event in state["profiler"].events():
        if str(getattr(event, "device_type", "")).endswith("CUDA"):
            spans.append((event.time_range.start, event.time_range.end))
            names[event.name[:90]] += event.time_range.end - event.time_range.start
    busy, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = sum(names.values()) or 1.0
    return {
        "busy share": rounded(busy / 1e6 / state["wall"]),
        "wall ms a step": rounded(state["wall"] / 3 * 1e3),
        "kernels a step": len(spans) // 3,
        "longest": {name: f"{spent / total:.1%}" for name, spent in names.most_common(14)},
        "step ms": stopwatch.summary(),
    }
