"""Train regular and Step-JEPA on generated word problems, evaluate both, print one table. Offline, on a CPU.

What you should see: both models solve most of the held-out problems and always stop by themselves; the columns of
similarity show that Step-JEPA draws matched steps together and keeps shuffled ones apart, which regular training does
not. What it does not show: which of the two is better. It is one seed; with another one the order may change.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import time
from pathlib import Path

from shown import TINY, arguments, command

DATA = "--train_size {train} --test_size {test} --max_steps 2 --max_quantity 5 --max_amount 15"

MODEL = (
    "--model_name preset:tiny --batch_size 8 --grad_accum 1 --learning_rate 3e-3 --num_epochs 1 "
    "--lr_scheduler_type cosine --warmup_steps 100 --logging_steps 200 --save_strategy no"
)

MODES = {
    "regular": "--regular",
    "step-jepa": "--step_jepa --predictors 2 --lbd 0.02 --jepa_loss_type infonce",
}


def run(folder: Path, *, tiny: bool = False) -> None:
    """Make data, train and evaluate both ways, print one table."""
    start = time.time()
    sizes = {"train": 16, "test": 3} if tiny else {"train": 16000, "test": 200}
    model = f"{MODEL} {TINY}" if tiny else MODEL
    command(f"prepare stepmath --output_dir {folder}/data {DATA.format(**sizes)}")
    runs = {name: folder / name for name in MODES}
    for name, flags in MODES.items():
        command(f"train --train_file {folder}/data/train.jsonl --output_dir {runs[name]} {flags} {model}")
        command(
            f"evaluate --model_path {runs[name]} --test_file {folder}/data/test.jsonl "
            f"--output_file {runs[name]}/test.jsonl --max_new_tokens {8 if tiny else 96} --batch_size 64 "
            "--similarity step-jepa"
        )
    command(f"report {' '.join(map(str, runs.values()))}")
    print(f"\nrun folders: {', '.join(map(str, runs.values()))}   ({time.time() - start:.0f} s in all)")
    print(f"look inside: stepjepa inspect --step_jepa --train_file {folder}/data/train.jsonl --model_name preset:tiny")


if __name__ == "__main__":
    given = arguments(__doc__, "quickstart")
    run(given.output_dir, tiny=given.tiny)
