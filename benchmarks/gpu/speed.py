"""Examples per second of each arm, and the ratio to TRL."""

from __future__ import annotations

import statistics
import time
from typing import Any

from .result import Result, peak_flops, quiet, rounded
from .trainers import arguments, make_stopwatch, make_trainer
from .world import World, build, jepa_config, make_records, non_embedding

BRANCHED, SEPARATE = ({"mode": "llm-jepa", "layout": layout} for layout in ("branched", "separate"))
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "regular, rows": ({"mode": "regular", "encoding": "rows"}, "sdpa"),
    "regular, mask": ({"mode": "regular"}, "tree_sdpa"),
    "regular, varlen": ({"mode": "regular"}, "tree_varlen"),
    "branched, mask": (BRANCHED, "tree_sdpa"),
    "branched, varlen": (BRANCHED, "tree_varlen"),
    "branched, flex": (BRANCHED | {"row_length": 10**6}, "flex_attention"),
    "branched, rows": (BRANCHED | {"encoding": "rows"}, "sdpa"),
    "separate, mask": (SEPARATE, "tree_sdpa"),
    "separate, varlen": (SEPARATE, "tree_varlen"),
    "separate, rows": (SEPARATE | {"encoding": "rows"}, "sdpa"),
    "step, varlen": ({"mode": "step-jepa", "layout": "branched"}, "tree_varlen"),
}
TRL: dict[str, dict[str, Any]] = {
    "trl grouped": {"train_sampling_strategy": "group_by_length"},
    "trl packed": {"packing": True},
}
# The arms that answer the question come first, at every point; a time limit cuts off the others.
FIRST = ["trl grouped", "regular, varlen", "branched, varlen", "separate, varlen"]
SHORT = ["regular, rows", "branched, mask", "step, varlen", "trl packed", "regular, mask", "separate, mask",
         "branched, flex", "branched, rows"]  # fmt: skip
LONG = ["branched, mask", "branched, flex", "trl packed", "separate, rows"]


def part_speed(world: World, result: Result) -> None:
    """Examples a second of each arm, and the ratio to TRL. All arms train the same records with the same optimizer."""
    points: list[tuple[Any, ...]] = world.sizes(
        # shape, tokens of a record, words more in the system prompt that all records share, records of a step
        [("0.5B", 512, 0, 16), ("0.5B", 300, 1700, 8), ("1B", 2048, 0, 4), ("0.5B", 4096, 0, 4), ("1B", 512, 0, 16),
         ("0.5B", 2048, 0, 8)],
        [("toy", 60, 0, 4), ("toy", 60, 90, 4)],
    )  # fmt: skip
    later = world.sizes([SHORT, [], LONG], [["branched, mask", "trl packed"]])
    steps = world.sizes(14, 6)
    plan = [(point, FIRST) for point in points] + list(zip(points, later, strict=False))
    tables: dict[str, dict[str, Any]] = {}
    for (shape, length, prefix, batch), arms in plan:
        records = make_records(batch * world.sizes(8, 3), length, seed=5, prefix=prefix)
        point = f"{shape}, {length} tokens" + (f" behind {prefix} shared words" if prefix else "")
        table = tables.setdefault(point, {})
        for name in arms:
            label = f"{point}, batch {batch}: {name}"
            with result.trying(label, needs=7 if world.cuda else 0) as go:
                if not go:
                    break
                if name in TRL:
                    measured = run_trl(world, shape, records, steps, batch, dict(TRL[name]))
                else:
                    measured = run_ours(world, shape, records, steps, batch, name)
                ms = measured["median"]
                measured["examples/s"] = rounded(measured["records"] / ms * 1e3)
                if (peak := peak_flops()) and "useful" in measured:
                    measured["MFU, useful"] = rounded(measured["useful"]["flops"] / (ms / 1e3) / peak, 3)
                    if "computed TFLOP a step" in measured:
                        measured["MFU, computed"] = rounded(
                            measured["computed TFLOP a step"] * 1e12 / (ms / 1e3) / peak, 3
                        )
                table[name] = measured
                result.put(label, measured)
        best = max((table[each]["examples/s"] for each in TRL if "examples/s" in table.get(each, {})), default=None)
        if best:
            over = {name: rounded(row["examples/s"] / best, 3) for name, row in table.items() if "examples/s" in row}
            result.put(f"over TRL's best, {point}", over)


