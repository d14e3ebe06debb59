"""One point of a curve of ``scaling.py``: an arm on records of one size, in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from bench_communication import CollectiveCounter
from bench_forests import Shape, make_forests, prepared
from bench_training import SEED, Stopwatch, count_batches, peak_mib
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from stepjepa.config import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.forests.preparation import prepare
from stepjepa.models.presets import find_preset, make_config, train_tokenizer
from stepjepa.text.predictors import add_predictor_tokens
from stepjepa.training.trainer import JepaTrainer

# Rows to spare for predictor tokens.
SPARE = 64
RECORDS = 64
# The step whose collectives are counted: after the second, in which DDP settles the order of its buckets.
COUNTED = 3


def measure_point(task: dict[str, Any]) -> dict[str, Any]:
    """Train on records of one size until the time is up.

    Args:
        task: ``jepa`` (fields of ``JepaConfig``), ``preset``, ``length``, ``steps``, ``vocabulary``, ``batch_size``,
            ``processes``, ``device``, ``seconds`` and ``folder``.

    Returns:
        ``seconds_per_record``, ``tokens_per_second``, ``steps`` and ``peak_mib``; the memory is that of one process.
        With several processes also ``communication`` (``CollectiveCounter.found`` of one step) and ``trained_bytes``,
        the size of what is trained.
    """
    config = JepaConfig(**task["jepa"], max_length=max(task["length"], 2))
    model, tokenizer = make_model(task)
    cpu = task["device"] == "cpu"
    sizes = Shape(task["length"], task["steps"], task["vocabulary"])
    count = max(RECORDS, task["batch_size"] * task["processes"])
    trainer = JepaTrainer(
        model,
        TrainingArguments(
            str(Path(task["folder"]) / "out"),
            num_train_epochs=100_000,
            per_device_train_batch_size=task["batch_size"],
            lr_scheduler_type="constant",
            use_cpu=cpu,
            ddp_backend="gloo" if cpu and task["processes"] > 1 else None,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        config,
        train_dataset=prepared(make_forests(config, sizes, count, SEED)),
        processing_class=tokenizer,
    )
    stopwatch = _AgreedStopwatch(warmup=COUNTED, seconds=task["seconds"])
    trainer.add_callback(stopwatch)
    count_batches(trainer, stopwatch)
    trainer.train()
    measured = stopwatch.measured()
    processes = trainer.args.world_size
    found = {
        "communication": stopwatch.counter.found,
        "trained_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }
    return {
        "seconds_per_record": measured["seconds"] / (measured["examples"] * processes),
        "tokens_per_second": measured["tokens"] * processes / measured["seconds"],
        "peak_mib": peak(trainer.args.device),
        "steps": measured["steps"],
        **(found if processes > 1 else {}),
    }


def make_model(task: dict[str, Any]) -> tuple[Any, Any]:
    """A model with random weights, the same on every process, and a tokenizer for it."""
    tokenizer = _tokenizer()
    shape = make_config(find_preset(task["preset"]), tokenizer, positions=2 * task["length"]).to_dict()
    shape |= {"vocab_size": task["vocabulary"] + SPARE}
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)), tokenizer


def peak(device: torch.device) -> float:
    """Peak memory of this process on its device, in MiB."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else peak_mib()


class _AgreedStopwatch(Stopwatch):
    """A stopwatch on which all processes agree: the first one whose time is up stops them all.

    Attributes:
        counter: of the collectives of one step, counts of the next batch included, those of the stopwatch not.
    """

    def __init__(self, warmup: int, seconds: float) -> None:
        super().__init__(warmup, seconds)
        self.counter = CollectiveCounter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As in Stopwatch; then ask the others."""
        if args.world_size > 1 and state.global_step == COUNTED:
            self.counter.__exit__(None, None, None)
        super().on_step_end(args, state, control, **kwargs)
        if args.world_size > 1:
            stop = torch.tensor([float(control.should_training_stop)], device=args.device)
            torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX)
            control.should_training_stop = bool(stop.item() > 0) and state.global_step > COUNTED
            if state.global_step == COUNTED - 1:
                self.counter.__enter__()


def _tokenizer() -> Any:
    tokenizer = train_tokenizer(["one two three"], 300)
    add_predictor_tokens(tokenizer, 4)
    return tokenizer


def prepare_point(task: dict[str, Any]) -> dict[str, Any]:
    """Build the forests of a data set of one size.

    Args:
        task: ``jepa``, ``records``, ``suite``.

    Returns:
        ``seconds_per_record``, ``tokens_per_second`` and ``peak_mib``.
    """
    from bench_data import made_up

    config = JepaConfig(**task["jepa"], step_separator="line", max_length=4096)
    records = [parse_record(value) for value in made_up(task["suite"], task["records"], SEED)]
    texts = [message["content"] for record in records[:500] for message in record.messages]
    tokenizer = train_tokenizer(texts, 1024)
    add_predictor_tokens(tokenizer, 4)
    began = time.perf_counter()
    found = prepare(records, tokenizer, config)
    seconds = time.perf_counter() - began
    return {
        "seconds_per_record": seconds / len(records),
        "tokens_per_second": found.tokens["all"] / seconds,
        "peak_mib": peak_mib(),
    }
