"""Train plainly, with the papers' cosine and with InfoNCE; search with the embeddings. Offline, on a CPU.

The task: a sentence to a regular expression (NL-RX, generated). Three models begin from the same weights and see the
same records in the same order.

What you should see: trained with InfoNCE, a model finds the expression of most sentences that it never saw, by the
nearest embedding. With the cosine every text gets the same embedding, so that it finds next to nothing, as plain
training. A linear map behind plain training, which is fitted on the training pairs and trains no model, is the baseline
to beat: it finds more than InfoNCE. What 250 steps do not show: right answers, which need longer, and which objective
gives more of them, which takes several seeds. ``--full`` has both, plain training at equal FLOPs, and a task that a
small model learns.

Each command is in ``log.txt`` of the folder, with what it prints; ``-v`` prints both.
"""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from shown import new_folder, parser, step, use_free_cores

ARMS = {
    "plain": "--regular",
    "cosine": "--jepa_loss_type cosine --lbd 0.5",
    "infonce": "--jepa_loss_type infonce --lbd 0.1",
}

PRESET = "--model_name preset:tiny --learning_rate 2e-3"
SEARCHES = 3
SHOWN = 24
"""Sentences in the picture."""


@dataclass(frozen=True)
class Size:
    """The sizes of training and evaluation.

    ``full`` adds answers, an arm of plain training for the FLOPs of InfoNCE, and the step problems; ``problems`` are
    the flags of their data and training.
    """

    train: int = 4000
    test: int = 100
    steps: int = 250
    seeds: tuple[int, ...] = (82,)
    full: bool = False
    problems: tuple[str, str] = ("--train_size 8000 --test_size 100", "--learning_rate 1e-3")
    model: str = PRESET
    more: str = ""


FULL = Size(train=8000, test=300, steps=1000, seeds=(82, 23), full=True)
PRETRAINED = Size(train=600, steps=75, model="--lora --lora_rank 16 --learning_rate 1e-3")
SMALLEST = Size(
    train=20,
    test=5,
    steps=2,
    more="--batch_size 4 --warmup_steps 0 --logging_steps 1",
    problems=("--train_size 8 --test_size 2", "--max_steps 2 --logging_steps 1"),
)

BASELINE = "The linear map, fitted on the training pairs in seconds, is the baseline."
LATER = (
    "Answers need longer: {right} of {test} generated expressions are right after {steps} steps of plain training. "
    "make quickstart FULL=1 trains until there are some, with two seeds and at equal FLOPs."
)


