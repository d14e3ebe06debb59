"""Examples per second and peak memory of every objective, against plain fine-tuning, TRL's SFTTrainer and the
published way.

Arms run one at a time, each in a process of its own, interleaved over several rounds; ratios are taken within a round.
Tables go to standard output, progress to standard error, and all figures to ``benchmarks/results/``;
``benchmarks/report.py`` makes the page and the pictures of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from bench_arms import SUITES, Suite, make_suite
from bench_process import HERE, OURS, TRL, Children, Progress
from bench_table import Round, as_json, free_name, markdown, summarise

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--suite", nargs="+", choices=list(SUITES), help="what to measure (default: all)")
    add("--quick", action="store_true", help="the suite synth alone, one round of one second an arm, unless named")
    add("--arm", nargs="+", help="measure only arms whose names contain one of these, beside regular and TRL's padded")
    add("--train_file", help="records instead of the suite's own, or: generated (default: real data if there are any)")
    add("--max_length", type=_positive, help="most tokens of a record (default: 512)")
    add("--step_separator", help="what separates the steps of --train_file (default: blank lines)")
    add("--records", type=_positive, default=1024, help="records to train on (default: %(default)s)")
    add("--batch_size", type=_positive, default=16, help="records of an optimizer step (default: %(default)s)")
    add("--seconds", type=_seconds, help="how long an arm is measured in a round (default: 2.5)")
    add("--warmup", type=_positive, default=5, help="steps before that, not measured (default: %(default)s)")
    add("--rounds", type=_positive, help="runs of every arm (default: 3)")
    add("--threads", type=_positive, default=os.cpu_count() or 1, help="of each run (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS.json)")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {value}")
    return value


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on ``--quick``."""
    args.suite = args.suite or (["synth"] if args.quick else list(SUITES))
    args.seconds = args.seconds or (1.0 if args.quick else 2.5)
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def chosen_arms(suite: Suite, args: argparse.Namespace) -> list[Any]:
    """The arms of a suite that are to be run."""
    arms = suite.arms(args.batch_size)
    if not args.arm:
        return arms
    needed = {"regular", f"trl padded {args.batch_size}"}
    kept = [arm for arm in arms if arm.name in needed or any(part in arm.name for part in args.arm)]
    # An arm can't be compared without what it is compared with.
    needed |= {arm.reference for arm in kept}
    return [arm for arm in arms if arm in kept or arm.name in needed]


def run_suite(suite: Suite, args: argparse.Namespace, progress: Progress, children: Children) -> dict[str, Any]:
    """All rounds of one suite.

    Returns:
        ``data``, ``arms``, ``rounds`` and ``summary``.
    """
    arms = chosen_arms(suite, args)
    shared = {"max_length": suite.max_length, "batch_size": args.batch_size}
    inputs = {"suite": suite.name, "train_file": suite.train_file, "model": suite.model, "records": args.records}
    inputs |= {"run": "bench_training:make_inputs", "vocabulary": suite.vocabulary}
    progress.begin(f"{suite.name}: records and model")
    data = children.run({**shared, **inputs})
    rounds: list[Round] = []
    for number in range(args.rounds):
        results: Round = {}
        # To and fro, so that no arm always follows the same one.
        for arm in arms if number % 2 == 0 else reversed(arms):
            what = f"{suite.name}, round {number + 1}/{args.rounds}, {arm.name}"
            progress.begin(what)
            task = {**shared, "run": "bench_training:measure", "arm": arm.to_dict(), "round": number}
            task |= {"warmup": args.warmup, "seconds": args.seconds}
            results[arm.name] = children.run(task, TRL if arm.is_trl else OURS)
            progress.end(f"{what}: {results[arm.name]['examples_per_second']:.1f} examples/s")
        rounds.append(results)
    data |= {"file": Path(suite.train_file).name, "model": suite.model, "vocabulary": suite.vocabulary}
    return {
        "data": data,
        "arms": [arm.to_dict() for arm in arms],
        "rounds": rounds,
        "summary": as_json(summarise(rounds, arms)),
    }


def check_trl() -> None:
    """Make sure that there is something to compare with.

    Raises:
        UserError: TRL or datasets is missing.
    """
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed; run: pip install -e '.[bench]'")


def bench(args: argparse.Namespace) -> Path:
    """Measure, print the tables, write the results.

    Returns:
        The results file.

    Raises:
        UserError: TRL is missing, or a run failed.
    """
    check_trl()
    settle(args)
    machine = f"cpu-{args.threads}"
    wanted = args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}.json"
    suites = [make_suite(name, args.train_file, args.max_length, args.step_separator) for name in args.suite]
    progress = Progress(args.rounds * sum(len(chosen_arms(suite, args)) for suite in suites))
    measured: dict[str, Any] = {}
    for suite in suites:
        with Children(args.threads) as children:
            measured[suite.name] = run_suite(suite, args, progress, children)
        print(f"\n### {suite.name}\n\n{markdown(measured[suite.name]['summary'])}", flush=True)
    path = free_name(wanted)
    settings = {name: getattr(args, name) for name in ("batch_size", "seconds", "warmup", "rounds", "threads")}
    # The kind of machine, and nothing that would tell which one it was.
    packages = {**versions(), "platform": f"{platform.system()} {platform.machine()}"}
    packages |= {name: importlib.metadata.version(name) for name in ("trl", "datasets")}
    head = {"date": date.today().isoformat(), "machine": machine, "settings": settings, "versions": packages}
    write_json(path, {**head, "suites": measured})
    return path


def main() -> int:
    """Run the benchmark; an error that the user can put right takes one line."""
    try:
        path = bench(parser().parse_args())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nresults: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
