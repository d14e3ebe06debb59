"""Training on two CPU cores or more against TRL's ``SFTTrainer``: examples per second, first step, peak memory.

All arms of a suite load the same weights and train on the same token ids and labels with the same optimizer settings. A
round runs every arm once, one after the other in one process, forwards and backwards in turn; examples per second are
those of a whole epoch, the second one, and ratios are taken within a round. The first step is timed from raw records
and a loaded model; preparation, on all records of the file, ends when the trainer is made. Peak memory is that of a
process of its own for each arm (``--memory``).

    python benchmarks/bench.py --rounds 5 --memory
    python benchmarks/bench.py --suite smollm2 --model FOLDER --records 96 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "shared" / "data" / "llm_jepa"

SUITES = {"synth": "synth_train.jsonl", "spider": "spider_train.jsonl", "gsm8k": "gsm8k_train.jsonl"}
"""Suite -> its records; ``smollm2`` has those of ``synth``, and a model of ``--model``."""

TRL: dict[str, dict[str, Any]] = {
    "trl padded": {},
    "trl grouped": {"train_sampling_strategy": "group_by_length"},
    "trl grouped 4x": {"train_sampling_strategy": "group_by_length", "micro": 4},
    "trl packed 512": {"packing": 512},
}
OURS: dict[str, dict[str, Any]] = {
    "regular": {"mode": "regular"},
    "branched": {"mode": "llm-jepa", "layout": "branched"},
    "separate": {"mode": "llm-jepa", "layout": "separate"},
}
SETTINGS = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": "none"}
QUIET = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}


class Spread(NamedTuple):
    """Median, lowest and highest of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of at least one figure."""
        return cls(statistics.median(values), min(values), max(values))


def free_name(path: Path) -> Path:
    """The path, or the next one with a number that no file has."""
    names = (path if n == 1 else path.with_stem(f"{path.stem}-{n}") for n in range(1, 1000))
    return next(name for name in names if not name.exists())


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--suite", nargs="+", default=list(SUITES), help="what to measure (synth spider gsm8k)")
    add("--model", default="preset:tiny", help="folder or preset (preset:tiny)")
    add("--records", type=int, default=256, help="of an epoch (256)")
    add("--batch_size", type=int, default=16, help="records of a step (16)")
    add("--rounds", type=int, default=5, help="runs of every arm (5)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="(all cores)")
    add("--memory", action="store_true", help="also run every arm once in a process of its own, for its peak memory")
    add("--output", type=Path, help="results file (benchmarks/results/DATE-cpu-THREADS.json)")
    return options


# -- one process -------------------------------------------------------------------------------------------------------


def run_task(task: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Train some arms, one after the other; returns the figures of each."""
    import torch

    torch.set_num_threads(task["threads"])
    return {arm: train(arm, task) for arm in task["arms"]}


def train(arm: str, task: dict[str, Any]) -> dict[str, float]:
    """Two epochs of one arm: the second one is measured."""
    from transformers import TrainerCallback

    from stepjepa import read_records

    class Stopwatch(TrainerCallback):
        epochs: list[float] = []  # noqa: RUF012  # of this one run

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            self.epochs.append(time.perf_counter())

    records = read_records(Path(task["folder"]) / "records.jsonl")
    trainer = make_trainer(arm, task, records)
    trainer.add_callback(Stopwatch)
    trainer.train()
    first, second = Stopwatch.epochs[:2]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {"examples_per_second": len(records) / (second - first), "peak_mib": peak}


def beginning(arm: str, task: dict[str, Any]) -> dict[str, float]:
    """Seconds from raw records and a loaded model: to the end of the first step, and to a trainer of the whole file."""
    from stepjepa import read_records

    task = {**task, "max_steps": 1, "raw": True}
    records = read_records(Path(task["folder"]) / "records.jsonl")
    start = time.perf_counter()
    trainer = make_trainer(arm, task, records)
    trainer.train()
    first = time.perf_counter() - start - trainer.load_seconds
    records = read_records(Path(task["folder"]) / "all.jsonl")
    start = time.perf_counter()
    trainer = make_trainer(arm, task, records)
    return {"first_step": first, "preparation": time.perf_counter() - start - trainer.load_seconds}


def make_trainer(arm: str, task: dict[str, Any], records: list[Any]) -> Any:
    """The trainer of an arm."""
    from transformers import TrainingArguments

    from stepjepa import JepaConfig, JepaTrainer, load_model, prepare

    extra = dict(TRL.get(arm, {}))
    micro, packing = extra.pop("micro", task["batch_size"]), extra.pop("packing", 0)
    common: dict[str, Any] = {
        **SETTINGS,
        **QUIET,
        **extra,
        "output_dir": str(Path(task["folder"]) / "out"),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": task["batch_size"] // micro,
        "num_train_epochs": 2,
        "max_steps": task.get("max_steps", -1),
        "seed": task["round"],
    }
    start = time.perf_counter()
    model, tokenizer = load_model(str(Path(task["folder"]) / "model"), predictors=1 if arm in OURS else 0)
    loaded = time.perf_counter() - start
    if arm in OURS:
        config = JepaConfig(max_length=1024, **OURS[arm])
        trainer: Any = JepaTrainer(
            model, TrainingArguments(**common), config, train_dataset=records, processing_class=tokenizer
        )
    else:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        if task.get("raw"):
            rows: list[dict[str, Any]] = [
                {"messages": [dict(message) for message in record.messages]} for record in records
            ]
        else:
            # The same tokens with the same labels as ours: the assistant's content and end of turn.
            prepared = prepare(records, tokenizer, JepaConfig(mode="regular", max_length=1024))
            items = [prepared.dataset[index] for index in range(len(prepared.dataset))]
            rows = [labelled(item.record) for item in items if item is not None]
        if packing:
            tokens = sum(len(row["input_ids"]) for row in rows)
            common["per_device_train_batch_size"] = 1
            common["gradient_accumulation_steps"] = max(1, round(task["batch_size"] * tokens / len(rows) / packing))
        settings = SFTConfig(**common, max_length=packing or 1024, packing=bool(packing))
        trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.load_seconds = loaded
    return trainer


