"""Examples per second and peak memory of every objective, against plain fine-tuning and against TRL's SFTTrainer.

Arms run one at a time, each in a process of its own, interleaved over several rounds; ratios are taken within a round.
The table goes to standard output, progress to standard error, and all figures to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from bench_arms import VIEWS, Suite, make_suite
from bench_table import Round, free_name, markdown, summarise

from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import versions

HERE = Path(__file__).resolve().parent


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--suite", nargs="+", choices=sorted(VIEWS), default=sorted(VIEWS), help="what to measure")
    add("--train_file", help="records instead of the suite's own (real data if it is there, else generated)")
    add("--max_length", type=int, help="most tokens of a record; default 512 for llm-jepa, 1024 for step-jepa")
    add("--step_separator", help="what separates the steps of --train_file; default: blank lines")
    add("--model", default="preset:tiny", help="preset, folder or hub id (default: %(default)s)")
    add("--batch_size", type=_positive, default=16, help="records of an optimizer step (default: %(default)s)")
    add("--steps", type=_positive, default=40, help="optimizer steps measured per run (default: %(default)s)")
    add("--warmup", type=_positive, default=5, help="steps before them, not measured (default: %(default)s)")
    add("--rounds", type=_positive, default=3, help="runs of every arm (default: %(default)s)")
    add("--threads", type=_positive, default=os.cpu_count() or 1, help="of each run (default: all cores)")
    add("--output", type=Path, help="results file (default: benchmarks/results/DATE-cpu-THREADS.json)")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


class Progress:
    """One line per finished run; on a terminal also what is running now and how long the rest will take."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def begin(self, what: str) -> None:
        """Say what is running."""
        if self._terminal:
            left = "?"
            if self._done:
                left = f"{(time.monotonic() - self._start) / self._done * (self._runs - self._done) / 60:.1f} min"
            sys.stderr.write(f"\r\033[K[{self._done + 1}/{self._runs}] {what}, {left} left")
            sys.stderr.flush()

    def end(self, what: str) -> None:
        """Say what came out."""
        self._done += 1
        start = "\r\033[K" if self._terminal else ""
        sys.stderr.write(f"{start}[{self._done}/{self._runs}] {what}\n")
        sys.stderr.flush()


def run_child(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run ``bench_child.py`` on a task and wait for its result.

    Raises:
        UserError: the child failed; its own words are in the message.
    """
    task_file, result_file = folder / "task.json", folder / "result.json"
    result_file.unlink(missing_ok=True)
    write_json(task_file, {**task, "folder": str(folder), "result": str(result_file)})
    # The child's peak memory starts from its parent's, which is why nothing heavy is imported here.
    done = subprocess.run(
        [sys.executable, str(HERE / "bench_child.py"), str(task_file)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(task["threads"])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not result_file.is_file():
        raise UserError(f"a run ended with code {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(result["error"])
    return result


def run_suite(suite: Suite, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All rounds of one suite.

    Returns:
        ``data``, ``arms``, ``rounds`` and ``summary``.
    """
    arms = suite.arms(args.batch_size)
    shared = {"threads": args.threads, "max_length": suite.max_length, "batch_size": args.batch_size}
    with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as name:
        folder = Path(name)
        wanted = args.batch_size * (args.steps + args.warmup)
        progress.begin(f"{suite.name}: records and model")
        data = run_child({**shared, "train_file": suite.train_file, "model": args.model, "records": wanted}, folder)
        rounds: list[Round] = []
        for number in range(args.rounds):
            results: Round = {}
            # To and fro, so that no arm always follows the same one.
            for arm in arms if number % 2 == 0 else reversed(arms):
                what = f"{suite.name}, round {number + 1}/{args.rounds}, {arm.name}"
                progress.begin(what)
                task = {**shared, "arm": arm.to_dict(), "warmup": args.warmup, "round": number}
                results[arm.name] = run_child(task, folder)
                progress.end(f"{what}: {results[arm.name]['examples_per_second']:.1f} examples/s")
            rounds.append(results)
    summary = summarise(rounds, arms)
    data["file"] = Path(suite.train_file).name
    return {"data": data, "arms": [arm.to_dict() for arm in arms], "rounds": rounds, "summary": summary}


def check_trl() -> None:
    """Make sure that there is something to compare with.

    Raises:
        UserError: TRL or datasets is missing.
    """
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} not installed; run: pip install -e '.[bench]'")


def bench(args: argparse.Namespace) -> Path:
    """Measure, print the table, write the results.

    Returns:
        The results file.

    Raises:
        UserError: TRL is missing, or a run failed.
    """
    check_trl()
    machine = f"cpu-{args.threads}"
    wanted = args.output or HERE / "results" / f"{date.today().isoformat()}-{machine}.json"
    suites = [make_suite(name, args.train_file, args.max_length, args.step_separator) for name in args.suite]
    progress = Progress(args.rounds * sum(len(suite.arms(args.batch_size)) for suite in suites))
    measured: dict[str, Any] = {}
    for suite in suites:
        measured[suite.name] = run_suite(suite, args, progress)
        data = measured[suite.name]["data"]
        title = f"{suite.name}: {data['file']}, {args.model}, {data['parameters'] / 1e6:.1f} M parameters"
        print(
            f"\n{markdown(f'{title}, batch {args.batch_size}, {machine}', measured[suite.name]['summary'])}", flush=True
        )
    path = free_name(wanted)
    settings = {name: getattr(args, name) for name in ("model", "batch_size", "steps", "warmup", "rounds", "threads")}
    # The kind of machine, and nothing that would tell which one it was.
    packages = {**versions(), "platform": f"{platform.system()} {platform.machine()}"}
    packages |= {name: importlib.metadata.version(name) for name in ("trl", "datasets")}
    write_json(
        path,
        {
            "date": date.today().isoformat(),
            "machine": machine,
            "settings": settings,
            "versions": packages,
            "suites": {name: _as_json(value) for name, value in measured.items()},
        },
    )
    return path


def _as_json(measured: dict[str, Any]) -> dict[str, Any]:
    """Spreads by name instead of by place."""
    summary = {
        arm: {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in figures.items()}
        for arm, figures in measured["summary"].items()
    }
    return {**measured, "summary": summary}


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
