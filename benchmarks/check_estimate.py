"""``stepjepa estimate`` against real trainings on this machine: peak memory, and time of a step.

Every training has a process of its own. Its memory is the peak over what it held before training, beside the estimate's
peak without the weights, which are there before. "Tensors" is measured with an allocator that gives back every large
block (``MALLOC_MMAP_THRESHOLD_``), "held" with the C library's as it comes; what it holds beyond tensors is one of the
rates. Those are measured anew in each round, with other data and batches than what they are then used for. With one
thread, time is that of the process alone, so that others on the machine count less. Linux only: elsewhere nothing tells
the peak of a part of a process's life.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from bench_data import made_up
from bench_process import HERE, Children, Progress
from bench_table import Spread, free_name, row

from stepjepa.errors import UserError
from stepjepa.files import write_json, write_jsonl
from stepjepa.run_folder import versions

MODES = {
    "regular": ["--regular"],
    "llm-jepa separate": [],
    "step-jepa": ["--step_jepa", "--step_separator", "line"],
}
# What else changes memory or time: its flags are added to those of a mode.
VARIANTS = {
    "step-jepa, all pairs, infonce": [*MODES["step-jepa"], "--pairs", "all", "--jepa_loss_type", "infonce"],
    "step-jepa, rows": [*MODES["step-jepa"], "--encoding", "rows"],
    "step-jepa, selective checkpointing": [*MODES["step-jepa"], "--selective_checkpointing"],
    "llm-jepa separate, 4 accumulated": ["--grad_accum", "4"],
}
MODELS, BATCHES = ("preset:tiny", "preset:small"), (4, 16)
STEPS, FEWEST = 6, 48
LIMIT = 0.15
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CHILD = ("check_estimate_child",)


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--rounds", type=int, default=3, help="of rates and runs (default: %(default)s)")
    add("--threads", type=int, default=1, help="of each process (default: %(default)s)")
    add("--only", nargs="+", help="cases whose names contain one of these (default: all)")
    add("--tiny", action="store_true", help="one round of one small case, to try everything out")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-estimate.json)")
    return options


def cases(only: list[str] | None) -> dict[str, dict[str, Any]]:
    """Name -> flags, records of a step, number of records."""
    found: dict[str, dict[str, Any]] = {}
    plan = [(name, flags, model, batch) for model in MODELS for batch in BATCHES for name, flags in MODES.items()]
    plan += [(name, flags, "preset:small", 8) for name, flags in VARIANTS.items()]
    for name, flags, model, batch in plan:
        given = [*flags, "--model_name", model, "--batch_size", str(batch)]
        given += [] if "--grad_accum" in flags else ["--grad_accum", "1"]
        step = batch * (4 if "--grad_accum" in flags else 1)
        case = f"{name}, {model.removeprefix('preset:')}, batch {batch}"
        if not only or any(part in case for part in only):
            found[case] = {"flags": given, "records": max(STEPS * step, FEWEST)}
    if not found:
        raise UserError(f"no case has one of {', '.join(only or [])} in its name")
    return found


def check(args: argparse.Namespace) -> Path:
    """Measure everything.

    Returns:
        The results file.

    Raises:
        UserError: this machine can't measure it, no case is left, or a process failed.
    """
    chosen = cases(["regular, tiny, batch 4"] if args.tiny else args.only)
    rounds = 1 if args.tiny else args.rounds
    if sys.platform != "linux":
        raise UserError("needs Linux, which tells the peak of a part of a process's life")
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-cpu-{args.threads}-estimate.json")
    clock = "cpu" if args.threads == 1 else "wall"
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    tight: dict[str, int] = {}
    rates: list[dict[str, Any]] = []
    progress = Progress(rounds * (len(chosen) + 1))
    results: dict[str, Any] = {}
    with Children(args.threads) as children, Children(args.threads) as giving_back:
        for number in range(rounds):
            progress.begin("rates")
            rates.append(children.run({"run": "check_estimate_child:measure_rates", "clock": clock}, CHILD))
            progress.end(f"rates of round {number + 1}")
            for name, case in chosen.items():
                progress.begin(name)
                task = {"flags": _flags(case, children.folder), "clock": clock}
                told = children.run({**task, "run": "check_estimate_child:foretell_run", "rates": rates[-1]}, CHILD)
                real = children.run({**task, "run": "check_estimate_child:run"}, CHILD)
                measured[name].append({"told": told, "real": real})
                if name not in tight:
                    with _environment(TIGHT):
                        tight[name] = giving_back.run({**task, "run": "check_estimate_child:run"}, CHILD)["bytes"]
                progress.end(f"{name}: {_both(told, real)}")
                results = {
                    "date": date.today().isoformat(),
                    "machine": f"cpu-{args.threads}",
                    "settings": {"rounds": rounds, "threads": args.threads, "clock": clock},
                    "versions": versions(),
                    "rates": rates,
                    "cases": {name: summarise(runs, tight[name]) for name, runs in measured.items() if runs},
                }
                # So that nothing is lost where it is stopped.
                write_json(path, results)
    print(table(results))
    return path


def _flags(case: dict[str, Any], folder: Path) -> list[str]:
    """Of ``stepjepa estimate``, with records that are made up as long as those of GSM8K."""
    file = folder / f"{case['records']}.jsonl"
    if not file.exists():
        write_jsonl(file, made_up("gsm8k", case["records"], 42))
    fixed = ["--train_file", str(file), "--output_dir", str(folder / "out"), "--num_epochs", "1", "--use_cpu"]
    return [*case["flags"], *fixed, "--max_length", "2048", "--save_strategy", "no", "--logging_strategy", "no"]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _both(told: dict[str, Any], real: dict[str, Any]) -> str:
    memory, time = told["bytes"] / real["bytes"], told["seconds"] / real["seconds"]
    return f"memory {memory:.2f}, time {time:.2f} of what was measured"


def summarise(runs: list[dict[str, Any]], tight: int) -> dict[str, Any]:
    """Figures of a case: told, measured, and one over the other within each round."""

    def over(name: str) -> dict[str, float]:
        return Spread.of([run["told"][name] / run["real"][name] for run in runs])._asdict()

    told = runs[0]["told"]
    return {
        "steps": runs[0]["real"]["steps"],
        "told_bytes": Spread.of([run["told"]["bytes"] for run in runs])._asdict(),
        "told_tensors": told["tensors"],
        "parts": told["parts"],
        "measured_bytes": Spread.of([run["real"]["bytes"] for run in runs])._asdict(),
        "memory_ratio": over("bytes"),
        "tight_bytes": tight,
        "tight_ratio": told["tensors"] / tight,
        "told_seconds": Spread.of([run["told"]["seconds"] for run in runs])._asdict(),
        "measured_seconds": Spread.of([run["real"]["seconds"] for run in runs])._asdict(),
        "time_ratio": over("seconds"),
    }


def table(results: dict[str, Any]) -> str:
    """All cases as a Markdown table, and how many are within the limit."""
    heads = [
        "case",
        "tensors, MiB",
        "told / measured",
        "held, MiB",
        "measured",
        "told / measured",
        "time, told / measured",
    ]
    lines = [row(heads), row(["---"] * len(heads))]
    found = results["cases"]
    for name, case in found.items():
        memory, time = case["memory_ratio"], case["time_ratio"]
        lines.append(
            row(
                [
                    name,
                    f"{case['told_tensors'] / 2**20:.0f}",
                    f"{case['tight_ratio']:.2f}",
                    f"{case['told_bytes']['median'] / 2**20:.0f}",
                    f"{case['measured_bytes']['median'] / 2**20:.0f}",
                    _spread(memory),
                    _spread(time),
                ]
            )
        )
    within = {
        name: sum(abs(value - 1) <= LIMIT for value in values)
        for name, values in {
            "held": [case["memory_ratio"]["median"] for case in found.values()],
            "tensors": [case["tight_ratio"] for case in found.values()],
            "time": [case["time_ratio"]["median"] for case in found.values()],
        }.items()
    }
    counts = ", ".join(f"{name} {count} of {len(found)}" for name, count in within.items())
    return "\n".join([*lines, "", f"Within {LIMIT:.0%}: {counts}."])


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} [{values['low']:.2f}, {values['high']:.2f}]"


def main() -> int:
    """Check and print the table."""
    try:
        print(f"results: {os.path.relpath(check(parser().parse_args()))}")
    except UserError as error:
        print(f"check_estimate.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
