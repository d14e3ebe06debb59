"""Time and memory of a run on many records: reading, preparing and a number of steps of ``preset:tiny``.

The records are sums of two numbers, written to a temporary folder. Times are of one process on this machine; memory is
the process's resident memory that is no file's, at the last step, and its peak of all resident memory.

    nice -n 10 python benchmarks/bench_records.py --records 1000000 --steps 100
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import stepjepa
from stepjepa import RunConfig


class Watch(TrainerCallback):
    """Notes when the first step begins, and the memory at the last one."""

    def __init__(self) -> None:
        self.first = 0.0
        self.rss = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.first = time.time()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == state.max_steps:
            gc.collect()
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            match = re.search(r"RssAnon:\s+(\d+)", status)
            self.rss = int(match[1]) * 1024 if match else 0


def write_records(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for index in range(count):
            row = {"question": f"What is {index} + {3 * index}?", "answer": f"The sum is {4 * index}."}
            stream.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.jsonl"
        write_records(file, args.records)
        settings = {
            "model_name": "preset:tiny",
            "train_file": str(file),
            "output_dir": f"{folder}/run",
            "cache_dir": f"{folder}/cache",
            "jepa_loss_type": "infonce",
            "max_steps": args.steps,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
        }
        start = time.time()
        stepjepa.run(RunConfig.from_flat(settings), callbacks=[watch])
        end = time.time()
        size = sum(each.stat().st_size for each in Path(folder, "cache").glob("*.arrow"))
    figures = {
        "records": args.records,
        "steps": args.steps,
        "seconds until training": round(watch.first - start),
        "seconds of training and saving": round(end - watch.first),
        "MiB kept at the last step": watch.rss >> 20,
        "MiB at the peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "MiB of tokens, mapped": size >> 20,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
