"""One model that answers and retrieves: train once, then generate an answer and find the nearest known ones. Offline.

A model is trained on sentences and regular expressions with the LM loss and InfoNCE. Then each of three held-out
sentences is answered twice: by generating an expression, and by searching the expressions of the training file for the
five whose embeddings are nearest to that of the sentence. Automata judge which of them match the same lines as the
right one.

What you should see: the model does both. Generated answers are right where the sentence has words that the model has
learnt to translate; the nearest known expressions are alike in meaning, and right where an equal one is known. What it
does not show: that InfoNCE improves the generated answers; over several seeds it does not (docs/results.md).

Lines that start with ``$`` are commands that you can run yourself; the rest is Python. With models that are there
already it trains nothing; with a plainly trained one beside it, it makes text and picture of docs/how-to/retrieve.md:

    python examples/answer_or_retrieve.py --model_path runs/experiment/retrieval/separate-infonce/seed82 \\
        --plain_path runs/experiment/retrieval/regular-1.35x/seed82 --picture docs/plots/answer-or-retrieve.png \\
        --known_file ../shared/data/llm_jepa/synth_train.jsonl --test_file ../shared/data/llm_jepa/synth_test.jsonl \\
        --paste docs/how-to/retrieve.md
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from quickstart import paste
from shown import TINY, command, new_folder, parser, user_errors
from sklearn.decomposition import PCA

from stepjepa import Jepa, Record, read_records
from stepjepa.tasks.nl_rx import judge

SHOWN, NEAREST, JUDGED, DRAWN = 3, 5, 100, 40
"""Questions on the screen, nearest known answers of each, questions that the last lines count, pairs in the picture."""

WIDTH = 80


def train(folder: Path, *, tiny: bool) -> tuple[Path, Path, Path]:
    """Generate sentences and expressions and train on them; returns run folder, training file and test file."""
    known, test, run = folder / "nl-rx-train.jsonl", folder / "nl-rx-test.jsonl", folder / "model"
    size, more = ("--size 64 --test_size 8", TINY) if tiny else ("--size 4000 --test_size 200", "")
    command(f"prepare nl-rx {size} --seed 1 --output_file {known} --test_file {test}")
    more = more or "--num_epochs 5 --batch_size 32 --warmup_steps 0.05 --logging_steps 100"
    command(
        f"train --train_file {known} --model_name preset:tiny --output_dir {run} --jepa_loss_type infonce --lbd 0.1 "
        f"--layout separate --predictors 3 --learning_rate 4e-3 --lr_scheduler_type cosine --grad_accum 1 "
        f"--finetune_seed 82 --save_strategy no {more}"
    )
    return run, known, test


def question_of(record: Record) -> str:
    """Return the user's question."""
    return str(record.messages[-2]["content"])


def is_right(answer: str, truth: str) -> bool:
    """Whether two expressions match the same lines."""
    return judge(answer, truth)[0] == "equivalent"


def show(jepa: Jepa, known: Sequence[Record], test: Sequence[Record]) -> str:
    """Answers and nearest known expressions of a few questions, and how often each is right."""
    asked = test[:JUDGED]
    questions, truths = [question_of(record) for record in asked], [record.answer for record in asked]
    answers = jepa.answers(questions, max_new_tokens=64, batch_size=50)
    index = jepa.index([record.answer for record in known])
    hits = index.search(questions, k=NEAREST)
    answered = [is_right(*both) for both in zip(answers, truths, strict=True)]
    retrieved = [[is_right(hit.text, truth) for hit in row] for row, truth in zip(hits, truths, strict=True)]
    lines = []
    for question, truth, answer, right, row, verdicts in zip(
        *(questions[:SHOWN], truths, answers, answered, hits, retrieved), strict=False
    ):
        lines += ["", f"  {question}", f"    {'right:':<11}{truth}", f"    {'answers:':<11}{answer}{_mark(right)}"]
        for hit, verdict in zip(row, verdicts, strict=True):
            lines.append(f"    {f'finds {hit.score:.2f}:':<12}{hit.text}"[: WIDTH - 7] + _mark(verdict))
    first, among = [row[0] for row in retrieved], np.mean([any(row) for row in retrieved])
    either = [one or other for one, other in zip(answered, first, strict=True)]
    lines += [
        "",
        f"Of {len(asked)} held-out sentences, whose expressions are compared with {len(index.texts):,} known ones:",
        f"  the generated answer is right   {np.mean(answered):5.0%}",
        f"  the nearest known one is right  {np.mean(first):5.0%}   one of the five nearest {among:.0%}",
        f"  one of the two is right         {np.mean(either):5.0%}",
    ]
    return "\n".join(lines[1:])


