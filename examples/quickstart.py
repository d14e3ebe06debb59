"""Train plainly, with the papers' cosine and with InfoNCE; show what becomes of the embeddings. Offline, on a CPU.

The task: a sentence to a regular expression (NL-RX, generated). Three models begin from the same weights and see the
same records in the same order.

What you should see: with the cosine every text gets the same embedding, so matched and shuffled pairs are equally alike
and the rank is small; InfoNCE keeps them apart. What 250 steps do not show: accuracy, which takes about 1,000 of them,
and which objective is better, which takes several seeds. ``--full`` has both, and plain training at equal FLOPs.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import json
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from shown import command, new_folder, parser

ARMS = {
    "plain": "--regular",
    "cosine": "--jepa_loss_type cosine --lbd 0.5",
    "infonce": "--jepa_loss_type infonce --lbd 0.1",
}

PRESET = "--model_name preset:tiny --learning_rate 2e-3"


@dataclass(frozen=True)
class Size:
    """How much is trained and evaluated.

    ``equal_flops`` adds an arm: plain training for the FLOPs of InfoNCE. ``accuracy`` is shown where it says something.
    """

    train: int = 4000
    test: int = 100
    steps: int = 250
    seeds: tuple[int, ...] = (82,)
    equal_flops: bool = False
    accuracy: bool = False
    model: str = PRESET
    more: str = ""


FULL = Size(train=8000, test=300, steps=1000, seeds=(82, 23), equal_flops=True, accuracy=True)
PRETRAINED = Size(train=600, steps=75, accuracy=True, model="--lora --lora_rank 16 --learning_rate 1e-3")
SMALLEST = Size(train=16, test=3, steps=2, more="--batch_size 4 --warmup_steps 0 --logging_steps 1")

MEANING = (
    "Held-out records: LM loss, cosine of matched and of shuffled pairs of views,\n"
    "effective rank of the sources; tokens and time of a step over plain training."
)

SHORT_RUN = (
    "What this shows: whether views are told apart (matched far above shuffled). What it can't show: which objective "
    "gives better answers. Accuracy takes about 1,000 steps and several seeds: make quickstart FULL=1."
)


def run(folder: Path, size: Size) -> str:
    """Make data, train and evaluate every arm, write the page, print the table; returns it."""
    start = time.time()
    data = f"--train_file {folder}/train.jsonl --eval_file {folder}/test.jsonl"
    command(
        f"prepare nl-rx --size {size.train} --output_file {folder}/train.jsonl "
        f"--test_size {size.test} --test_file {folder}/test.jsonl"
    )
    runs = {arm: [folder / f"{arm}-{seed}" for seed in size.seeds] for arm in ARMS}
    for arm, flags in ARMS.items():
        for each, seed in zip(runs[arm], size.seeds, strict=True):
            train(each, f"{data} {flags}", size.steps, seed, size)
    if size.equal_flops:
        plain, infonce = (results(runs[arm][0])["flops"] for arm in ("plain", "infonce"))
        runs["plain-longer"] = [folder / f"plain-longer-{seed}" for seed in size.seeds]
        for each, seed in zip(runs["plain-longer"], size.seeds, strict=True):
            train(each, f"{data} {ARMS['plain']}", round(size.steps * infonce / plain), seed, size)
    folders = [each for arm in runs.values() for each in arm]
    for each in folders:
        command(
            f"evaluate --model_path {each} --test_file {folder}/test.jsonl --output_file {each}/test.jsonl "
            "--max_new_tokens 64 --batch_size 50 --similarity llm-jepa"
        )
    if size.equal_flops:
        command(f"compare {' '.join(str(each) for arm in runs if arm != 'plain' for each in runs[arm])}")
    command(f"report {' '.join(map(str, folders))} --output_file {folder}/report.html")
    table, answers = describe(runs)
    found = f"{MEANING}\n\n{(table if size.accuracy else table.drop(columns='right %')).to_string()}\n\n{answers}"
    if not size.accuracy:
        found += "\n\n" + textwrap.fill(SHORT_RUN, 80)
    print("\n" + found)
    print(f"\npage: {folder}/report.html   ({time.time() - start:.0f} s in all)")
    return found


def train(folder: Path, flags: str, steps: int, seed: int, size: Size) -> None:
    """Train one model."""
    command(
        f"train {flags} {size.model} --output_dir {folder} --max_steps {steps} --batch_size 16 --grad_accum 1 "
        f"--lr_scheduler_type cosine --warmup_steps {steps // 10} --logging_steps {max(1, steps // 5)} "
        f"--save_strategy no --finetune_seed {seed} {size.more}"
    )


def results(folder: Path) -> dict[str, Any]:
    """What ``run.json`` says of a finished run: steps, tokens, FLOPs, and seconds of training."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return run["results"] | {"seconds": sum(launch["seconds"] for launch in run["launches"])}


