"""One point of ``scaling.py`` with sharded weights (FSDP2), which the Trainer can't do on a CPU: a loop of its own."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from bench_communication import CollectiveCounter
from bench_forests import Shape, make_forests
from bench_points import make_model, peak
from bench_training import SEED
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from stepjepa.config import JepaConfig
from stepjepa.forests.collate import ForestCollator
from stepjepa.models.architecture import find_decoder
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import forward
from stepjepa.objectives.gathering import gather_rows
from stepjepa.objectives.objective import Objective

WARMUP, FEWEST = 2, 2
LEARNING_RATE = 1e-3


def measure_sharded(task: dict[str, Any]) -> dict[str, Any]:
    """Train on one batch until the time is up, every process with its own records.

    Args:
        task: as of ``bench_points.measure_point``.

    Returns:
        As of ``bench_points.measure_point``.
    """
    device = torch.device(task["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    try:
        return _measure(task, device)
    finally:
        dist.destroy_process_group()


def _measure(task: dict[str, Any], device: torch.device) -> dict[str, Any]:
    world, rank, size = dist.get_world_size(), dist.get_rank(), task["batch_size"]
    config = JepaConfig(**task["jepa"], max_length=max(task["length"], 2))
    model, _ = make_model(task)
    model.to(device).train()
    if config.uses_views:
        enable_forest(model)
    if world > 1:
        for block in find_decoder(model).layers:
            fully_shard(block)
        fully_shard(model)
    forests = make_forests(config, Shape(task["length"], task["steps"], task["vocabulary"]), size * world, SEED)
    batch = ForestCollator(0)(forests[rank * size : (rank + 1) * size])
    batch = {key: value.to(device) for key, value in batch.items()}
    objective = Objective.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        counts = _counts(batch)
        outputs = forward(model, batch)
        sums = objective.sums(outputs, gather=gather_rows)
        (objective.parts(sums, counts)["loss"] * world).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP):
        step()
    with CollectiveCounter() as counter:
        step()
    began, steps = _now(device), 0
    goes_on = True
    while goes_on:
        step()
        steps += 1
        late = torch.tensor(float(steps >= FEWEST and _now(device) - began >= task["seconds"]), device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        goes_on = not late.item()
    seconds = _now(device) - began
    return {
        "seconds_per_record": seconds / (steps * size * world),
        "tokens_per_second": steps * sum(map(len, forests)) / seconds,
        "peak_mib": peak(device),
        "steps": steps,
        "communication": counter.found,
        "trained_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }


def _counts(batch: dict[str, Tensor]) -> Tensor:
    """Labels, pairs and triples of all processes."""
    mine = [len(batch[key]) for key in ("label_ids", "source_index", "triple_index")]
    counts = torch.tensor(mine, dtype=torch.float64, device=batch["label_ids"].device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts)
    return counts


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
