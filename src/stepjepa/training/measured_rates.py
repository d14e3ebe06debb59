"""Measure how fast this machine is: single operations, then short trainings of a small model that say how far real
steps fall behind them."""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from stepjepa.compute.memory import Sharding, account
from stepjepa.compute.process_memory import ProcessMemory
from stepjepa.compute.rates import Rates
from stepjepa.compute.work import Work, WorkCounter
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, as_records
from stepjepa.models.loading import load_model
from stepjepa.tasks.stepmath import Difficulty, generate_split
from stepjepa.training.activations import activations_of
from stepjepa.training.trainer import JepaTrainer

PRESET = "preset:small"
BATCHES = (2, 12)
"""Records of a step in the two short trainings: a line through both tells what a step costs beside its passes."""

STEPS, WARMUP = 7, 2
SECONDS = 0.4


class StepClock(TrainerCallback):
    """Seconds of each optimizer step.

    Args:
        clock: ``cpu`` or ``wall``.
        device: waited for before time is read.

    Attributes:
        seconds: of each step but the first, which has no step before it.
    """

    def __init__(self, clock: str, device: torch.device) -> None:
        self._now = now_of(clock, device)
        self._ends: list[float] = []

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first."""
        return [after - before for before, after in pairwise(self._ends)]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the time."""
        self._ends.append(self._now())


def now_of(clock: str, device: torch.device) -> Callable[[], float]:
    """The time in seconds, once the device has nothing left to do.

    Args:
        clock: ``cpu``: seconds that this process was served, so that others on the machine count less; ``wall``.
        device: to be waited for.
    """
    read = time.process_time if clock == "cpu" else time.perf_counter

    def now() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return read()

    return now