def _mark(right: bool) -> str:
    return "  <- right" if right else ""


def draw(models: dict[str, Jepa], test: Sequence[Record], path: Path) -> None:
    """Draw sentences and expressions of each model on two principal directions, with lines between partners."""
    figure = Figure(figsize=(5 * len(models), 4.6), layout="constrained")
    for axes, (title, jepa) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        views = jepa.embed_pairs(test)
        sides = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in (views.source, views.target)]
        pca = PCA(n_components=2, svd_solver="full").fit(np.concatenate(sides))
        source, target = (pca.transform(side[:DRAWN]) for side in sides)
        for ends in zip(source, target, strict=True):
            axes.plot(*np.transpose(ends), color="0.7", linewidth=0.8, zorder=1)
        axes.scatter(*source.T, marker="o", s=22, label="sentence", zorder=2)
        axes.scatter(*target.T, marker="^", s=22, label="expression", zorder=2)
        shares = "{:.0%} and {:.0%} of variance".format(*pca.explained_variance_ratio_)
        axes.set(title=title, xlabel=f"two principal directions, {shares}", xticks=[], yticks=[])
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def run(folder: Path, *, tiny: bool = False) -> str:
    """Train, show, and return what was shown."""
    model, known, test = train(folder, tiny=tiny)
    text = show(Jepa.from_pretrained(model), read_records(known), read_records(test))
    print(f"\n{text}")
    return text


def show_trained(args: argparse.Namespace) -> None:
    """Show what a trained model answers and finds; write the document and the picture that are asked for."""
    trained, records = Jepa.from_pretrained(args.model_path), read_records(args.test_file)
    text = show(trained, read_records(args.known_file), records)
    print(text)
    if args.paste:
        paste(args.paste, "answer or retrieve", text)
    if args.picture:
        plain = Jepa.from_pretrained(args.plain_path)
        draw({"plain training": plain, "with InfoNCE": trained}, records[:JUDGED], args.picture)


def read_arguments(words: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; arguments that have no effect, or lack another one, are an error."""
    words.add_argument("--model_path", type=Path, help="a run folder, instead of training one")
    words.add_argument("--known_file", type=Path, help="the records whose answers are known, for --model_path")
    words.add_argument("--test_file", type=Path, help="the records that are asked, for --model_path")
    words.add_argument("--plain_path", type=Path, help="a run folder of plain training, for --picture")
    words.add_argument("--picture", type=Path, help="a picture of both models to write, for --model_path")
    words.add_argument("--paste", type=Path, help="a document that gets what is shown, between its marks for it")
    args = words.parse_args()
    of_model = [args.known_file, args.test_file, args.plain_path, args.picture, args.paste]
    if args.model_path is None and any(of_model):
        words.error("files, pictures and documents need --model_path")
    if args.model_path is not None and not (args.known_file and args.test_file):
        words.error("--model_path needs --known_file and --test_file")
    if (args.picture is None) != (args.plain_path is None):
        words.error("--picture and --plain_path need each other")
    return args


if __name__ == "__main__":
    args = read_arguments(parser(__doc__, "answer-or-retrieve"))
    with user_errors():
        if args.model_path is None:
            run(new_folder("answer-or-retrieve", args.output_dir), tiny=args.tiny)
        else:
            show_trained(args)