def describe(runs: dict[str, list[Path]]) -> tuple[pd.DataFrame, str]:
    """The table, means over seeds, and three records with the answers of every arm."""
    rows = {arm: pd.DataFrame([row(folder) for folder in folders]).mean() for arm, folders in runs.items()}
    table = pd.DataFrame(rows).T
    for column in ("tokens/step", "time/step"):
        table[column] = (table[column] / table[column]["plain"]).round(2)
    table = table.round({"LM loss": 3, "matched": 3, "shuffled": 3, "rank": 1, "right %": 1})
    lines = {arm: (folders[0] / "test.jsonl").read_text(encoding="utf-8") for arm, folders in runs.items()}
    answers = {arm: [json.loads(line) for line in text.splitlines()[:3]] for arm, text in lines.items()}
    told = []
    for number, asked in enumerate(answers["plain"]):
        told += [asked["prompt"].split("user\n")[-1].partition("<|")[0].strip(), f"  {'right:':<14}{asked['truth']}"]
        told += [f"  {arm + ':':<14}{each[number]['generated'] or '(nothing)'}" for arm, each in answers.items()]
    return table, "\n".join(told)


def row(folder: Path) -> dict[str, float]:
    """The figures of one model."""
    summary = json.loads((folder / "test.summary.json").read_text(encoding="utf-8"))
    similarity, spent = summary["similarity"], results(folder)
    return {
        "LM loss": summary["gold_loss"],
        "matched": similarity["matched_similarity"],
        "shuffled": similarity["shuffled_similarity"],
        "rank": similarity["source_rank"],
        "tokens/step": spent["tokens"] / spent["steps"],
        "time/step": spent["seconds"] / spent["steps"],
        "right %": 100 * summary["scores"]["equivalent"]["mean"],
    }


def paste(document: Path, mark: str, text: str) -> None:
    """Put a text between ``<!-- mark -->`` and ``<!-- end -->`` of a document."""
    before, start, rest = document.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    document.write_text(f"{before}{start}```text\n{text}\n```\n{end}{after}", encoding="utf-8")


def size_of(model: str, *, full: bool, tiny: bool) -> Size:
    """The size that the arguments ask for."""
    if tiny:
        return SMALLEST
    if not model:
        return FULL if full else Size()
    if model == "smollm2":
        from smollm2 import converted

        model = str(converted())
    chosen = replace(PRETRAINED, model=f"--model_name {model} {PRETRAINED.model}")
    return replace(chosen, seeds=FULL.seeds, equal_flops=True) if full else chosen


if __name__ == "__main__":
    words = parser(__doc__, "quickstart")
    words.add_argument("--full", action="store_true", help="two seeds, 1,000 steps, plain training at equal FLOPs")
    words.add_argument("--model", default="", help="smollm2, or a folder or hub id: LoRA on a pretrained model")
    words.add_argument("--paste", type=Path, help="a document that gets the table, between its marks for it")
    given = words.parse_args()
    said = run(new_folder("quickstart", given.output_dir), size_of(given.model, full=given.full, tiny=given.tiny))
    if given.paste:
        paste(given.paste, "quickstart full" if given.full else "quickstart", said)
