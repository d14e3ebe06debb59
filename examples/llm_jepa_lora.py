"""LLM-JEPA with LoRA, from sentences to regular expressions. Offline, on a CPU.

LoRA adds a little to a model that knows something; on random weights it would show nothing. So a small base model is
trained first, with all of its weights, on generated NL-RX records. Then two adapters are trained on further records:
with regular fine-tuning, and with LLM-JEPA, where the sentence predicts the expression. The table puts the base and
both side by side, and the last command merges an adapter into a plain model folder.

What you should see: all three get about 60 % of the expressions right, with intervals that overlap; matched views are
far more alike than shuffled ones behind the adapter trained with LLM-JEPA, and not behind the other. What it does not
show: whether LLM-JEPA makes answers better (one seed, 200 sentences like those that the base was trained on), or how
LoRA compares with training all weights.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import time
from pathlib import Path

from shown import TINY, arguments, command

TRAINING = "--batch_size 16 --grad_accum 1 --lr_scheduler_type cosine --warmup_steps 20 --logging_steps 100"
BASE = "--regular --model_name preset:tiny --learning_rate 4e-3 --num_epochs 3 --save_strategy no"
ADAPTER = "--lora --lora_rank 16 --learning_rate 4e-3 --num_epochs 2 --save_strategy no"

WAYS = {
    "regular": "--regular",
    "llm-jepa": "--layout branched --predictors 1 --lbd 0.02 --jepa_loss_type infonce",
}


def run(folder: Path, *, tiny: bool = False) -> None:
    """Train the base, two adapters on it, evaluate all three, print one table, merge an adapter."""
    start = time.time()
    data = folder / "data"
    first, further, test = (24, 8, 3) if tiny else (8000, 4000, 200)
    training = f"{TRAINING} {TINY}" if tiny else TRAINING
    # Different seeds, different records; both test files are left alone by training.
    command(f"prepare nl-rx --size {first} --seed 1 --output_file {data}/base.jsonl")
    command(
        f"prepare nl-rx --size {further} --seed 2 --output_file {data}/further.jsonl "
        f"--test_size {test} --test_file {data}/nl-rx-test.jsonl"
    )
    runs = {"base": folder / "base"} | {name: folder / f"adapter-{name}" for name in WAYS}
    command(f"train --train_file {data}/base.jsonl --output_dir {runs['base']} {BASE} {training}")
    for name, flags in WAYS.items():
        command(
            f"train --train_file {data}/further.jsonl --model_name {runs['base']} --output_dir {runs[name]} "
            f"{flags} {ADAPTER} {training}"
        )
    for path in runs.values():
        command(
            f"evaluate --model_path {path} --test_file {data}/nl-rx-test.jsonl --output_file {path}/test.jsonl "
            f"--max_new_tokens {8 if tiny else 128} --batch_size 64 --similarity llm-jepa"
        )
    command(f"report {' '.join(map(str, runs.values()))}")
    command(f"export --model_path {runs['llm-jepa']} --output_dir {folder}/merged")
    print(f"\nrun folders: {', '.join(map(str, runs.values()))}   ({time.time() - start:.0f} s in all)")


if __name__ == "__main__":
    args = arguments(__doc__, "llm-jepa-lora")
    run(args.output_dir, tiny=args.tiny)