class Quickstart:
    """One run of the quickstart: its folder, its size, and whether the commands are printed."""

    def __init__(self, folder: Path, size: Size, *, verbose: bool = False) -> None:
        self.folder, self.size, self.verbose = folder, size, verbose
        self.runs = {arm: [folder / f"{arm}-{seed}" for seed in size.seeds] for arm in ARMS}

    def run(self) -> str:
        """Make data, train and evaluate every arm, write the page, print what came out; returns it."""
        start, size, folder = time.time(), self.size, self.folder
        self.step(
            "data",
            f"prepare nl-rx --size {size.train} --output_file {folder}/train.jsonl "
            f"--test_size {size.test} --test_file {folder}/test.jsonl",
        )
        for arm, flags in ARMS.items():
            self.train(arm, flags, size.steps)
        if size.full:
            plain, infonce = (results(self.runs[arm][0])["flops"] for arm in ("plain", "infonce"))
            self.runs["plain-longer"] = [folder / f"plain-longer-{seed}" for seed in size.seeds]
            self.train("plain-longer", ARMS["plain"], round(size.steps * infonce / plain))
        for arm, folders in self.runs.items():
            baseline = f"--linear_map {folder}/train.jsonl" if arm.startswith("plain") else ""
            for each in folders:
                self.step(
                    f"evaluate {each.name}",
                    f"evaluate --model_path {each} --test_file {folder}/test.jsonl --output_file {each}/test.jsonl "
                    f"--max_new_tokens 64 --batch_size 50 --similarity llm-jepa --retrieval {baseline}",
                )
        self.draw(folder / "searches.png")
        folders = [each for arm in self.runs.values() for each in arm]
        if size.full:
            # Of the two arms of plain training that of equal FLOPs is compared with.
            folders = [each for arm, group in self.runs.items() if arm != "plain" for each in group]
            self.step("compare", f"compare {' '.join(map(str, folders))}")
        self.step("page", f"report {' '.join(map(str, folders))} --output_file {folder}/report.html")
        parts = [self.found(), self.table(), self.searches()]
        parts += [self.problems(), self.answers()] if size.full else [self.later()]
        said = "\n\n".join(parts)
        print(f"\n{said}\n\npage: {folder}/report.html, picture: {folder}/searches.png, commands: {folder}/log.txt")
        print(f"{time.time() - start:.0f} s in all")
        return said

    def step(self, name: str, line: str) -> None:
        """Run one command."""
        step(name, line, self.folder / "log.txt", verbose=self.verbose)

    def train(self, arm: str, flags: str, steps: int) -> None:
        """Train the models of an arm."""
        data = f"--train_file {self.folder}/train.jsonl --eval_file {self.folder}/test.jsonl"
        for each, seed in zip(self.runs[arm], self.size.seeds, strict=True):
            self.step(
                f"train {each.name}",
                f"train {data} {flags} {self.size.model} --output_dir {each} --max_steps {steps} --batch_size 16 "
                f"--grad_accum 1 --lr_scheduler_type cosine --warmup_steps {steps // 10} "
                f"--logging_steps {max(1, steps // 5)} --save_strategy no --finetune_seed {seed} {self.size.more}",
            )

    # -- what came out -------------------------------------------------------------------------------------------------

    def found(self) -> str:
        """Describe for how many sentences each arm finds the expression."""
        shares = {arm: self.hits(arm) for arm in self.runs}
        shares |= {f"{arm}, linear map": self.hits(arm, mapped=True) for arm in self.runs if arm.startswith("plain")}
        width = max(map(len, shares)) + 1
        lines = [f"Of {self.size.test} sentences that no model saw, the nearest expression is the right one for"]
        for arm, share in shares.items():
            lines.append(f"  {arm:<{width}}{share:6.1%}  {'#' * round(50 * share)}".rstrip())
        return "\n".join([*lines, BASELINE])

    def hits(self, arm: str, *, mapped: bool = False) -> float:
        """The share of the sentences whose nearest expression is right, as it is or behind a linear map; over seeds."""
        found = [summary(each)["retrieval"] for each in self.runs[arm]]
        hits = [(each["linear_map"] if mapped else each)["hits_at_1"]["mean"] for each in found]
        return float(sum(hits) / len(hits))

    def table(self) -> str:
        """The figures of every arm, means over its seeds."""
        rows = {arm: pd.DataFrame([row(each) for each in folders]).mean() for arm, folders in self.runs.items()}
        table = pd.DataFrame(rows).T
        table["tokens"] /= table["tokens"]["plain"]
        table = table.round({"LM loss": 3, "matched": 3, "shuffled": 3, "rank": 1, "tokens": 2, "right %": 1})
        meaning = (
            "LM loss of right answers in nats a token; cosine of a sentence and its expression (matched) and of "
            "another one (shuffled): where both are 1, all texts have one embedding; rank of the sentences' "
            "embeddings; tokens of a step over those of plain training."
        )
        columns = table if self.size.full else table.drop(columns="right %")
        return f"{textwrap.fill(meaning, 80)}\n\n{columns.to_string()}"

    def draw(self, path: Path) -> None:
        """Draw the cosines of the first held-out sentences with their expressions, for each arm and a linear map."""
        import numpy as np
        from matplotlib.figure import Figure

        from stepjepa import Jepa, fit_linear_map, read_records

        records = read_records(self.folder / "test.jsonl")[:SHOWN]
        models = {arm: Jepa.from_pretrained(self.runs[arm][0]) for arm in ARMS}
        # Where the evaluation, which tried every layer, has found most.
        place = summary(self.runs["plain"][0])["retrieval"]["linear_map"]["readout"]
        known = read_records(self.folder / "train.jsonl")
        fitted = fit_linear_map(models["plain"], known, layer=place["layer"], pooling=place["pooling"])
        shown: dict[str, tuple[str, dict[str, Any]]] = {arm: (arm, {}) for arm in ARMS}
        shown["plain"] = ("plain", {"layer": -1, "pooling": "mean"})
        shown["plain, linear map"] = ("plain", {"linear_map": fitted})
        figure = Figure(figsize=(8.6, 2.6), dpi=200, layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True)
        for axes, (name, (arm, read)) in zip(panels, shown.items(), strict=True):
            questions, answers = (models[arm].embed(records, side, **read) for side in ("source", "target"))
            image = axes.imshow(np.asarray(questions @ answers.T), vmin=-0.2, vmax=1, cmap="viridis")
            axes.set_title(f"{name}: {self.hits(arm, mapped='linear_map' in read):.0%} found", fontsize=9)
            axes.set_xlabel("its expression", fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
        panels[0].set_ylabel("a sentence", fontsize=9)
        figure.colorbar(image, ax=panels, shrink=0.85, label="cosine")
        figure.savefig(path)

    def searches(self) -> str:
        """The first sentences of the test file as queries, and the expressions that InfoNCE finds for them."""
        from stepjepa import Jepa, read_records

        records = read_records(self.folder / "test.jsonl")
        expressions = [record.answer for record in records]
        index = Jepa.from_pretrained(self.runs["infonce"][0]).index(expressions)
        queries = [str(record.messages[-2]["content"]) for record in records[:SEARCHES]]
        lines = ["Searches with infonce: the three nearest of all expressions, * the right one."]
        for query, record, hits in zip(queries, records, index.search(queries, k=3), strict=False):
            lines.append(f"\n{query}")
            lines += [f"  {'*' if hit.text == record.answer else ' '} {hit.score:.3f}  {hit.text}" for hit in hits]
        return "\n".join(lines)

    def later(self) -> str:
        """Describe the answers after so few steps."""
        right = round(self.size.test * summary(self.runs["plain"][0])["scores"]["equivalent"]["mean"])
        return textwrap.fill(LATER.format(right=right, test=self.size.test, steps=self.size.steps), 80)

    def problems(self) -> str:
        """Train plainly on step problems, which a small model learns, and return how many it gets right."""
        folder = self.folder / "problems"
        data, flags = self.size.problems
        self.step("problems", f"prepare stepmath --output_dir {folder} --max_steps 2 {data}")
        self.step(
            "train problems",
            f"train --train_file {folder}/train.jsonl --model_name preset:tiny --regular --output_dir {folder}/plain "
            f"--save_strategy no {flags}",
        )
        self.step(
            "evaluate problems",
            f"evaluate --model_path {folder}/plain --test_file {folder}/test.jsonl "
            f"--output_file {folder}/plain/test.jsonl",
        )
        of_problems = summary(folder / "plain")
        share = of_problems["scores"][of_problems["headline"]]["mean"]
        return f"Of {of_problems['n']} step problems, plain training with the same small model gets {share:.0%} right."

    def answers(self) -> str:
        """Three records with the answers of every arm."""
        texts = {arm: (folders[0] / "test.jsonl").read_text(encoding="utf-8") for arm, folders in self.runs.items()}
        answers = {arm: [json.loads(line) for line in text.splitlines()[:3]] for arm, text in texts.items()}
        lines = []
        for number, first in enumerate(answers["plain"]):
            lines += [
                first["prompt"].split("user\n")[-1].partition("<|")[0].strip(),
                f"  {'right:':<14}{first['truth']}",
            ]
            lines += [f"  {arm + ':':<14}{each[number]['generated'] or '(nothing)'}" for arm, each in answers.items()]
        return "\n".join(lines)


def results(folder: Path) -> dict[str, Any]:
    """Return the results in ``run.json`` of a finished run: steps, tokens, FLOPs."""
    values: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))["results"]
    return values