def labelled(record: Any) -> dict[str, list[int]]:
    """A tokenised record as TRL takes it."""
    ids = record.ids.tolist()
    labels = [-100] * len(ids)
    for position in record.labels.tolist():
        labels[position + 1] = ids[position + 1]
    return {"input_ids": ids, "labels": labels}


# -- the whole ---------------------------------------------------------------------------------------------------------


def child(task: Mapping[str, Any]) -> Any:
    """Run a task in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment = {**os.environ, "OMP_NUM_THREADS": str(task["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, __file__, "--task", json.dumps({**task, "result": str(result)})],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"error: a run ended with code {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def bench(args: argparse.Namespace) -> Path:
    """Measure, print the tables, write the results; returns their file."""
    from stepjepa import load_model, read_records
    from stepjepa.base.files import write_json, write_jsonl

    results: dict[str, Any] = {}
    for suite in args.suite:
        with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
            print(f"{suite}: data and model", file=sys.stderr, flush=True)
            everything = read_records(DATA / SUITES.get(suite, SUITES["synth"]))
            records = everything[: args.records]
            for name, those in (("all", everything), ("records", records)):
                write_jsonl(Path(folder) / f"{name}.jsonl", ({"messages": list(each.messages)} for each in those))
            texts = (message["content"] for record in records for message in record.messages)
            model, tokenizer = load_model(args.model, texts=texts)
            model.save_pretrained(Path(folder) / "model")
            tokenizer.save_pretrained(Path(folder) / "model")
            task = {"folder": folder, "batch_size": args.batch_size, "threads": args.threads}
            arms = [*TRL, *OURS]
            rounds = []
            for number in range(args.rounds):
                order = arms if number % 2 == 0 else arms[::-1]
                rounds.append(child({**task, "run": "train", "arms": order, "round": number}))
                told = ", ".join(f"{arm} {rounds[-1][arm]['examples_per_second']:.1f}" for arm in arms)
                print(f"{suite} [{number + 1}/{args.rounds}] {told}", file=sys.stderr, flush=True)
            found: dict[str, Any] = {"rounds": rounds, "summary": summarise(rounds)}
            starts = [child({**task, "run": "first", "round": number}) for number in range(args.rounds)]
            for what in ("first_step", "preparation"):
                ratios = [one["regular"][what] / one["trl padded"][what] for one in starts]
                found[f"{what}_over_trl"] = Spread.of(ratios)._asdict()
            if args.memory:
                found["peak_mib"] = {
                    arm: child({**task, "run": "train", "arms": [arm], "round": 0})[arm]["peak_mib"] for arm in arms
                }
            results[suite] = found
            print(table(suite, found), flush=True)
    path = free_name(args.output or HERE / "results" / f"{date.today().isoformat()}-cpu-{args.threads}.json")
    versions = {name: version(name) for name in ("torch", "transformers", "trl")} | {
        "python": platform.python_version()
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "model")}
    settings["model"] = Path(args.model).name
    write_json(path, {"settings": settings, "versions": versions, "suites": results})
    return path


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """For every arm examples per second, and over the fastest of TRL's settings in the same round."""
    summary = {}
    for arm in (*TRL, *OURS):
        speeds = [one[arm]["examples_per_second"] for one in rounds]
        over = [
            one[arm]["examples_per_second"] / max(one[name]["examples_per_second"] for name in TRL) for one in rounds
        ]
        summary[arm] = {"speed": Spread.of(speeds)._asdict(), "over_trl": Spread.of(over)._asdict()}
    return summary


def table(suite: str, found: Mapping[str, Any]) -> str:
    """The figures of a suite as Markdown."""
    peaks = found.get("peak_mib", {})
    best = max(TRL, key=lambda arm: found["summary"][arm]["speed"]["median"])
    lines = [
        f"{suite}: times TRL's best ({best})",
        "",
        "| arm | over TRL's best | lowest, highest | peak memory over TRL's |",
    ]
    lines.append("| --- | --- | --- | --- |")
    for arm, figures in found["summary"].items():
        over = figures["over_trl"]
        peak = f"{peaks[arm] / peaks[best]:.2f}" if peaks else "–"
        lines.append(f"| {arm} | {over['median']:.2f} | {over['low']:.2f}, {over['high']:.2f} | {peak} |")
    for name, what in (("time to the first step", "first_step"), ("preparation of the whole file", "preparation")):
        one = found[f"{what}_over_trl"]
        lines += ["", f"{name} over TRL's: {one['median']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark, or a task of it."""
    if sys.argv[1:2] == ["--task"]:
        task = json.loads(sys.argv[2])
        if task["run"] == "first":
            # What is imported and made once a process is no part of it.
            for arm in ("trl padded", "regular"):
                beginning(arm, task)
            order = ("trl padded", "regular")[:: 1 if task["round"] % 2 else -1]
            result: Any = {arm: beginning(arm, task) for arm in order}
        else:
            result = run_task(task)
        Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")
        return 0
    args = parser().parse_args()
    if not DATA.is_dir():
        print(f"error: {DATA}: missing; the benchmark's records are those of the authors of LLM-JEPA", file=sys.stderr)
        return 2
    print(f"\nresults: {os.path.relpath(bench(args))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
