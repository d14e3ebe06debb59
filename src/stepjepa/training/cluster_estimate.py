"""``stepjepa estimate``: an estimate together with a cluster, printed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepjepa.compute.communication import total
from stepjepa.compute.devices import DEVICES, GIGA, TERA
from stepjepa.compute.memory import GIB
from stepjepa.compute.rates import Rates
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.training.data import read_data
from stepjepa.training.dry_run import foretell
from stepjepa.training.estimate import Estimate, Preparation
from stepjepa.training.estimate_table import as_dict, describe
from stepjepa.training.settings import training_arguments

SAMPLES = 6
"""Micro-batches that are run on shapes for their time."""


@dataclass(frozen=True)
class Cluster:
    """The devices that a run is to have.

    Attributes:
        speed: FLOP/s that a process reaches, or rates; None if neither is known.
        speed_words: where that comes from.
        is_bound: it is a peak, which no training reaches.
        memory: bytes of a device, and ``memory_words``, where that comes from; None if not known.
        link: bytes/s that a process sends, and ``link_words``; None if not known.
    """

    speed: float | Rates | None
    speed_words: str
    is_bound: bool = False
    memory: float | None = None
    memory_words: str = ""
    link: float | None = None
    link_words: str = ""

    def held(self, peak: int) -> float:
        """Bytes that a process holds for tensors of so many."""
        return self.speed.held_bytes(peak) if isinstance(self.speed, Rates) else peak


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, mean over the first epoch.

    Attributes:
        computing: of the slowest process.
        waiting: that time over the mean of all processes.
        sending: of everything that is sent, as if nothing else went on; None if not known.
    """

    computing: float
    waiting: float
    sending: float | None

    @property
    def least(self) -> float:
        """What is sent is hidden behind computing, as far as it goes."""
        return max(self.computing, self.sending or 0.0)

    @property
    def most(self) -> float:
        """Nothing is hidden."""
        return self.computing + (self.sending or 0.0)


def print_estimate(args: argparse.Namespace, config: JepaConfig) -> None:
    """Run ``stepjepa estimate``.

    Args:
        args: of ``commands.estimate``.
        config: made of them.

    Raises:
        UserError: what the run itself would raise before its first step, or the rates don't suit it.
    """
    rates = _rates(args)
    train_records, eval_records, _ = read_data(args)
    found = foretell(
        args,
        config,
        train_records,
        eval_records,
        lambda args: training_arguments(args, bool(eval_records)),
        processes=args.gpus,
        elsewhere=rates is None and (args.device is not None or args.peak_tflops is not None),
        samples=SAMPLES if rates is not None else 0,
        whole=args.records,
    )
    cluster = make_cluster(args, rates)
    timing = time_of(found, cluster)
    if args.json:
        print(json.dumps({**as_dict(found), **_cluster_dict(found, cluster, timing)}, indent=2))
    else:
        lines = ["estimate: no weights are read or made", *describe(found), *_describe(found, cluster, timing)]
        print("\n".join(lines))


def _rates(args: argparse.Namespace) -> Rates | None:
    """Rates that were measured, for the dtype that the run computes in."""
    dtype = "bfloat16" if _is_on(args, "bf16") else "float16" if _is_on(args, "fp16") else args.dtype
    if args.measure is not None:
        from stepjepa.training.measured_rates import measure

        rates = measure(dtype)
        rates.save(args.measure)
        return rates
    if args.rates is None:
        return None
    rates = Rates.load(args.rates)
    if dtype not in (rates.dtype, "auto"):
        raise UserError(
            f"--rates: measured in {rates.dtype}, and this run computes in {dtype}; measure again with its flags"
        )
    return rates


def _is_on(args: argparse.Namespace, name: str) -> bool:
    return str(args.training.get(name, False)).lower() == "true"


def make_cluster(args: argparse.Namespace, rates: Rates | None = None) -> Cluster:
    """What the flags say of the devices.

    Args:
        args: of ``commands.estimate``.
        rates: that were measured.
    """
    device = DEVICES[args.device] if args.device is not None else None
    speed: float | Rates | None = rates
    is_bound = False
    words = "not known: name --device or --peak_tflops with --mfu, --rates, or --measure"
    if rates is not None:
        words = f"measured on {rates.device}, {rates.dtype}, {rates.threads} threads"
    elif device is not None or args.peak_tflops is not None:
        given = args.peak_tflops is not None
        assert device is not None or given
        peak = args.peak_tflops * TERA if given else device.peak  # type: ignore[union-attr]  # one of both is there
        source = "given" if given else f"{device.name}, the vendor's peak in dense bfloat16"  # type: ignore[union-attr]
        share = 1.0 if args.mfu is None else args.mfu
        is_bound = args.mfu is None
        reached = "nothing reaches it: name --mfu" if is_bound else f"MFU {share:g}, an assumption"
        speed, words = peak * share, f"{peak / TERA:,.0f} TFLOP/s ({source}); {reached}"
    memory, memory_words = None, ""
    if args.memory_gib is not None:
        memory, memory_words = args.memory_gib * GIB, "given"
    elif device is not None:
        memory, memory_words = device.memory, "the vendor's"
    link, link_words = None, "not known: name --interconnect"
    if args.interconnect is not None:
        link, link_words = args.interconnect * GIGA, "given"
    elif device is not None and device.interconnect is not None:
        if args.gpus <= device.per_machine:
            link, link_words = device.interconnect, f"the vendor's peak of {device.interconnect_name}"
        else:
            link_words = f"not known between machines of {device.per_machine}: name --interconnect"
    return Cluster(speed, words, is_bound, memory, memory_words, link, link_words)


