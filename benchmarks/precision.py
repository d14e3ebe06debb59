"""Float32 against autocast to bfloat16 on a CPU: time of a step by width of the model, and losses over some steps.

The time is processor time of the forward and backward pass on one thread, both precisions in turn, so that what else
the machine does matters little. A CPU that does not multiply in bfloat16 is much slower in it.

    python benchmarks/precision.py                               # presets of width 128, 256 and 512
    python benchmarks/precision.py --model FOLDER --records 4    # a model of your own

writes ``benchmarks/results/DATE-cpu-precision.json``, of which ``tables.py`` makes the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from bench import free_name

from stepjepa import Jepa, JepaConfig, load_model, read_records
from stepjepa.base.files import write_json

RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "llm_jepa" / "synth_train.jsonl"
ARMS = {"regular": JepaConfig(mode="regular"), "separate": JepaConfig(mode="llm-jepa", layout="separate")}


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--model", nargs="+", default=["preset:tiny", "preset:small", "preset:base"], help="folders or presets")
    add("--data", type=Path, default=DATA, help="records (synth)")
    add("--records", type=int, default=16, help="of a step (16)")
    add("--rounds", type=int, default=5, help="steps of each precision (5)")
    add("--losses", type=int, default=100, help="steps of the first model in each precision, to compare losses (100)")
    add("--output", type=Path, help="results file (benchmarks/results/DATE-cpu-precision.json)")
    return options


def step(jepa: Jepa, model: Any, batch: Any, *, half: bool, number: int = 0) -> tuple[float, float]:
    """Processor seconds of a forward and backward pass, and its LM loss."""
    model.zero_grad()
    start = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        losses = jepa.loss(model, batch, step=number)
    losses.loss.backward()
    return time.process_time() - start, float(losses.parts["lm_loss"].detach())


def time_ratio(name: str, config: JepaConfig, records: list[Any], rounds: int) -> dict[str, float]:
    """Float32's time over that of bfloat16, within a round: median, lowest, highest."""
    model, tokenizer = load_model(name)
    jepa = Jepa(model, tokenizer, config)
    batch = jepa.collate(records)
    ratios = []
    for number in range(rounds + 1):
        order = (False, True) if number % 2 else (True, False)
        seconds = {half: step(jepa, model, batch, half=half)[0] for half in order}
        ratios.append(seconds[False] / seconds[True])
    ratios = ratios[1:]  # the first one warms up
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def losses(name: str, config: JepaConfig, records: list[Any], size: int, steps: int, *, half: bool) -> list[float]:
    """LM losses of some steps of AdamW from the same weights on the same records."""
    torch.manual_seed(0)
    model, tokenizer = load_model(name)
    jepa = Jepa(model, tokenizer, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = itertools.cycle([records[at : at + size] for at in range(0, len(records) - size + 1, size)])
    values = []
    for number, part in zip(range(steps), batches, strict=False):
        values.append(step(jepa, model, jepa.collate(part), half=half, number=number)[1])
        optimizer.step()
    return values


def main() -> None:
    """Measure and print."""
    args = parser().parse_args()
    torch.set_num_threads(1)
    records = list(itertools.islice(read_records(args.data), max(args.records, 512)))
    lines: list[dict[str, Any]] = []

    def add(name: str, arm: str, figures: dict[str, float]) -> None:
        lines.append({"model": name, "arm": arm, "records": args.records} | figures)
        print(json.dumps(lines[-1]), flush=True)

    for name, (arm, config) in itertools.product(args.model, ARMS.items()):
        add(name, arm, time_ratio(name, config, records[: args.records], args.rounds))
    for arm, config in ARMS.items() if args.losses else ():
        both = [losses(args.model[0], config, records, args.records, args.losses, half=half) for half in (False, True)]
        ends = [statistics.mean(each[-10:]) for each in both]
        apart = max(abs(a - b) / a for a, b in zip(*both, strict=True))
        figures = {"steps": args.losses, "float32": ends[0], "bfloat16": ends[1], "most_apart": apart}
        add(args.model[0], arm, figures)
    path = args.output or free_name(RESULTS / f"{date.today()}-cpu-precision.json")
    write_json(path, lines)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
