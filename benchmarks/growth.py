"""How time and memory of training grow with the records of a file, the records of a step and the tokens of a record.

Each point is a process of its own: ``preset:tiny``, plain and ``branched``, on one thread of a CPU; the median of some
steps after the first three. The records are generated: a question, and an answer of its words.

    python benchmarks/growth.py            # measure, some 15 minutes; writes benchmarks/results/DATE-cpu-growth.json
    python benchmarks/growth.py --plot     # draw docs/plots/growth.png from the newest of these files
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from tables import growth

from stepjepa.base.terminal import PALETTE

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "plots" / "growth.png"
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"mode": "regular"},
    "branched": {"mode": "llm-jepa", "layout": "branched"},
}
UNCOUNTED = 3


class Point(NamedTuple):
    """What one process measures."""

    arm: str
    records: int  # of the file
    batch: int  # records of a step
    tokens: int  # of a record, about
    steps: int = 5  # counted ones


# What grows, and its points; everything else stays as it is in the middle of each.
AXES: dict[str, list[tuple[int, int, int, int]]] = {
    "records": [(count, 16, 60, 5) for count in (1_000, 10_000, 100_000)],
    "batch": [(1_000, batch, 60, 5) for batch in (4, 16, 64, 256)],
    "tokens": [(16, 1, tokens, 3) for tokens in (128, 512, 2048, 8192)],
}
LABELS = {"records": "records of the file", "batch": "records of a step", "tokens": "tokens of a record"}


def measure(point: Point) -> dict[str, float]:
    """Seconds to prepare the file and from there to the first step, milliseconds of a step, MiB at the peak."""
    import torch
    from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

    from stepjepa import JepaConfig, JepaTrainer, prepare
    from stepjepa.chat.special_tokens import add_predictor_tokens
    from stepjepa.models.presets import fit_config, preset_config, train_tokenizer

    torch.set_num_threads(1)
    words = [a + b for a in ("ba", "de", "ki", "lo", "mu", "na", "re") for b in ("ba", "de", "ki", "lo", "mu", "na")]
    draw = random.Random(0)
    half = max(point.tokens // 3, 4)

    def record() -> dict[str, Any]:
        question = [draw.choice(words) for _ in range(half)]
        turns = ("user", " ".join(question)), ("assistant", " ".join(question[: half // 2] + question[half // 4 :]))
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    records = [record() for _ in range(point.records)]
    tokenizer = train_tokenizer(iter([" ".join(words)] * 3), 512)
    add_predictor_tokens(tokenizer, 1)
    config = preset_config("tiny")
    config.max_position_embeddings = 2**15
    fit_config(config, tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    times: list[float] = []

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    settings = JepaConfig(max_length=2**15, **ARMS[point.arm])
    start = time.perf_counter()
    prepared = prepare(records, tokenizer, settings, cache_dir=False)
    ready = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=UNCOUNTED + point.steps + 1,
            per_device_train_batch_size=point.batch,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        JepaTrainer(
            model, arguments, settings, train_dataset=prepared, processing_class=tokenizer, callbacks=[Stopwatch()]
        ).train()
    steps = [b - a for a, b in zip(times[UNCOUNTED:], times[UNCOUNTED + 1 :], strict=False)]
    return {
        "tokens of a record": float(prepared.dataset.lengths.mean()),
        "prepare s": ready - start,
        "to the first step s": times[1] - ready,
        "step ms": statistics.median(steps) * 1000,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure_all() -> Path:
    """Measure every point in a process of its own and write the results."""
    results: dict[str, list[dict[str, Any]]] = {}
    for axis, points in AXES.items():
        for arm in ARMS:
            for values in points:
                point = Point(arm, *values)
                command = [sys.executable, __file__, "--point", json.dumps(point)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"error: {point}: {done.stderr[-2000:]}")
                figures = point._asdict() | json.loads(done.stdout.splitlines()[-1])
                results.setdefault(axis, []).append(figures)
                print(axis, json.dumps(figures), flush=True)
    path = HERE / "results" / f"{date.today()}-cpu-growth.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def draw_picture() -> Path:
    """Draw how preparation grows with records, and a step with records and tokens, from the newest results.

    All are over plain training at the first point, since seconds are those of one machine.
    """
    results = growth()
    if results is None:
        sys.exit("error: there are no results; run python benchmarks/growth.py")
    figure = Figure(figsize=(9.5, 3), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, axis in zip(panels, AXES, strict=True):
        key, label = ("prepare s", "preparation") if axis == "records" else ("step ms", "time of a step")
        first = results[axis][0][key]
        for colour, arm in zip(PALETTE, ARMS, strict=False):
            rows = [row for row in results[axis] if row["arm"] == arm]
            times = [row[key] / first for row in rows]
            panel.plot([row[axis] for row in rows], times, "o-", color=colour, label=arm, markersize=4)
        panel.set(xlabel=LABELS[axis], ylabel=label, xscale="log", yscale="log")
        panel.grid(visible=True, color="#dddddd", linewidth=0.6)
    panels[0].legend(fontsize=8)
    figure.savefig(PICTURE, dpi=120)
    return PICTURE


def main() -> None:
    """Measure or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="draw the newest results")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point is not None:
        print(json.dumps(measure(Point(*args.point))))
    else:
        print(draw_picture() if args.plot else measure_all())


if __name__ == "__main__":
    main()