def measure(dtype: str = "float32", *, clock: str | None = None) -> Rates:
    """Measure the accelerator that is here, or the CPU with the threads that torch has.

    Args:
        dtype: of products and of the small model, see ``config.DTYPES``; ``auto`` is float32.
        clock: see :func:`now_of`; None takes ``cpu`` for one thread of a CPU, else ``wall``.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    threads = torch.get_num_threads()
    if clock is None:
        clock = "cpu" if device.type == "cpu" and threads == 1 else "wall"
    now = now_of(clock, device)
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    rates = Rates(
        device=name,
        dtype=str(kind).removeprefix("torch."),
        threads=threads,
        products=_products(device, kind, now),
        attention=_attention(device, kind, now),
        moved=_moved(device, kind, now),
        call=_call(device, now),
        overlaps=device.type != "cpu",
        clock=clock,
    )
    # What libraries load and keep at the first steps is no part of any run.
    short_training(BATCHES[0], dtype, clock, device, steps=2 * WARMUP)
    return calibrate(rates, [short_training(batch, dtype, clock, device) for batch in BATCHES])


# -- single operations -------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], Any], now: Callable[[], float]) -> float:
    """Of one call: the median of several handfuls."""
    run()
    start = now()
    run()
    handful = max(1, int(SECONDS / 5 / max(now() - start, 1e-7)))
    found = []
    for _ in range(5):
        start = now()
        for _ in range(handful):
            run()
        found.append((now() - start) / handful)
    return max(statistics.median(found), 1e-9)


def _products(device: torch.device, dtype: torch.dtype, now: Callable[[], float]) -> float:
    size = 512 if device.type == "cpu" else 8192
    first, second = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: first @ second, now)


def _attention(device: torch.device, dtype: torch.dtype, now: Callable[[], float]) -> float:
    rows, heads, length, width = (2, 4, 256, 64) if device.type == "cpu" else (2, 32, 4096, 128)
    values = torch.randn(rows, heads, length, width, device=device).to(dtype)
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=device).tril().to(dtype)
    run = torch.nn.functional.scaled_dot_product_attention
    return 4 * rows * heads * length**2 * width / _seconds(lambda: run(values, values, values, attn_mask=mask), now)


def _moved(device: torch.device, dtype: torch.dtype, now: Callable[[], float]) -> float:
    # As large as the tensors of a small model's pass on a CPU, so that caches help as much as they do there.
    values = torch.randn(2**19 if device.type == "cpu" else 2**28, device=device).to(dtype)
    other = values.clone()
    return 3 * values.nbytes / _seconds(lambda: values + other, now)


def _call(device: torch.device, now: Callable[[], float]) -> float:
    value = torch.ones(1, device=device, requires_grad=True)

    def run() -> None:
        found = value
        for _ in range(50):
            found = found * value
        found.backward()

    # With what autograd adds to an operation, as in training.
    with WorkCounter() as counter:
        run()
    return _seconds(run, now) / counter.work.calls


# -- short trainings ---------------------------------------------------------------------------------------------------


def training_records(count: int, seed: int = 0) -> list[Record]:
    """Generated word problems with steps."""
    (records, _) = generate_split(count, 1, seed, Difficulty())
    return list(as_records(records))


@dataclass(frozen=True)
class Training:
    """A short training as it was foretold and as it was measured.

    Attributes:
        work: of the passes of a step, mean.
        optimizer: bytes of trained weights and of optimizer states.
        seconds: of a step, median.
        told: bytes of tensors at the peak, the weights not counted.
        held: bytes that the process held for them; None if the machine does not tell.
    """

    work: Work
    optimizer: tuple[int, int]
    seconds: float
    told: int
    held: int | None


def short_training(batch: int, dtype: str, clock: str, device: torch.device, *, steps: int = STEPS) -> Training:
    """Train a small model without views for some steps.

    Args:
        batch: records of a step.
        dtype: of the weights.
        clock: see :func:`now_of`.
        device: that Trainer will take.
        steps: how many.
    """
    records = training_records(batch * steps)
    config = JepaConfig(mode="regular", max_length=2048)
    model, tokenizer = load_model(PRESET, texts=(m["content"] for r in records for m in r.messages), dtype=dtype)
    clocked = StepClock(clock, device)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = JepaTrainer(
            model, args, config, train_dataset=records, processing_class=tokenizer, callbacks=[clocked]
        )
        batches = list(trainer.get_train_dataloader())
        memory = ProcessMemory(device)
        trainer.train()
        held = memory.peak()
    found = [activations_of(model, one, trainer.objective, Sharding(), None) for one in batches]
    seen = [one for one in found if one is not None]
    mean = Work(*(statistics.mean(getattr(one.work, name) for one in seen) for name in vars(Work())))
    sizes = {part.name: part.bytes for part in account(model, optim=str(args.optim.value))}
    gradients, states = sizes["gradients"], sizes["optimizer states"]
    told = states + max(gradients, *(one.with_gradients for one in seen))
    return Training(mean, (gradients, states), statistics.median(clocked.seconds[WARMUP - 1 :]), told, held)


def calibrate(rates: Rates, trainings: Sequence[Training]) -> Rates:
    """Fit what real trainings take beyond single operations, and their process beyond tensors.

    Args:
        rates: of single operations.
        trainings: two of :func:`short_training`, the smaller one first.
    """
    values: dict[str, Any] = {**vars(rates), "factor": 1.0, "step": 0.0}
    plain = Rates(**values)
    told = [plain.ideal_seconds(one.work) + plain.optimizer_seconds(*one.optimizer) for one in trainings]
    factor, step = _line(told, [one.seconds for one in trainings])
    values |= {"factor": factor, "step": step}
    held = [one.held for one in trainings if one.held is not None]
    if len(held) == len(trainings):
        each, beside = _line([one.told for one in trainings], held)
        values |= {"held": each, "held_beside": beside}
    return Rates(**values)


def _line(told: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Slope and height of the line through two points."""
    slope = (measured[1] - measured[0]) / (told[1] - told[0])
    height = measured[0] - slope * told[0]
    if slope <= 0 or height < 0:
        # Noise: what is there always can't be told apart from what grows.
        return measured[1] / told[1], 0.0
    return slope, height
