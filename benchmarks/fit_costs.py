"""Measures what a layer costs on a CPU, and prints the constants of ``objectives/packing.py``.

Two presets are run on one thread, and processor time is taken, so that what else the machine does matters little. Only
the ratios matter: they choose between rows and segments. ``--check`` shows how well: the time of a step as rows, by
segments, and as it is chosen.

    python benchmarks/fit_costs.py
    python benchmarks/fit_costs.py --check
    python benchmarks/fit_costs.py --check --data FILE.jsonl --records 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from stepjepa import Jepa, JepaConfig, load_model, read_records
from stepjepa.models.presets import preset_config
from stepjepa.models.segment_attention import gather
from stepjepa.objectives import packing

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "llm_jepa" / "synth_train.jsonl"
PRESETS = ("preset:tiny", "preset:small")
LENGTHS = (16, 64, 256, 512, 1024, 2048)
# Segments, queries and keys of a call.
CALLS = [(16, 32, 32), (16, 64, 64), (16, 32, 96), (16, 64, 128), (16, 128, 128), (4, 100, 400), (4, 400, 400)]
# Tokens, and how many are gathered.
GATHERS = [(1000, 1000), (1000, 4000), (3000, 12000)]
NAMES = ("NS_WEIGHT", "NS_FEATURE", "NS_SCORE", "NS_HEAD_FEATURE", "NS_GATHER", "NS_CALL", "NS_FORWARD")


def nanoseconds(work: Callable[[], Any], seconds: float = 1.0) -> float:
    """Processor time of some work: the lower quartile of as many runs as fit into a time."""
    work()
    times: list[int] = []
    while len(times) < 5 or sum(times) < 1e9 * seconds:
        start = time.process_time_ns()
        work()
        times.append(time.process_time_ns() - start)
    return float(np.quantile(times, 0.25))


def no_attention(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The queries themselves, so that all but attention is measured."""
    return (query + 0 * (key.sum() + value.sum())).transpose(1, 2), None


def layer_times(name: str) -> tuple[Any, list[float]]:
    """A preset's configuration, and the time of all but attention of one layer for each of ``LENGTHS``."""
    AttentionInterface.register("none", no_attention)
    AttentionMaskInterface.register("none", lambda *_, **__: None)
    config = preset_config(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="none").get_decoder()
    times = []
    for length in LENGTHS:
        ids = torch.randint(0, 1000, (1, length))

        def step() -> None:
            model.zero_grad()
            states = model(input_ids=ids, use_cache=False).last_hidden_state  # noqa: B023  # called at once
            states.backward(torch.ones_like(states))

        times.append(nanoseconds(step) / config.num_hidden_layers)
    return config, times


def call_time(config: Any, segments: int, queries: int, keys: int) -> float:
    """Time of one call of attention under a mask, forward and backward."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = torch.randn(segments, queries, heads, size, requires_grad=True)
    both = torch.randn(segments, keys, 2 * groups, size, requires_grad=True)
    mask = torch.zeros(segments, 1, queries, keys)

    def work() -> None:
        states = both.transpose(1, 2)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2), states[:, :groups], states[:, groups:], attn_mask=mask, enable_gqa=heads != groups
        )
        torch.autograd.grad(output, (query, both), torch.ones_like(output))

    return nanoseconds(work, 0.5)


def gather_time(width: int, tokens: int, number: int) -> float:
    """Time of gathering rows of some width, forward and backward."""
    index = torch.randint(0, tokens, (number,)).sort().values
    states = torch.randn(tokens, width, requires_grad=True)

    def work() -> None:
        rows = gather(states, index)
        torch.autograd.grad(rows, states, torch.ones_like(rows))

    return nanoseconds(work, 0.5)


def solved(terms: list[list[float]], times: list[float]) -> list[float]:
    """Non-negative coefficients of least relative error."""
    scale = 1 / np.array(times)
    rows = np.array(terms, float) * scale[:, None]
    used = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used], np.ones(len(times)), rcond=None)
        if (found >= 0).all():
            return [float(found[used.index(each)]) if each in used else 0.0 for each in range(rows.shape[1])]
        used.pop(int(found.argmin()))


def fit() -> dict[str, float]:
    """The constants of ``objectives/packing.py``."""
    linear: tuple[list[list[float]], list[float]] = ([], [])
    attention: tuple[list[list[float]], list[float]] = ([], [])
    gathers: tuple[list[list[float]], list[float]] = ([], [])
    for name in PRESETS:
        config, times = layer_times(name)
        width, heads, groups, size = (
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        weights = 2 * width * size * (heads + groups) + 3 * width * config.intermediate_size
        linear[0].extend([length * weights, length * width, 1.0] for length in LENGTHS)
        linear[1].extend(times)
        for call in CALLS:
            pairs = heads * float(np.prod(call))
            attention[0].append([pairs, pairs * size, 1.0])
            attention[1].append(call_time(config, *call))
        for tokens, number in GATHERS:
            for features in (heads * size, 2 * groups * size):
                gathers[0].append([number * features, 1.0])
                gathers[1].append(gather_time(features, tokens, number))
    weight, feature, forward = solved(*linear)
    score, head_feature, one_call = solved(*attention)
    gathered, _ = solved(*gathers)
    return dict(zip(NAMES, (weight, feature, score, head_feature, gathered, one_call, forward), strict=True))


# -- how well they choose ----------------------------------------------------------------------------------------------


def check(data: Path, records: int) -> None:
    """Print the time of a step as rows, by segments and as it is chosen, for each preset and layout."""
    chosen = list(itertools.islice(read_records(data), records))
    for name, layout in itertools.product(PRESETS, ("regular", "branched", "separate")):
        views: Any = {"mode": "regular"} if layout == "regular" else {"mode": "llm-jepa", "layout": layout}
        model, tokenizer = load_model(name)
        jepa = Jepa(model, tokenizer, JepaConfig(**views, max_length=4096))
        batches, times = {}, {}
        for kernel in ("mask", "calls", "cheapest"):
            jepa.__dict__["collator"] = replace(jepa.collator, kernel=kernel)
            batches[kernel] = jepa.collate(chosen)
        for kernel, batch in batches.items():

            def step() -> None:
                model.zero_grad()  # noqa: B023  # called at once
                jepa.loss(model, batch).loss.backward()  # noqa: B023

            times[kernel] = nanoseconds(step, 2.0) / 1e6
        picked = "segments" if any("shapes" in each for each in batches["cheapest"].passes) else "rows"
        line = {f"{kernel}_ms": round(value, 1) for kernel, value in times.items()}
        print(json.dumps({"model": name, "layout": layout, **line, "chosen": picked}), flush=True)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="compare rows with segments instead")
    options.add_argument("--data", type=Path, default=DATA, help="records of --check (synth)")
    options.add_argument("--records", type=int, default=16, help="of a micro-batch of --check (16)")
    args = options.parse_args()
    torch.set_num_threads(1)
    if args.check:
        check(args.data, args.records)
        return
    for name in PRESETS:
        costs = packing.cpu_costs(load_model(name)[0])
        call, forward, gathered = (
            each / costs.token for each in (costs.call, costs.forward, 2 * costs.query + costs.key)
        )
        print(f"{name}, in tokens: a call {call:.1f}, a pass {forward:.0f}, a gathered token {gathered:.3f}")
    for name, value in fit().items():
        print(f"{name} = {value:.4g}  # now {getattr(packing, name):g}")


if __name__ == "__main__":
    main()
