"""Train regular and Step-JEPA on generated word problems, evaluate both, print one table. Offline, on a CPU.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from stepjepa.cli import main

RUNS = Path("runs")

DATA = "--train_size 16000 --test_size 200 --max_steps 2 --max_quantity 5 --max_amount 15"

MODEL = (
    "--model_name preset:tiny --batch_size 8 --grad_accum 1 --learning_rate 3e-3 --num_epochs 1 "
    "--lr_scheduler_type cosine --warmup_steps 100 --logging_steps 200 --save_strategy no"
)

MODES = {
    "regular": "--regular",
    "step-jepa": "--step_jepa --predictors 2 --lbd 0.02 --jepa_loss_type infonce",
}


def new_folder() -> Path:
    """A folder that is not there yet: nothing of an earlier quickstart is touched."""
    number = 1
    while (folder := RUNS / f"quickstart-{number}").exists():
        number += 1
    return folder


def command(line: str) -> None:
    """Show a command and run it, as the shell would."""
    print(f"\n$ stepjepa {line}", flush=True)
    subprocess.run([sys.executable, "-m", "stepjepa", *shlex.split(line)], check=True)


def quickstart() -> int:
    """Run all of it."""
    start = time.time()
    folder = new_folder()
    command(f"prepare stepmath --output_dir {folder}/data {DATA}")
    runs = {name: folder / name for name in MODES}
    for name, flags in MODES.items():
        command(f"train --train_file {folder}/data/train.jsonl --output_dir {runs[name]} {flags} {MODEL}")
        command(
            f"evaluate --model_path {runs[name]} --test_file {folder}/data/test.jsonl "
            f"--output_file {runs[name]}/test.jsonl --max_new_tokens 96 --batch_size 64 --similarity step-jepa"
        )
    print(f"\n$ stepjepa report {' '.join(map(str, runs.values()))}\n", flush=True)
    code = main(["report", *map(str, runs.values())])
    print(f"\nrun folders: {', '.join(map(str, runs.values()))}   ({time.time() - start:.0f} s in all)")
    print(f"look inside: stepjepa inspect --step_jepa --train_file {folder}/data/train.jsonl --model_name preset:tiny")
    return code


if __name__ == "__main__":
    sys.exit(quickstart())
