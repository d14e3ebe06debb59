"""What a process of ``check_estimate.py`` does: measure rates, or estimate one training and then run it."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from stepjepa.arguments import jepa_config
from stepjepa.commands import estimate as command
from stepjepa.compute.process_memory import ProcessMemory
from stepjepa.compute.rates import Rates
from stepjepa.data.records import Record, read_records
from stepjepa.forests.preparation import prepare
from stepjepa.models.checkpointing import enable_selective
from stepjepa.models.loading import load_model
from stepjepa.parser import Parser
from stepjepa.training.cluster_estimate import SAMPLES, Cluster, time_of
from stepjepa.training.dry_run import foretell
from stepjepa.training.inputs import training_arguments
from stepjepa.training.measured_rates import StepClock, measure
from stepjepa.training.trainer import JepaTrainer

FEW = 4


def measure_rates(task: dict[str, Any]) -> dict[str, Any]:
    """Rates of this machine.

    Args:
        task: ``clock``.
    """
    return vars(measure(clock=task["clock"]))


def foretell_run(task: dict[str, Any]) -> dict[str, Any]:
    """The estimate of a run, its time by given rates.

    Args:
        task: ``flags`` of ``stepjepa estimate``, ``rates``.

    Returns:
        Bytes of tensors at the peak beside the weights, by part, what a process holds for them, and seconds of a step.
    """
    args, config = _arguments(task["flags"])
    records = read_records(args.train_file)
    found = foretell(
        args, config, records, [], lambda args: training_arguments(args, False), processes=1, samples=SAMPLES
    )
    timing = time_of(found, Cluster(Rates(**task["rates"]), ""))
    assert timing is not None
    assert found.activations is not None
    weights = next(part.bytes for part in found.memory if part.name == "weights")
    parts = {part.name: part.bytes for part in found.memory} | found.activations.kinds
    tensors = found.peak - weights
    held = Rates(**task["rates"]).held_bytes(tensors)
    return {"bytes": held, "tensors": tensors, "parts": parts, "seconds": timing.computing, "flops": found.flops}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Train an epoch and measure it.

    Args:
        task: ``flags`` and ``clock``.

    Returns:
        Bytes of the peak over what was there before, and seconds of a step: mean and median.
    """
    args, config = _arguments(task["flags"])
    records = read_records(args.train_file)
    _warm_up(args, config, records)
    model, tokenizer = load_model(
        args.model_name,
        texts=(message["content"] for record in records for message in record.messages),
        predictors=config.predictors or 0,
        dtype=args.dtype,
    )
    if args.selective_checkpointing:
        enable_selective(model)
    data = prepare(records, tokenizer, config)
    clock = StepClock(task["clock"], torch.device("cpu"))
    training = training_arguments(args, False)
    trainer = JepaTrainer(model, training, config, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
    memory = ProcessMemory(torch.device("cpu"))
    trainer.train()
    return {
        "bytes": memory.peak(),
        "seconds": statistics.mean(clock.seconds),
        "median_seconds": statistics.median(clock.seconds),
        "steps": len(clock.seconds) + 1,
    }


def _arguments(flags: list[str]) -> tuple[argparse.Namespace, Any]:
    parser = Parser()
    command.add_arguments(parser)
    args = command.parse(parser, flags)
    return args, jepa_config(args)


def _warm_up(args: argparse.Namespace, config: Any, records: list[Record]) -> None:
    """Train another model for two steps: what libraries load and keep then is no part of a run's tensors."""
    training = training_arguments(args, False)
    training.max_steps = 2
    model, tokenizer = load_model("preset:tiny", texts=["warm up"], predictors=config.predictors or 0)
    data = prepare(records[: 2 * FEW], tokenizer, config)
    JepaTrainer(model, training, config, train_dataset=data, processing_class=tokenizer).train()
