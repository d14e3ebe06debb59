"""Tokens per second, MFU and memory on a GPU, in bfloat16, with the shapes of Llama-3.2-1B and Qwen2.5-1.5B.

    python benchmarks/gpu.py            # everything, on one GPU
    python benchmarks/gpu.py --quick    # the smaller model, three lengths
    python benchmarks/gpu.py --tiny     # toy sizes on a CPU, where FlexAttention runs its forward pass alone

Forests are first compared with separate rows on the device, forward and gradient, in single and half precision; nothing
is measured where they differ. Weights are random. Every model and length has a process of its own; all figures so far
are written after each of them, so that nothing is lost where time runs out. MFU is what was run (padding and views
included, recomputation under checkpointing not, attention counted as without a mask) over a bfloat16 matrix product
measured first. ``benchmarks/report.py`` writes the results into ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from bench_gpu_table import markdown
from bench_process import HERE, Children, Progress
from bench_table import free_name

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions

MODELS = ("llama-3.2-1b", "qwen2.5-1.5b")
LENGTHS = (2048, 512, 8192, 1024, 4096, 16384)
QUICK = {"models": ["llama-3.2-1b"], "checkpointing": ["off"], "lengths": [4096, 1024, 512], "seconds": 1.5}
TINY = {"device": "cpu", "models": ["llama-3.2-1b"], "lengths": [200], "seconds": 0.05, "tokens": 400, "steps": 4}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="shapes (default: both)")
    add("--training", nargs="+", choices=("full", "lora"), default=["full", "lora"], help="(default: both)")
    kinds = ("on", "off", "selective")
    add("--checkpointing", nargs="+", choices=kinds, default=["on", "off"], help="of the blocks (default: on off)")
    add("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens of a record, in this order")
    add("--arm", nargs="+", help="only arms whose names contain one of these (default: all)")
    add("--tokens", type=int, default=16384, help="tokens of the main texts of a batch (default: %(default)s)")
    add("--steps", type=int, default=8, help="steps of a record's answer (default: %(default)s)")
    add("--seconds", type=float, default=3.0, help="how long an arm is measured (default: %(default)s)")
    add("--minutes", type=float, help="start nothing more after so long (default: no limit)")
    add("--device", default="cuda", help="(default: %(default)s)")
    add("--quick", action="store_true", help="the smaller model without checkpointing, three lengths")
    add("--tiny", action="store_true", help="toy sizes on the CPU, to try everything out")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-gpu.json)")
    return options


def measure(args: argparse.Namespace) -> Path:
    """Measure everything that is asked for, as far as time allows.

    Returns:
        The results file.

    Raises:
        UserError: there is no such device, a check, a process or a point failed; what was measured is written.
    """
    if args.quick:
        vars(args).update(QUICK)
    if args.tiny:
        vars(args).update(TINY)
    # Nothing here may touch the driver: the processes do.
    began = time.monotonic()
    arms = _arms(args.arm)
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-gpu.json")
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "settings": {name: value for name, value in vars(args).items() if name != "output"},
        "versions": versions(),
        "checks": [],
        "points": [],
    }
    if args.device == "cpu":
        print("on a CPU, arms with FlexAttention run their forward pass alone", file=sys.stderr)
    plan = list(itertools.product(args.models, args.training, args.checkpointing, args.lengths))
    progress = Progress(len(plan))
    with Children(os.cpu_count() or 1 if args.device != "cpu" else 1) as children:
        size = 256 if args.tiny else 8192
        task = {"run": "bench_gpu:measure_ceiling", "device": args.device, "size": size, "seconds": args.seconds}
        results["ceiling"] = children.run_alone(task)
        found = children.run_alone({"run": "bench_gpu_check:check", "device": args.device})
        results["checks"] = found["checks"]
        write_json(path, results)
        wrong = [one["what"] for one in results["checks"] if not one["passed"]]
        if wrong:
            raise UserError(f"forests differ from separate rows ({'; '.join(wrong)}); see {os.path.relpath(path)}")
        for model, training, checkpointing, length in plan:
            what = f"{model}, {training}, checkpointing {checkpointing}, length {length}"
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                progress.end(f"{what}: left out, the time is up")
                continue
            progress.begin(what)
            task = {"run": "bench_gpu:measure_length", "device": args.device, "seconds": args.seconds}
            task |= {"model": model, "tiny": args.tiny, "length": length, "steps": args.steps, "arms": arms}
            task |= {"lora": training == "lora", "checkpointing": checkpointing, "tokens": args.tokens}
            measured = children.run_alone(task | {"ceiling": results["ceiling"]["flops_per_second"]})["points"]
            names = {"model": model, "training": training, "checkpointing": checkpointing, "length": length}
            results["points"] += [
                names | {"arm": arm} | (point if isinstance(point, dict) else {"none": point})
                for arm, point in measured.items()
            ]
            write_json(path, results)
            progress.end(what)
    print(markdown(results))
    failed = [point for point in results["points"] if point.get("none", "").startswith("failed")]
    if failed:
        raise UserError(f"{len(failed)} of {len(results['points'])} points failed; see {os.path.relpath(path)}")
    return path


def _arms(parts: list[str] | None) -> list[str]:
    # Imported late: it brings torch, and --help should be quick.
    from bench_gpu import ARMS

    found = [name for name in ARMS if not parts or any(part in name for part in parts)]
    if not found:
        raise UserError(f"no arm has one of {', '.join(parts or [])} in its name; choose of: {'; '.join(ARMS)}")
    return found


def main() -> int:
    """Measure; an error that the user can put right takes one line."""
    try:
        path = measure(parser().parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nresults: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
