"""Training on two CPU cores or more against TRL's ``SFTTrainer``: examples per second, first step, peak memory.

All arms of a suite load the same weights and train on the same token ids and labels with the same optimizer settings. A
round runs every arm once, one after the other in one process, forwards and backwards in turn; examples per second are
those of a whole epoch, the second one, and ratios are taken within a round. The first step is timed from raw records
and a loaded model; preparation, on all records of the file, ends when the trainer is made. Peak memory is that of a
process of its own for each arm (``--memory``).

Two suites are measured at several points: ``answers`` with 1 to 16 answers to a question, ours with ``group_by``, and
``prefix`` with a system prompt of 100 to 2,000 tokens before every record. ``plots.py`` draws them.

    python benchmarks/bench.py --rounds 5 --memory
    python benchmarks/bench.py --suite answers prefix --rounds 5 --memory
    python benchmarks/bench.py --suite gsm8k --micro 4 --memory
    python benchmarks/bench.py --suite smollm2 --model FOLDER --records 32 --rounds 3 --memory
    python benchmarks/bench.py --suite smollm2 --model FOLDER --records 32 --rounds 3 --bf16
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
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shared_beginnings import Messages, described_tables, with_answers, with_prefix

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "shared" / "data"


@dataclass(frozen=True)
class Suite:
    """The records of a suite, and the points at which it is measured."""

    file: str
    points: tuple[int, ...] = ()  # answers to a question, or tokens of the prefix; none for the records as they are
    records: int = 256  # of an epoch
    batch_size: int = 16
    group_by: Literal["prompt"] | None = None  # of our arms


SUITES = {
    "synth": Suite("synth_train.jsonl"),
    "spider": Suite("spider_train.jsonl"),
    "gsm8k": Suite("gsm8k_train.jsonl"),
    "answers": Suite("gsm8k_train.jsonl", (1, 2, 4, 8, 16), records=128, group_by="prompt"),
    "prefix": Suite("spider_train.jsonl", (100, 500, 2000), records=48, batch_size=8),
    "smollm2": Suite("synth_train.jsonl"),  # a model of --model
}

TRL: dict[str, dict[str, Any]] = {
    "trl padded": {},
    "trl grouped": {"train_sampling_strategy": "group_by_length"},
    "trl grouped 4x": {"train_sampling_strategy": "group_by_length", "micro": 4},
    "trl packed": {"packing": 512},  # or the longest record, where it is longer
}
OURS: dict[str, dict[str, Any]] = {
    "regular": {"mode": "regular"},
    "branched": {"mode": "llm-jepa", "layout": "branched"},
    "separate": {"mode": "llm-jepa", "layout": "separate"},
}
SETTINGS = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "report_to": "none"}
MAX_LENGTH = 4096
QUIET = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}


class Spread(NamedTuple):
    """Median, lowest and highest of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of one or more figures."""
        return cls(statistics.median(values), min(values), max(values))


def free_name(path: Path) -> Path:
    """The path, or the next one with a number that no file has."""
    names = (path if n == 1 else path.with_stem(f"{path.stem}-{n}") for n in range(1, 1000))
    return next(name for name in names if not name.exists())


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    usual = [name for name in SUITES if name != "smollm2"]
    add("--suite", nargs="+", default=usual, choices=list(SUITES), help=f"what to measure ({' '.join(usual)})")
    add("--model", default="preset:tiny", help="folder or preset (preset:tiny)")
    add("--records", type=int, help="of an epoch (256; answers 128, prefix 48)")
    add("--batch_size", type=int, help="records of a step (16; prefix 8)")
    add("--micro", type=int, help="records of a micro-batch of our arms, which accumulate to a step (those of a step)")
    add("--points", type=int, nargs="+", help="answers a question, or tokens of the prefix (all of the suite)")
    add("--rounds", type=int, default=5, help="runs of every arm (5)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="(all cores)")
    add("--bf16", action="store_true", help="autocast to bfloat16 in every arm")
    add("--memory", action="store_true", help="also run every arm once in a process of its own, for its peak memory")
    add("--output", type=Path, help="results file, for one suite (benchmarks/results/DATE-cpu-THREADS-SUITE.json)")
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
        tokens: list[int] = [0]  # noqa: RUF012  # that the model had computed by then

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            self.epochs.append(time.perf_counter())
            self.tokens.append(self.tokens[-1])

    def count(module: Any, inputs: Any) -> None:
        Stopwatch.tokens[-1] += inputs[0].numel()

    records = read_records(Path(task["folder"]) / "records.jsonl")
    trainer = make_trainer(arm, task, records)
    trainer.add_callback(Stopwatch)
    trainer.model.get_input_embeddings().register_forward_pre_hook(count)
    trainer.train()
    first, second = Stopwatch.epochs[:2]
    tokens = Stopwatch.tokens[1] - Stopwatch.tokens[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return {
        "examples_per_second": len(records) / (second - first),
        "tokens_per_example": tokens / len(records),
        "peak_mib": peak,
    }


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
    micro = (task["micro"] if arm in OURS else extra.pop("micro", None)) or task["batch_size"]
    packing = extra.pop("packing", 0)
    common: dict[str, Any] = {
        **SETTINGS,
        "bf16": task.get("bf16", False),
        **QUIET,
        **extra,
        # A run folder holds one run.
        "output_dir": tempfile.mkdtemp(dir=task["folder"]),
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
        config = JepaConfig(max_length=MAX_LENGTH, **OURS[arm])
        trainer: Any = JepaTrainer(
            model,
            TrainingArguments(**common),
            config,
            train_dataset=records,
            processing_class=tokenizer,
            group_by=task["group_by"],
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
            prepared = prepare(records, tokenizer, JepaConfig(mode="regular", max_length=MAX_LENGTH))
            items = [prepared.dataset[index] for index in range(len(prepared.dataset))]
            rows = [labelled(item.record) for item in items if item is not None]
        if packing:
            lengths = [len(row["input_ids"]) for row in rows]
            tokens, packing = sum(lengths), max(packing, *lengths)
            common["per_device_train_batch_size"] = 1
            common["gradient_accumulation_steps"] = max(1, round(task["batch_size"] * tokens / len(rows) / packing))
        settings = SFTConfig(**common, max_length=packing or MAX_LENGTH, packing=bool(packing))
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


def bench(args: argparse.Namespace) -> list[Path]:
    """Measure, print the tables, write the results; returns their files, one a suite."""
    from stepjepa import read_records
    from stepjepa.base.files import write_json

    if args.output and len(args.suite) > 1:
        raise SystemExit(
            "error: --output: expected one --suite beside it; the results of each have a file of their own"
        )
    paths = []
    for name in args.suite:
        suite, everything = SUITES[name], read_records(DATA / "llm_jepa" / SUITES[name].file)
        size = args.records or suite.records
        results: dict[str, Any] = {}
        for point in args.points or suite.points:
            figures = measure(args, name, everything[:size], point=point)
            results.setdefault("points", {})[str(point)] = figures
            print(table(f"{name} {point}", figures), flush=True)
        if not suite.points:
            results = measure(args, name, everything[:size], everything=everything)
            print(table(name, results), flush=True)
        setting = f"{f'-micro{args.micro}' if args.micro else ''}{'-bf16' if args.bf16 else ''}"
        file = f"{date.today().isoformat()}-cpu-{args.threads}-{name}{setting}.json"
        path = free_name(args.output or HERE / "results" / file)
        versions = {each: version(each) for each in ("torch", "transformers", "trl")} | {
            "python": platform.python_version()
        }
        settings = {each: value for each, value in vars(args).items() if each not in ("output", "model")}
        settings |= {"model": Path(args.model).name, "records": size, "batch_size": args.batch_size or suite.batch_size}
        write_json(path, {"settings": settings, "versions": versions, "suites": {name: results}})
        paths.append(path)
    return paths


def measure(
    args: argparse.Namespace, name: str, records: list[Any], *, point: int | None = None, everything: Any = None
) -> dict[str, Any]:
    """The figures of a suite, at one of its points; of preparation and the first step, too, with ``everything``."""
    from stepjepa import load_model
    from stepjepa.base.files import write_jsonl

    suite = SUITES[name]
    with tempfile.TemporaryDirectory(prefix="stepjepa-bench-") as folder:
        title = name if point is None else f"{name} {point}"
        print(f"{title}: data and model", file=sys.stderr, flush=True)
        tables = described_tables(DATA / "spider" / "tables.json") if name == "prefix" else ""
        texts = (message["content"] for record in records for message in record.messages)
        model, tokenizer = load_model(args.model, texts=[*texts, *tables.splitlines()])
        model.save_pretrained(Path(folder) / "model")
        tokenizer.save_pretrained(Path(folder) / "model")
        rows: list[Messages] = [list(each.messages) for each in records]
        if name == "answers":
            rows = with_answers(records, len(records), point or 1)
        elif name == "prefix":
            rows = with_prefix(records, tables, point or 0, tokenizer)
        write_jsonl(Path(folder) / "records.jsonl", ({"messages": each} for each in rows))
        batch_size = args.batch_size or suite.batch_size
        task = {"folder": folder, "batch_size": batch_size, "threads": args.threads, "group_by": suite.group_by}
        task |= {"bf16": args.bf16, "micro": args.micro}
        arms = [*TRL, *OURS]
        rounds = []
        for number in range(args.rounds):
            order = arms if number % 2 == 0 else arms[::-1]
            rounds.append(child({**task, "run": "train", "arms": order, "round": number}))
            speeds = ", ".join(f"{arm} {rounds[-1][arm]['examples_per_second']:.1f}" for arm in arms)
            print(f"{title} [{number + 1}/{args.rounds}] {speeds}", file=sys.stderr, flush=True)
        figures: dict[str, Any] = {"rounds": rounds, "summary": summarise(rounds)}
        if everything is not None:
            write_jsonl(Path(folder) / "all.jsonl", ({"messages": list(each.messages)} for each in everything))
            starts = [child({**task, "run": "first", "round": number}) for number in range(args.rounds)]
            for what in ("first_step", "preparation"):
                ratios = [one["regular"][what] / one["trl padded"][what] for one in starts]
                figures[f"{what}_over_trl"] = Spread.of(ratios)._asdict()
        if args.memory:
            figures["peak_mib"] = {
                arm: child({**task, "run": "train", "arms": [arm], "round": 0})[arm]["peak_mib"] for arm in arms
            }
    return figures


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """For every arm examples per second, and over the fastest of TRL's settings in the same round."""
    summary = {}
    for arm in (*TRL, *OURS):
        speeds = [one[arm]["examples_per_second"] for one in rounds]
        over = [
            one[arm]["examples_per_second"] / max(one[name]["examples_per_second"] for name in TRL) for one in rounds
        ]
        summary[arm] = {
            "speed": Spread.of(speeds)._asdict(),
            "over_trl": Spread.of(over)._asdict(),
            "tokens": statistics.median(one[arm]["tokens_per_example"] for one in rounds),
        }
    return summary


def table(suite: str, results: Mapping[str, Any]) -> str:
    """The figures of a suite as Markdown."""
    peaks = results.get("peak_mib", {})
    best = max(TRL, key=lambda arm: results["summary"][arm]["speed"]["median"])
    lines = [
        f"{suite}: times TRL's best ({best})",
        "",
        "| arm | over TRL's best | lowest, highest | tokens an example | peak memory over TRL's |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for arm, figures in results["summary"].items():
        over = figures["over_trl"]
        peak = f"{peaks[arm] / peaks[best]:.2f}" if peaks else "–"
        spread = f"{over['low']:.2f}, {over['high']:.2f}"
        lines.append(f"| {arm} | {over['median']:.2f} | {spread} | {figures['tokens']:.1f} | {peak} |")
    for name, what in (("time to the first step", "first_step"), ("preparation of the whole file", "preparation")):
        if (one := results.get(f"{what}_over_trl")) is None:
            continue
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
    print(f"\nresults: {' '.join(os.path.relpath(path) for path in bench(args))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