def run_ours(world: World, shape: str, records: Any, steps: int, batch: int, name: str) -> dict[str, Any]:
    """Train with ``JepaTrainer``."""
    (arm, kind), began = OURS[name], time.perf_counter()
    trainer, watch = make_trainer(world, shape, arm, records, steps=steps, batch=batch, attention=kind)
    built, start = round(time.perf_counter() - began, 1), time.perf_counter()
    with quiet():
        trainer.train()
    measured = watch.summary() | {"s": round(time.perf_counter() - start, 1), "built s": built, "records": batch}
    blocks, head = non_embedding(trainer.model)
    measured["useful"] = useful(trainer.model, blocks, head, trainer.prepared.dataset.lengths, batch)
    batches = islice_batches(trainer, 4)
    measured["computed TFLOP a step"] = rounded(
        statistics.mean(trainer.flops.of_batch(each) for each in batches) / 1e12
    )
    measured["rows"] = [tuple(each["input_ids"].shape) for each in batches[:3]]
    return measured


def islice_batches(trainer: Any, count: int) -> list[Any]:
    keys = trainer.plan.keys(0)[:count]
    return [batch for part in keys for batch in trainer.plan.micro_batches(part)]


def useful(model: Any, blocks: int, head: int, lengths: Any, batch: int) -> dict[str, float]:
    """FLOPs that plain training on the records needs: both passes, all tokens in blocks and LM head."""
    config, mean = model.config, float(lengths.mean())
    square = float((lengths.astype(float) ** 2).mean())
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    flops = batch * (6 * (blocks + head) * mean + 6 * config.num_hidden_layers * width * square)
    return {"flops": flops, "tokens a record": rounded(mean)}


def run_trl(world: World, shape: str, records: Any, steps: int, batch: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Train with TRL's SFTTrainer on the same token ids and labels, without gradient checkpointing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prepared = world.prepared(records, jepa_config({"mode": "regular"}))
    rows = []
    for index in range(len(prepared.dataset)):
        record = prepared.dataset[index].record
        ids, labels = record.ids.tolist(), [-100] * len(record.ids)
        for position in record.labels.tolist():
            labels[position + 1] = ids[position + 1]
        rows.append({"input_ids": ids, "labels": labels})
    packing, longest = extra.pop("packing", False), int(prepared.dataset.lengths.max())
    settings = arguments(world, steps=steps, batch=batch, **extra)
    row = longest
    if packing:
        # Rows have 2,048 tokens, or as many as the longest record. A step has as many tokens as in the other arms.
        row = max(world.sizes(2048, 128), longest)
        settings["per_device_train_batch_size"] = max(1, round(batch * float(prepared.dataset.lengths.mean()) / row))
    watch = make_stopwatch()
    model = build(shape, world.tokenizer, world.device)
    options = SFTConfig(**settings, max_length=row, packing=packing)
    with quiet():
        trainer = SFTTrainer(
            model, options, train_dataset=Dataset.from_list(rows), processing_class=world.tokenizer, callbacks=[watch]
        )
        start = time.perf_counter()
        trainer.train()
    measured = watch.summary() | {"s": round(time.perf_counter() - start, 1), "records": batch}
    if packing:
        packed = trainer.train_dataset
        tokens = sum(len(each) for each in packed["input_ids"]) / len(packed)
        measured["records"] = options.per_device_train_batch_size * tokens / float(prepared.dataset.lengths.mean())
        measured["packed rows"] = [len(packed), rounded(tokens)]
    blocks, head = non_embedding(model)
    measured["useful"] = useful(model, blocks, head, prepared.dataset.lengths, measured["records"])
    return measured
