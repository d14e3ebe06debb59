"""How time and memory grow: with row length, batch, vocabulary, steps of a record, size of the data, and processes.

Every point is measured in a process of its own. Progress goes to standard error, all figures to
``benchmarks/results/``; ``benchmarks/report.py`` draws them.
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
    "batches": ("batch_size", [1, 2, 4, 8, 16, 32], "records of a batch"),
    "vocabularies": ("vocabulary", [1000, 4000, 16000, 64000, 128000], "vocabulary"),
    "step_counts": ("steps", [2, 4, 8, 16, 32], "steps of a record"),
    "data_sizes": ("records", [1000, 4000, 16000], "records prepared"),
    "process_counts": ("processes", [1, 2], "processes (gloo)"),
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--curve", nargs="+", choices=list(CURVES), default=list(CURVES), help="what to measure (default: all)")
    for name, (_, sizes, what) in CURVES.items():
        add(f"--{name}", nargs="+", type=int, default=sizes, help=f"{what} (default: {' '.join(map(str, sizes))})")
    add("--arm", nargs="+", choices=list(ARMS), default=list(ARMS), help="what is trained (default: all)")
    add("--preset", default="preset:tiny", help="shape of the model (default: %(default)s)")
    add("--length", type=int, default=256, help="tokens of a row where that is not the curve (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="records of a batch, likewise (default: %(default)s)")
    add("--vocabulary", type=int, default=1000, help="likewise (default: %(default)s)")
    add("--steps", type=int, default=4, help="steps of a record, likewise (default: %(default)s)")
    add("--seconds", type=float, default=2.0, help="how long a point is measured (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of all processes of a point (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-scaling.json)")
    return options


def measure_curve(name: str, args: argparse.Namespace, children: Children, progress: Progress) -> dict[str, Any]:
    """All points of one curve.

    Args:
        name: key of ``CURVES``.
        args: the options.
        children: where points are measured.
        progress: told of every point.

    Returns:
        ``sizes``, and ``points`` by arm, one for each size; None where a record is too short for its steps.
    """
    field, _, what = CURVES[name]
    sizes: list[int] = getattr(args, name)
    points: dict[str, list[dict[str, Any] | None]] = {arm: [] for arm in args.arm}
    for size in sizes:
        for arm in args.arm:
            label = f"{what} {size}, {arm}"
            progress.begin(label)
            task = {"length": args.length, "batch_size": args.batch_size, "vocabulary": args.vocabulary}
            task |= {"steps": args.steps, "seconds": args.seconds, "preset": args.preset, "processes": 1}
            task |= {field: size, "jepa": ARMS[arm]}
            point: dict[str, Any] | None = None
            if field == "records":
                point = children.run({**task, "run": "bench_points:prepare_point", "suite": "gsm8k"}, MODULES)
            elif task["length"] >= 4 * task["steps"]:
                task["run"] = "bench_points:measure_point"
                parallel = field == "processes" and size > 1
                point = children.run_parallel(task, size) if parallel else children.run(task, MODULES)
            points[arm].append(point)
            said = f"{1000 * point['seconds_per_record']:.3g} ms a record" if point else "left out"
            progress.end(f"{label}: {said}")
    return {"sizes": sizes, "points": points}


def scale(args: argparse.Namespace) -> Path:
    """Measure all curves and write them.

    Returns:
        The results file.

    Raises:
        UserError: a point failed.
    """
    progress = Progress(sum(len(getattr(args, name)) * len(args.arm) for name in args.curve))
    curves: dict[str, Any] = {}
    with Children(args.threads) as children:
        for name in args.curve:
            curves[CURVES[name][2]] = measure_curve(name, args, children, progress)
    machine = f"cpu-{args.threads}"
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-scaling.json")
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "curve", *CURVES)}
    head = {"date": date.today().isoformat(), "machine": machine, "settings": settings, "versions": versions()}
    write_json(path, {**head, "curves": curves})
    return path


def main() -> int:
    """Measure; an error that the user can put right takes one line."""
    try:
        path = scale(parser().parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"results: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
