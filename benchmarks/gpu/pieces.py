"""Time of single pieces of a step: attention, LM head, monitors, collation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepjepa.batch.mask import Trees, VarlenSegments, static_length
from stepjepa.batch.pack import pack_passes
from stepjepa.batch.segments import varlen_segments
from stepjepa.models import attention, segment_attention, varlen_attention
from stepjepa.models.cross_entropy import states_at_once, summed_cross_entropy
from stepjepa.objectives.monitors import MetricWindow
from stepjepa.objectives.packing import make_collator
from stepjepa.objectives.setup import set_up
from stepjepa.views.sequences import TokenSequence

from .result import Result, free, peak_memory, rounded, short, timed, wait
from .world import World, build, jepa_config, make_records


def part_micro(world: World, result: Result) -> None:
    """Time single pieces of a step."""
    with result.trying("attention"):
        attention_pieces(world, result)
    with result.trying("lm head", needs=8) as go:
        if go:
            head_pieces(world, result)
    with result.trying("ranks", needs=3) as go:
        if go:
            measured = {}
            for width in world.sizes((896, 2048, 4096), (64,)):
                window = MetricWindow()
                window.add_pairs(*torch.randn(2, world.sizes(256, 32), width, device=world.device))
                measured[width] = timed(window.geometry, seconds=0.2)
            result.put("ms of the monitors of a log line, by width", measured)
    with result.trying("collation", needs=5) as go:
        if go:
            collation(world, result)


@dataclass
class Packed:
    """One row of trees, as all that attention needs."""

    width: int
    trees: Trees
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def run(self, call: Callable[[], torch.Tensor]) -> Callable[[], None]:
        """Forward and backward pass."""

        def both() -> None:
            call().sum().backward()
            self.query.grad = self.key.grad = self.value.grad = None

        return both


def packed(world: World, tokens: int, record: int) -> Packed:
    """Records of ``record`` tokens in a row of ``tokens``: three sequences share the first half of each."""
    heads, groups, size = world.sizes((32, 8, 64), (4, 2, 16))
    dtype, rng, piece = torch.bfloat16 if world.cuda else torch.float32, np.random.default_rng(0), record // 4

    def ids(count: int) -> Any:
        return rng.integers(5, 900, count).astype(np.int32)

    prompts = [ids(2 * piece) for _ in range(max(tokens // (5 * piece), 1))]
    sequences = [TokenSequence(np.r_[prompt, ids(piece)]) for prompt in prompts for _ in range(3)]
    rows = pack_passes(sequences, row_length=10**6, kernel="varlen", one_pass=True)[0]
    assert rows.segments is not None
    start, end, positions = (torch.from_numpy(each).to(world.device) for each in (rows.start, rows.end, rows.positions))
    trees = Trees(start, end, positions, False, varlen_segments(rows.segments).to(torch.device(world.device)))
    width = rows.ids.shape[1]

    def states(number: int) -> torch.Tensor:
        return torch.randn(1, number, width, size, device=world.device, dtype=dtype, requires_grad=True)

    return Packed(width, trees, states(heads), states(groups), states(groups))


def attention_pieces(world: World, result: Result) -> None:
    """Attention of one row of trees, forward and backward: segments, FlexAttention, a dense mask, and causal."""
    layer, points = (
        torch.nn.Identity(),
        world.sizes(((2048, 512), (8192, 512), (16384, 512), (8192, 2048), (16384, 4096)), ((256, 64),)),
    )
    for tokens, record in points:
        row = packed(world, tokens, record)
        query, key, value = row.query, row.key, row.value
        assert isinstance(row.trees.segments, VarlenSegments)
        index = row.trees.segments.key_index
        assert index is not None
        measured: dict[str, Any] = {"width": row.width, "keys gathered": len(index)}

        def measure(
            name: str, call: Callable[[], torch.Tensor], row: Packed = row, measured: dict[str, Any] = measured
        ) -> None:
            try:
                free()
                start = time.perf_counter()
                row.run(call)()
                wait()
                first = (time.perf_counter() - start) * 1e3
                peak_memory(reset=True)
                before = torch.cuda.memory_allocated() / 2**30 if world.cuda else 0.0
                ms = timed(row.run(call), seconds=0.1)
                start = time.perf_counter()
                row.run(call)()
                host = (time.perf_counter() - start) * 1e3
                wait()
                peak = (peak_memory() or 0.0) - before
                measured[name] = {
                    "ms": ms,
                    "host ms": rounded(host, 3),
                    "first ms": rounded(first, 3),
                    "peak GiB": rounded(peak, 3),
                }
            except Exception as error:  # of any kind, so that the others still run
                measured[name] = {"error": f"{type(error).__name__}: {error}"[:300]}

        mask = varlen_attention.VarlenMask(row.trees.position_ids[0], row.trees.segments, None)
        measure("segments", lambda: varlen_attention.varlen_forward(layer, query, key, value, mask)[0])
        rows = torch.cat([segment_attention._rows(key), segment_attention._rows(value)], 1).detach().requires_grad_()
        measure("its gather alone", lambda: segment_attention.gather(rows, index))
        measure("its gather, index_select", lambda: rows.index_select(0, index))
        if row.width <= 8192:
            additive = attention._fused(row.trees, None, query.dtype)
            times = query.shape[1] // key.shape[1]

            def under_mask() -> torch.Tensor:
                # As training does: with grouped heads torch would take the math kernel under a mask.
                keys, values = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
                return F.scaled_dot_product_attention(query, keys, values, attn_mask=additive)

            measure("dense mask", under_mask)
        if world.cuda:
            block = attention.block_mask(row.trees)
            measure("flex", lambda: attention.flex_forward(layer, query, key, value, block)[0])
        measure(
            "causal, no mask",
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        )
        result.put(f"attention, {tokens} tokens of records of {record}", measured)
        if result.left() < 25 and world.cuda:
            break


def head_pieces(world: World, result: Result) -> None:
    """Time the LM head with cross-entropy by chunk size, and without chunks."""
    measured: dict[str, Any] = {}
    shapes = world.sizes({"0.5B": (151936, 896), "1B": (128256, 2048), "8B": (128256, 4096)}, {"toy": (997, 32)})
    for name, (vocabulary, width) in shapes.items():
        count = world.sizes(8192, 128)
        weight = torch.randn(vocabulary, width, device=world.device).mul_(0.02).requires_grad_()
        states = torch.randn(count, width, device=world.device, requires_grad=True)
        labels = torch.randint(0, vocabulary, (count,), device=world.device)
        rows = torch.arange(count, device=world.device)

        def run(chunk: int | None) -> Any:
            def call() -> None:
                with torch.autocast(world.device, torch.bfloat16, enabled=world.cuda):
                    loss = summed_cross_entropy(states, (weight, None), labels, rows, chunk)
                loss.backward()
                weight.grad = states.grad = None

            return call

        def plain() -> None:
            with torch.autocast(world.device, torch.bfloat16, enabled=world.cuda):
                logits = F.linear(states, weight)
            F.cross_entropy(logits.float(), labels, reduction="sum").backward()
            weight.grad = states.grad = None

        own: dict[str, Any] = {"default chunk": states_at_once(vocabulary, width, on_gpu=world.cuda)}
        chunks = world.sizes((None, 512, 1024, 2048, 4096, count), (None, 16, count))
        for label, call in [*((f"chunk {chunk}", run(chunk)) for chunk in chunks), ("plain", plain)]:
            try:
                free()
                peak_memory(reset=True)
                ms = timed(call, seconds=0.15)
                own[label] = {"ms": ms, "peak GiB": peak_memory()}
            except Exception as error:
                own[label] = {"error": str(error)[:150]}
        flops = 3 * 2 * count * vocabulary * width
        own["ms at 700 TFLOP/s"] = rounded(flops / 700e12 * 1e3)
        measured[name] = own
        result.put(f"lm head of {count} states", measured, say=False)
        print("   lm head", name, short(own), flush=True)


def collation(world: World, result: Result) -> None:
    """Time that the host takes to make a micro-batch, and the number of shapes in an epoch."""
    measured: dict[str, Any] = {}
    model = build("toy", world.tokenizer, "cpu")
    for length in world.sizes((512, 2048), (60,)):
        records = make_records(world.sizes(128, 16), length)
        for name, arm in (("regular", {"mode": "regular"}), ("branched", {"mode": "llm-jepa", "layout": "branched"})):
            for kind, autocast in (("mask", None), ("varlen", torch.bfloat16)):
                config = jepa_config(arm)
                prepared = world.prepared(records, config)
                encoding, _ = set_up(model, world.tokenizer, config)
                kinds: dict[str, Any] = {
                    "encoding": encoding,
                    "device_type": "cuda",
                    "processes": 1,
                    "prompt_labels": False,
                    "autocast": autocast,
                }
                collator = make_collator(model, world.tokenizer, config, **kinds)
                shapes: Counter[tuple[int, int]] = Counter()
                cells = tokens = 0
                size, start = world.sizes(16, 4), time.perf_counter()
                parts = [range(at, at + size) for at in range(0, len(records), size)]
                for part in parts:
                    batch = collator(prepared.dataset[index] for index in part)
                    rows, width = batch.input_ids.shape
                    shapes[rows, static_length(width)] += 1
                    cells, tokens = cells + rows * width, tokens + batch.num_tokens
                measured[f"{length} {name}, {kind}"] = {
                    "ms": rounded((time.perf_counter() - start) / len(parts) * 1e3), "shapes": len(shapes),
                    "filled": rounded(tokens / cells, 3), "last": [rows, width],
                }  # fmt: skip
    result.put("collation of 16 records", measured)
