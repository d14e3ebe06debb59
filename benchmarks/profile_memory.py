"""Where the memory of training goes: the arms that miss an aim for their peak, and TRL beside them.

    python benchmarks/profile_memory.py
    python benchmarks/report.py benchmarks/results/DATE-cpu-2-memory.json    # puts the table into docs/performance.md

Every arm trains twice, each time in a process of its own: once for the peak of the process, once with its tensors
counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from bench import chosen_arms
from bench_arms import SUITES, make_suite, trl_padded
from bench_process import HERE, OURS, TRL, Children, Progress
from bench_table import free_name

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions

# What is looked at where nothing else is asked for: arms whose peak misses its aim, and what it is held against.
ARMS = {
    "synth": (trl_padded(16), "llm-jepa separate, forest", "llm-jepa branched, forest"),
    "vocabulary": (trl_padded(16), "llm-jepa branched, forest"),
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--suite", nargs="+", choices=list(SUITES), default=list(ARMS), help="what to look at (default: all)")
    add("--arm", nargs="+", help="arms whose names contain one of these (default: a few of each suite)")
    add("--train_file", help="records instead of the suite's own, or: generated")
    add("--records", type=int, default=512, help="records to train on (default: %(default)s)")
    add("--batch_size", type=int, default=16, help="records of an optimizer step (default: %(default)s)")
    add("--steps", type=int, default=12, help="steps of each run (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of each run (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-memory.json)")
    return options


def profile_suite(name: str, args: argparse.Namespace, progress: Progress) -> dict[str, dict[str, Any]]:
    """What ``bench_memory`` says of the arms of one suite."""
    suite = make_suite(name, args.train_file)
    shared = {"max_length": suite.max_length, "batch_size": args.batch_size, "steps": args.steps, "round": 0}
    inputs = {"suite": name, "train_file": suite.train_file, "model": suite.model, "records": args.records}
    found: dict[str, dict[str, Any]] = {}
    with Children(args.threads) as children:
        progress.begin(f"{name}: records and model")
        children.run({**shared, **inputs, "run": "bench_training:make_inputs", "vocabulary": suite.vocabulary})
        for arm in chosen_arms(suite, argparse.Namespace(arm=args.arm or ARMS[name], batch_size=args.batch_size)):
            progress.begin(f"{name}, {arm.name}")
            modules = ("bench_memory", *(TRL if arm.is_trl else OURS))
            found[arm.name] = {}
            for what in ("resident_memory", "counted_memory"):
                found[arm.name] |= children.run(
                    {**shared, "run": f"bench_memory:{what}", "arm": arm.to_dict()}, modules
                )
            progress.end(f"{name}, {arm.name}: {found[arm.name]['peak']:.0f} MiB")
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Look; an error that the user can put right takes one line."""
    args = parser().parse_args(given)
    try:
        chosen = {
            name: chosen_arms(make_suite(name), argparse.Namespace(arm=args.arm or ARMS[name], batch_size=16))
            for name in args.suite
        }
        progress = Progress(sum(map(len, chosen.values())))
        suites = {name: profile_suite(name, args, progress) for name in args.suite}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = f"cpu-{args.threads}"
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-memory.json")
    settings = {name: getattr(args, name) for name in ("batch_size", "steps", "records", "threads")}
    head = {"date": date.today().isoformat(), "machine": machine, "settings": settings, "versions": versions()}
    write_json(path, {**head, "memory": suites})
    print(f"results: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