def summary(folder: Path) -> dict[str, Any]:
    """Return the summary of the evaluation of a run."""
    values: dict[str, Any] = json.loads((folder / "test.summary.json").read_text(encoding="utf-8"))
    return values


def row(folder: Path) -> dict[str, float]:
    """The figures of one model."""
    evaluated, spent = summary(folder), results(folder)
    similarity = evaluated["similarity"]
    return {
        "LM loss": evaluated["gold_loss"],
        "matched": similarity["matched_similarity"],
        "shuffled": similarity["shuffled_similarity"],
        "rank": similarity["source_rank"],
        "tokens": spent["tokens"] / spent["steps"],
        "right %": 100 * evaluated["scores"]["equivalent"]["mean"],
    }


def found_alone(said: str) -> str:
    """The first paragraph of the ending: how many sentences each arm finds the expression of."""
    return said.partition("\n\n")[0]


def paste(document: Path, mark: str, text: str) -> None:
    """Put a text between ``<!-- mark -->`` and ``<!-- end -->`` of a document."""
    before, start, rest = document.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise SystemExit(f"{document}: has no lines <!-- {mark} --> and <!-- end -->")
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
    return replace(chosen, seeds=FULL.seeds, full=True) if full else chosen


if __name__ == "__main__":
    words = parser(__doc__, "quickstart")
    words.add_argument(
        "--full", action="store_true", help="two seeds, 1,000 steps, equal FLOPs, answers, step problems"
    )
    words.add_argument("--model", default="", help="smollm2, or a folder or hub id: LoRA on a pretrained model")
    words.add_argument("--paste", type=Path, nargs="+", help="documents that get the ending, between its marks")
    words.add_argument("--picture", type=Path, help="a copy of the picture")
    words.add_argument("-v", "--verbose", action="store_true", help="print every command and what it prints")
    args = words.parse_args()
    use_free_cores()
    chosen = size_of(args.model, full=args.full, tiny=args.tiny)
    folder = new_folder("quickstart", args.output_dir)
    said = Quickstart(folder, chosen, verbose=args.verbose).run()
    if args.picture:
        shutil.copy(folder / "searches.png", args.picture)
    for page in args.paste or ():
        endings = {"quickstart": said, "quickstart found": found_alone(said)}
        for mark, text in ({"quickstart full": said} if args.full else endings).items():
            if f"<!-- {mark} -->" in page.read_text(encoding="utf-8"):
                paste(page, mark, text)