def time_of(found: Estimate, cluster: Cluster) -> Timing | None:
    """Seconds of a step; None if the speed or the FLOPs are not known."""
    if cluster.speed is None or not found.micro_flops:
        return None
    beside = 0.0
    if isinstance(cluster.speed, Rates):
        if not found.samples:
            return None
        rates = cluster.speed
        seen = sorted((sample.flops, rates.seconds(sample.activations.work)) for sample in found.samples)
        flops, seconds = zip(*seen, strict=True)
        steps = [np.interp(costs, flops, seconds) for costs in found.micro_flops]
        beside = rates.step + rates.optimizer_seconds(*found.optimizer)
    else:
        steps = [np.asarray(costs) / cluster.speed for costs in found.micro_flops]
    # Micro-batches of all processes side by side, one round after the other.
    rounds = [costs.reshape(-1, found.processes) for costs in steps]
    slowest = float(np.mean([one.max(axis=1).sum() for one in rounds]))
    mean = float(np.mean([one.mean(axis=1).sum() for one in rounds]))
    sending = None
    if found.processes == 1:
        sending = 0.0
    elif cluster.link is not None:
        sending = total(found.transfers) / cluster.link
    return Timing(slowest + beside, slowest / mean, sending)


def _describe(found: Estimate, cluster: Cluster, timing: Timing | None) -> list[str]:
    lines = [*_preparation(found.preparation), f"device     {cluster.speed_words}"]
    held = cluster.held(found.peak)
    if held > found.peak:
        lines.append(
            f"           {held / GIB:,.3f} GiB with what its allocator held beside tensors when it was measured"
        )
    if cluster.memory is not None:
        share = held / cluster.memory
        verdict = "fits" if share <= 1 else "does NOT fit"
        lines.append(
            f"           {verdict}: {held / GIB:,.1f} of {cluster.memory / GIB:,.1f} GiB "
            f"({cluster.memory_words}), {share:.0%}"
        )
    if found.processes > 1:
        sent = total(found.transfers)
        at = cluster.link_words if cluster.link is None else f"{cluster.link / GIGA:,.0f} GB/s ({cluster.link_words})"
        lines.append(f"network    {sent / GIB:,.3f} GiB sent by each process in a step; {at}")
        lines += [f"  {one.name:<22}{one.bytes / GIB:>9.3f}  {one.words}" for one in found.transfers]
    if timing is None:
        lines.append("time       not known without a speed")
        return lines
    at_least = "at least " if cluster.is_bound else ""
    step = f"{at_least}{_span(timing.computing)} computing"
    if found.processes > 1:
        step += f", {timing.waiting:.2f} of the mean, since all wait for the longest rows"
        step += ", sending not counted" if timing.sending is None else f"; {_span(timing.sending)} sending"
    lines.append(f"time       a step: {step}")
    if timing.sending:
        lines.append(f"           {_range(timing)}, sending hidden or not")
    lines += [
        f"           {what}: {at_least}{_range(timing, steps)} for {steps:,} steps"
        for what, steps in (("an epoch", found.epoch_steps), ("the run", found.steps))
    ]
    return lines


def _preparation(found: Preparation) -> list[str]:
    rate = found.records / max(found.seconds, 1e-9)
    lines = [f"prepare    {found.records:,} records, {rate:,.0f} for each second of this machine's cores"]
    if found.whole != found.records:
        lines.append(f"           all {found.whole:,}: {_span(found.whole / rate)} in one process")
    return lines


def _range(timing: Timing, times: int = 1) -> str:
    least, most = _span(timing.least * times), _span(timing.most * times)
    return least if least == most else f"{least} to {most}"


def _span(seconds: float) -> str:
    """Seconds as people say it."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def _cluster_dict(found: Estimate, cluster: Cluster, timing: Timing | None) -> dict[str, Any]:
    speed = vars(cluster.speed) if isinstance(cluster.speed, Rates) else cluster.speed
    values: dict[str, Any] = {
        "preparation": vars(found.preparation),
        "device": {
            "speed": speed,
            "speed_from": cluster.speed_words,
            "speed_is_bound": cluster.is_bound,
            "memory": cluster.memory,
            "fits": None if cluster.memory is None else cluster.held(found.peak) <= cluster.memory,
            "held": cluster.held(found.peak),
            "link": cluster.link,
            "link_from": cluster.link_words,
        },
        "seconds": None,
    }
    if timing is not None:
        values["seconds"] = {
            "step": [timing.least, timing.most],
            "computing": timing.computing,
            "sending": timing.sending,
            "waiting": timing.waiting,
            "epoch": [timing.least * found.epoch_steps, timing.most * found.epoch_steps],
            "run": [timing.least * found.steps, timing.most * found.steps],
        }
    return values
