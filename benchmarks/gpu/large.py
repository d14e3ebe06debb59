"""Time and memory of a step with LoRA on an 8B shape, beside the dry run's estimate."""

from __future__ import annotations

import statistics
import time

import torch

from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora
from stepjepa.running.memory import activations, resident_bytes
from stepjepa.training.flops import Shape
from stepjepa.training.recomputation import Recomputation

from .result import Result, peak_flops, peak_memory, quiet, rounded
from .speed import islice_batches
from .trainers import make_trainer
from .world import World, build, make_records


def part_large(world: World, result: Result) -> None:
    """Time and memory of a step with LoRA on an 8B shape with random bfloat16 weights, beside the dry run's."""
    shape, length, steps = world.sizes(("8B", 1024, 6), ("toy", 60, 3))
    records = make_records(world.sizes(48, 12), length, seed=9)
    arms = {
        "branched, checkpointing, autocast, varlen": (
            8,
            "tree_varlen",
            {"gradient_checkpointing": True, "bf16": world.cuda},
        ),
        "branched, checkpointing, pure bf16, varlen": (
            8,
            "tree_varlen",
            {"gradient_checkpointing": True, "bf16": False},
        ),
        "branched, kept, autocast, varlen": (2, "tree_varlen", {"gradient_checkpointing": False, "bf16": world.cuda}),
        "branched, checkpointing, autocast, mask": (
            8,
            "tree_sdpa",
            {"gradient_checkpointing": True, "bf16": world.cuda},
        ),
    }
    for name, (batch, kind, more) in arms.items():
        with result.trying(name, needs=12 if world.cuda else 0) as go:
            if not go:
                continue
            records_of_a_step = min(batch, 4) if world.smoke else batch
            start = time.perf_counter()
            model = build(shape, world.tokenizer, world.device, dtype="bfloat16", attention=kind)
            model = add_lora(model, LoraSettings(), all_predictor_ids(world.tokenizer))
            arm = {"mode": "llm-jepa", "layout": "branched"}
            trainer, watch = make_trainer(
                world, shape, arm, records, steps=steps, batch=records_of_a_step, attention=kind, model=model, **more
            )
            watch.warm = 2
            built = time.perf_counter() - start
            peak_memory(reset=True)
            with quiet():
                trainer.train()
            batches = islice_batches(trainer, steps)
            tokens = max(Shape.of(each).tokens for each in batches)
            device = rounded(torch.cuda.get_device_properties(0).total_memory / 2**30) if world.cuda else None
            parts = resident_bytes(trainer.model, "adamw_torch_fused")
            recomputed = Recomputation.of(trainer.args)
            parts["activations"] = activations(trainer.model, tokens, mixed=more["bf16"], recomputed=recomputed) or 0
            measured = watch.summary() | {
                "built s": round(built, 1), "records": records_of_a_step, "most tokens": tokens,
                "dry run GiB": {key: rounded(value / 2**30, 3) for key, value in parts.items()},
                "dry run, sum": rounded(sum(parts.values()) / 2**30),
                "of the device GiB": device,
                "TFLOP a step": rounded(statistics.mean(trainer.flops.of_batch(each) for each in batches) / 1e12),
            }  # fmt: skip
            if peak := peak_flops():
                measured["MFU, computed"] = rounded(
                    measured["TFLOP a step"] * 1e12 / (measured["median"] / 1e3) / peak, 3
                )
            result.put(name, measured)
            del trainer, model
