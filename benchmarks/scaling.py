"""How time and memory grow: with row length, batch, vocabulary, steps of a record, size of the data, and processes.

    python benchmarks/scaling.py                                                    # all curves, on a CPU
    python benchmarks/scaling.py --curve strong weak --device cuda --strong 1 2 4 8 --weak 1 2 4 8 --length 2048

Strong scaling splits one batch over the processes, weak scaling gives every process one; both run DDP (the trainer) and
FSDP2, over gloo on a CPU and over NCCL on GPUs, and count what is sent in a step. On a CPU every process has as many
threads, whatever their number. Every point is measured in processes of its own. Progress goes to standard error, all
figures to ``benchmarks/results/``; ``benchmarks/report.py`` writes them into ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

from bench_process import HERE, Children, Progress
from bench_table import free_name

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions

MODULES = ("bench_points",)
ARMS: dict[str, dict[str, Any]] = {
    "regular": {"mode": "regular"},
    "llm-jepa branched": {"mode": "llm-jepa", "layout": "branched"},
    "llm-jepa separate": {"mode": "llm-jepa", "layout": "separate"},
    "step-jepa first": {"mode": "step-jepa"},
    "step-jepa all": {"mode": "step-jepa", "pairs": "all"},
}
# Field of the task, sizes, and how the axis is called.
CURVES: dict[str, tuple[str, list[int], str]] = {
    "lengths": ("length", [128, 256, 512, 1024, 2048, 4096], "tokens of a row"),
    "batches": ("batch_size", [1, 4, 16], "records of a batch"),
    "vocabularies": ("vocabulary", [1000, 8000, 64000], "vocabulary"),
    "step_counts": ("steps", [2, 8, 32], "steps of a record"),
    "data_sizes": ("records", [1000, 4000], "records prepared"),
    "strong": ("processes", [1, 2], "processes, strong scaling"),
    "weak": ("processes", [1, 2], "processes, weak scaling"),
}
PARALLEL = ("strong", "weak")
INFONCE = {"mode": "llm-jepa", "layout": "branched", "jepa_loss_type": "infonce"}
# What is trained by several processes, and how its weights are held.
PARALLEL_ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "regular, ddp": ({"mode": "regular"}, "ddp"),
    "llm-jepa branched, ddp": ({"mode": "llm-jepa", "layout": "branched"}, "ddp"),
    "llm-jepa branched infonce, ddp": (INFONCE, "ddp"),
    "llm-jepa branched infonce, fsdp2": (INFONCE, "fsdp2"),
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--curve", nargs="+", choices=list(CURVES), default=list(CURVES), help="what to measure (default: all)")
    for name, (_, sizes, what) in CURVES.items():
        add(f"--{name}", nargs="+", type=int, default=sizes, help=f"{what} (default: {' '.join(map(str, sizes))})")
    add(
        "--arm",
        nargs="+",
        choices=list(ARMS),
        default=list(ARMS),
        help="what is trained (default: all); not for processes",
    )
    add("--preset", default="preset:tiny", help="shape of the model (default: %(default)s)")
    add("--length", type=int, default=256, help="tokens of a row where that is not the curve (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="records of a process's batch, likewise (default: %(default)s)")
    add("--vocabulary", type=int, default=1000, help="likewise (default: %(default)s)")
    add("--steps", type=int, default=4, help="steps of a record, likewise (default: %(default)s)")
    add("--seconds", type=float, default=1.0, help="how long a point is measured (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of all processes of a point (default: all cores)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-MACHINE-scaling.json)")
    return options


def measure_curve(
    name: str, args: argparse.Namespace, children: Children, progress: Progress, failed: list[str]
) -> dict[str, Any]:
    """All points of one curve.

    Args:
        name: key of ``CURVES``.
        args: the options.
        children: where points are measured.
        progress: told of every point.
        failed: gets what failed.

    Returns:
        ``sizes``, ``parallel`` (whether they are processes), and ``points`` by arm, one for each size; None where a
        record is too short for its steps, and where the point failed.
    """
    what = CURVES[name][2]
    sizes: list[int] = getattr(args, name)
    points: dict[str, list[dict[str, Any] | None]] = {arm: [] for arm in arms_of(name, args)}
    for size in sizes:
        for arm, curve in points.items():
            label = f"{what} {size}, {arm}"
            progress.begin(label)
            measure = _measure_processes if name in PARALLEL else _measure_one
            try:
                point = measure(name, arm, size, args, children)
                said = f"{1000 * point['seconds_per_record']:.3g} ms a record" if point else "left out"
            except UserError as error:
                # What is measured already, and what is still to be, must not be lost for one point.
                point, said = None, f"failed: {error}"
                failed.append(label)
            curve.append(point)
            progress.end(f"{label}: {said}")
    return {"sizes": sizes, "parallel": name in PARALLEL, "points": points}


def arms_of(name: str, args: argparse.Namespace) -> list[str]:
    """The arms of a curve."""
    return list(PARALLEL_ARMS) if name in PARALLEL else list(args.arm)


def _task(args: argparse.Namespace) -> dict[str, Any]:
    names = ("length", "batch_size", "vocabulary", "steps", "seconds", "preset", "device")
    return {name: getattr(args, name) for name in names} | {"processes": 1}


def _measure_one(name: str, arm: str, size: int, args: argparse.Namespace, children: Children) -> dict[str, Any] | None:
    field = CURVES[name][0]
    task = {**_task(args), field: size, "jepa": ARMS[arm]}
    if field == "records":
        return children.run({**task, "run": "bench_points:prepare_point", "suite": "gsm8k"}, MODULES)
    if task["length"] < 4 * task["steps"]:
        return None
    task["run"] = "bench_points:measure_point"
    # A GPU's driver does not survive a fork.
    return children.run(task, MODULES) if args.device == "cpu" else children.run_alone(task)


def _measure_processes(name: str, arm: str, size: int, args: argparse.Namespace, children: Children) -> dict[str, Any]:
    most = max(getattr(args, name))
    jepa, held = PARALLEL_ARMS[arm]
    task = {**_task(args), "processes": size, "jepa": jepa}
    task["run"] = "bench_sharded:measure_sharded" if held == "fsdp2" else "bench_points:measure_point"
    if name == "strong":
        task["batch_size"] = args.batch_size * most // size
    return children.run_parallel(task, size, max(args.threads // most, 1))


def scale(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """Measure all curves and write them.

    Returns:
        The results file, and the points that failed.

    Raises:
        UserError: numbers of processes do not divide the largest.
    """
    for name in PARALLEL:
        most = max(getattr(args, name))
        for size in getattr(args, name):
            if most % size:
                raise UserError(f"--{name}: expected numbers that divide the largest, {most}, got {size}")
    failed: list[str] = []
    progress = Progress(sum(len(getattr(args, name)) * len(arms_of(name, args)) for name in args.curve))
    curves: dict[str, Any] = {}
    with Children(args.threads) as children:
        for name in args.curve:
            curves[CURVES[name][2]] = measure_curve(name, args, children, progress, failed)
    machine = f"cpu-{args.threads}" if args.device == "cpu" else args.device
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-scaling.json")
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "curve", *CURVES)}
    head = {"date": date.today().isoformat(), "machine": machine, "settings": settings, "versions": versions()}
    write_json(path, {**head, "curves": curves})
    return path, failed


def main() -> int:
    """Measure; an error that the user can put right takes one line."""
    try:
        path, failed = scale(parser().parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"results: {os.path.relpath(path)}")
    if failed:
        print(f"error: {len(failed)} points failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
