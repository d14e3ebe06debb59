"""The recipe of two stages: pretrain on paraphrases from random weights, then fine-tune on labels. Offline, on a CPU.

Stage one sees sentences without labels: regular pretraining reads them one by one, LLM-JEPA also lets each predict a
paraphrase of itself. Stage two goes on from either, and from random weights of the same shape, with so few labelled
sentences that each of the 32 words that matter stands in about four of them.

What you should see: three runs of stage two in one table, told apart only by the weights that they began with. What it
does not show: which way is better. It is one seed, and sentences made of 32 words.

Every line that starts with ``$`` is a command that you can run yourself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from shown import TINY, arguments, command, write_jsonl

THINGS = ("story", "acting", "music", "ending", "dialogue", "camera work", "cast", "humour", "pace", "whole film")

# Synonyms, and in the same place what means the opposite.
GOOD = (
    ("funny", "hilarious", "amusing", "witty"),
    ("moving", "touching", "heartfelt", "tender"),
    ("clever", "smart", "ingenious", "inventive"),
    ("superb", "splendid", "marvellous", "wonderful"),
)
BAD = (
    ("boring", "tedious", "dull", "dreary"),
    ("cold", "heartless", "callous", "icy"),
    ("silly", "dumb", "foolish", "brainless"),
    ("awful", "dreadful", "terrible", "horrid"),
)

# Each says its thing with two words, so that words of a row are met together.
FORMS = (
    "the {thing} is {word} and {synonym}",
    "i found the {thing} {word} , even {synonym}",
    "a film whose {thing} is {word} , {synonym} even",
    "{word} and {synonym} , that is the {thing}",
    "the {thing} ? {word} , i say , {synonym}",
    "nobody could call the {thing} {opposite} : it is {word} , it is {synonym}",
)

# Stage one trains a tokenizer and a model of this shape; stage two takes both from its folder.
FIRST = "--pretrain --model_name preset:tiny --plain --train_all --num_epochs 1"
SECOND = "--regular --plain --num_epochs 30"
BOTH = (
    "--batch_size 16 --grad_accum 1 --lr_scheduler_type cosine --warmup_steps 20 --logging_steps 100 "
    "--save_strategy no --learning_rate {rate}"
)

WAYS = {
    "regular": "--regular",
    "llm-jepa": "--predictors 1 --lbd 0.1 --jepa_loss_type infonce",
}


def sentence(draw: random.Random, thing: str, good: bool, row: int) -> str:
    """One way to say that something is good, or bad, in the manner of a row of words.

    Args:
        draw: chooses form and words.
        thing: what it is said of.
        good: what is said.
        row: which words it is said with.
    """
    words, other = (GOOD, BAD) if good else (BAD, GOOD)
    word, synonym = draw.sample(words[row], 2)
    return draw.choice(FORMS).format(thing=thing, word=word, synonym=synonym, opposite=draw.choice(other[row]))


def paraphrases(draw: random.Random, count: int) -> Iterator[dict[str, object]]:
    """Groups of three sentences that say the same, as ``stepjepa prepare paraphrase`` reads them."""
    for _ in range(count):
        thing, good, row = draw.choice(THINGS), draw.random() < 0.5, draw.randrange(len(GOOD))
        yield {"sentences": [sentence(draw, thing, good, row) for _ in range(3)]}


def reviews(draw: random.Random, count: int) -> Iterator[dict[str, object]]:
    """Labelled sentences, half of them good, as ``stepjepa prepare rotten-tomatoes`` reads them."""
    for number in range(count):
        text = sentence(draw, draw.choice(THINGS), number % 2 == 1, draw.randrange(len(GOOD)))
        yield {"text": text, "label": number % 2}


def make_data(folder: Path, *, tiny: bool = False, seed: int = 82) -> None:
    """Write the files of both stages."""
    draw = random.Random(seed)
    raw = {
        "paraphrase": paraphrases(draw, 8 if tiny else 3000),
        "train": reviews(draw, 8 if tiny else 64),
        "test": reviews(draw, 4 if tiny else 400),
    }
    for name, rows in raw.items():
        write_jsonl(folder / f"raw_{name}.jsonl", rows)
        kind = "paraphrase" if name == "paraphrase" else "rotten-tomatoes"
        command(f"prepare {kind} --input_file {folder}/raw_{name}.jsonl --output_file {folder}/{name}.jsonl")


def run(folder: Path, *, tiny: bool = False) -> None:
    """Make the data, run both stages three ways, print one table."""
    start = time.time()
    data = folder / "data"
    make_data(data, tiny=tiny)
    both = f"{BOTH} {TINY}" if tiny else BOTH
    for name, flags in WAYS.items():
        command(
            f"train --train_file {data}/paraphrase.jsonl --output_dir {folder}/pretrained-{name} {FIRST} {flags} "
            + both.format(rate="2e-3")
        )
    # Random weights with configuration and tokenizer of a pretrained folder: what stage two is without stage one.
    models = {"none": f"{folder}/pretrained-regular --pretrain"}
    models |= {name: f"{folder}/pretrained-{name}" for name in WAYS}
    runs = {name: folder / f"after-{name}" for name in models}
    for name, model in models.items():
        command(
            f"train --train_file {data}/train.jsonl --output_dir {runs[name]} --model_name {model} {SECOND} "
            + both.format(rate="1e-3")
        )
        command(
            f"evaluate --model_path {runs[name]} --test_file {data}/test.jsonl --output_file {runs[name]}/test.jsonl "
            "--plain --startswith --max_new_tokens 8 --batch_size 64"
        )
    command(f"report {' '.join(map(str, runs.values()))}")
    print(
        "\nOne seed, and sentences made of 32 words: this shows that the recipe runs and what its commands are. Which "
        "way is better\nit does not show: with other labelled sentences the three came out in another order. For an "
        "answer run several seeds on\nreal data and compare them ('stepjepa sweep', 'stepjepa compare')."
    )
    print(f"run folders: {folder}/pretrained-*, {folder}/after-*   ({time.time() - start:.0f} s in all)")


if __name__ == "__main__":
    args = arguments(__doc__, "pretrain-finetune")
    run(args.output_dir, tiny=args.tiny)
