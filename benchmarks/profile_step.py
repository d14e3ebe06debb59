"""Where the time of a training step goes: each arm under torch's profiler, against plain fine-tuning.

Prints a Markdown table and writes all figures to ``benchmarks/results/``; with ``--page`` also into
``docs/performance.md``. Times are taken for a token of the records' own text, as shares of that of ``regular``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from bench import chosen_arms
from bench_arms import REGULAR, SUITES, make_suite
from bench_process import HERE, OURS, TRL, Children, Progress
from bench_table import free_name, row

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions

PAGE = HERE.parent / "docs" / "performance.md"
BEGIN = "<!-- made by benchmarks/profile_step.py from {file}: do not edit -->"
END = "<!-- end of what benchmarks/profile_step.py made -->"
# What is profiled where nothing else is asked for: arms that miss an aim, and what they are measured against.
ARMS = {
    "synth": ("trl grouped 16", "llm-jepa separate, forest"),
    "spider": ("trl grouped 16", "llm-jepa separate, forest"),
    "gsm8k": ("trl grouped 16", "step-jepa all, forest", "llm-jepa branched, forest"),
    "vocabulary": ("trl grouped 4x4", "llm-jepa branched, forest"),
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--suite", nargs="+", choices=list(SUITES), default=list(ARMS), help="what to profile (default: all)")
    add("--arm", nargs="+", help="arms whose names contain one of these (default: a few of each suite)")
    add("--train_file", help="records instead of the suite's own, or: generated")
    add("--records", type=int, default=512, help="records to train on (default: %(default)s)")
    add("--batch_size", type=int, default=16, help="records of an optimizer step (default: %(default)s)")
    add("--warmup", type=int, default=4, help="steps before (default: %(default)s)")
    add("--steps", type=int, default=12, help="steps that are profiled (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of every arm, of which medians are taken (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of each run (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS-profile.json)")
    add("--page", action="store_true", help="put the table into docs/performance.md")
    return options


def profile_suite(name: str, args: argparse.Namespace, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """All rounds of one suite, by arm."""
    suite = make_suite(name, args.train_file)
    arms = chosen_arms(suite, argparse.Namespace(arm=args.arm or ARMS[name], batch_size=args.batch_size))
    shared = {"max_length": suite.max_length, "batch_size": args.batch_size}
    inputs = {"suite": name, "train_file": suite.train_file, "model": suite.model, "records": args.records}
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    with Children(args.threads) as children:
        progress.begin(f"{name}: records and model")
        children.run({**shared, **inputs, "run": "bench_training:make_inputs", "vocabulary": suite.vocabulary})
        for number in range(args.rounds):
            for arm in arms if number % 2 == 0 else reversed(arms):
                progress.begin(f"{name}, {arm.name}")
                task = {**shared, "run": "bench_profile:profile_arm", "arm": arm.to_dict(), "round": number}
                task |= {"warmup": args.warmup, "steps": args.steps}
                modules = ("bench_profile", *(TRL if arm.is_trl else OURS))
                found[arm.name].append(children.run(task, modules))
                progress.end(f"{name}, {arm.name}")
    return found


def markdown(suites: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """All suites as one table: hundredths of the time of ``regular`` in the same round, medians of the rounds."""
    kinds = next(iter(next(iter(suites.values())).values()))[0]["kinds"]
    lines = [row(["suite", "arm", *kinds, "all"]), row(["---"] * (len(kinds) + 3))]
    for suite, arms in suites.items():
        for name, rounds in arms.items():
            pairs = list(zip(rounds, arms[REGULAR], strict=True))
            cells = [median(100 * run["kinds"][kind] / plain["seconds"] for run, plain in pairs) for kind in kinds]
            cells.append(median(100 * run["seconds"] / plain["seconds"] for run, plain in pairs))
            lines.append(row([suite, name, *(f"{cell:.0f}" for cell in cells)]))
    return "\n".join(lines)


def generated(results: dict[str, Any], file: str) -> str:
    """What stands between the markers of the page, markers included."""
    settings = results["settings"]
    said = f"[{file}](../benchmarks/results/{file}): {settings['steps']} steps of {settings['batch_size']} records, "
    said += f"medians of rounds ({settings['rounds']}), {settings['threads']} CPU threads. Time for a token of the "
    said += "records' own text, in hundredths of that of `regular`:"
    return "\n\n".join([BEGIN.format(file=file), said, markdown(results["suites"]), END])


def replace_between(page: str, text: str) -> str:
    """A page with a new text between its markers.

    Raises:
        UserError: the markers are missing.
    """
    start, end = page.find(BEGIN.partition("{file}")[0]), page.find(END)
    if not 0 <= start < end:
        raise UserError(f"has no two markers; put '{BEGIN.format(file='-')}' and '{END}' into it", path=PAGE)
    return page[:start] + text + page[end + len(END) :]


def main(given: Sequence[str] | None = None) -> int:
    """Profile; an error that the user can put right takes one line."""
    args = parser().parse_args(given)
    try:
        counts = {
            name: len(chosen_arms(make_suite(name), argparse.Namespace(arm=args.arm or ARMS[name], batch_size=16)))
            for name in args.suite
        }
        progress = Progress(args.rounds * sum(counts.values()))
        suites = {name: profile_suite(name, args, progress) for name in args.suite}
        machine = f"cpu-{args.threads}"
        path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}-profile.json")
        settings = {name: getattr(args, name) for name in ("batch_size", "warmup", "steps", "rounds", "threads")}
        head = {"date": date.today().isoformat(), "machine": machine, "settings": settings, "versions": versions()}
        results = {**head, "suites": suites}
        write_json(path, results)
        print(markdown(suites))
        if args.page:
            PAGE.write_text(
                replace_between(PAGE.read_text(encoding="utf-8"), generated(results, path.name)), encoding="utf-8"
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nresults: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
