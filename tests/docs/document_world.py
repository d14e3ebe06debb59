"""A folder in which the commands of a document can be run: small data, a small model, runs; what makes them quick."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

from document_blocks import ROOT
from made_up_runs import make_run
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main, normalise

RECORDS = ("train.jsonl", "test.jsonl", "dev.jsonl", "data.jsonl", "corpus.jsonl", "mine.jsonl")

HUB_NAME = re.compile(r"^(?:M|(?:meta-llama|Qwen|HuggingFaceTB|google|allenai)/[\w.-]+)$")

# Command, with the kind of a preparation -> flags that are set, whatever the document says; None leaves a flag out.
SMALL: dict[str, dict[str, str | None]] = {
    "train": {"--max_steps": "2", "--batch_size": "4", "--grad_accum": "1", "--num_epochs": None, "--bf16": None},
    "evaluate": {"--max_examples": "4", "--max_new_tokens": "3"},
    "estimate": {"--batch_size": "4"},
    "verify": {"--max_records": "8"},
    "analyze": {"--max_examples": "12"},
    # Its own sizes are those of an experiment.
    "prepare stepmath": {"--train_size": "40", "--test_size": "12"},
    # A grid is planned, and trained by tests/compare.
    "sweep": {"--dry_run": ""},
}
# Flag -> its value, where a document names it.
SMALLER = {"--size": "20", "--train_size": "40", "--test_size": "5", "--num_samples": "2", "--eval_generate": "2"}
SMALLER |= dict.fromkeys(("--eval_steps", "--save_steps", "--warmup_steps"), "1")
OUTPUTS = ("--output_dir", "--output_file", "--png")


def generated(words: list[str]) -> list[str]:
    """The files of records that a command of ``prepare`` writes."""
    result = []
    for flag, value in pairwise(words[1:]):
        if flag == "--output_dir":
            result += [str(Path(value, name)) for name in ("train.jsonl", "test.jsonl")]
        elif flag in ("--output_file", "--test_file"):
            result.append(value)
    return result


class World:
    """One page's folder, in which the process is; its commands find there what those before them made, or a stand-in.

    ``shared`` is the folder of :func:`make_shared`.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self._shared = folder, shared
        for name in RECORDS:
            shutil.copy(shared / ("data/test.jsonl" if name == "test.jsonl" else "data/train.jsonl"), folder / name)
        shutil.copytree(shared / "M", folder / "M")
        rows = [f'What is {n} and 2?,"{n} + 2 = {n + 2}.\n\nThe answer is {n + 2}."' for n in range(9)]
        (folder / "mine.csv").write_text("\n".join(["question,answer", *rows]), encoding="utf-8")
        for name in ("examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        tested = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = [{"index": i, "generated": record["messages"][-1]["content"]} for i, record in enumerate(tested)]
        write_jsonl(folder / "said.jsonl", answers)
        self._before: dict[str, list[str]] = {}

    def whole(self, words: list[str]) -> list[str]:
        """A command with ``...`` replaced by the flags of the page's last command of that name, its output left out."""
        name, flags = words[0], [word for word in words[1:] if not word.startswith("[")]
        if "..." in flags:
            flags = [*self._before.get(name, []), *flags[flags.index("...") + 1 :]]
        self._before[name] = flags
        return [name, *flags]

    def small(self, words: list[str]) -> list[str]:
        """The same command on small material."""
        name, *flags = normalise(words)
        always = {} if "--dry_run" in flags else SMALL.get(f"prepare {flags[0]}" if name == "prepare" else name, {})
        if "--same_flop" in flags:
            always = {flag: value for flag, value in always.items() if flag != "--max_steps"}
        result, values = [], iter([*flags, "--"])
        word = next(values)
        while word != "--":
            value = next(values)
            if word in always or word in SMALLER:
                result += [] if word in always else [word, SMALLER[word]]
                word = value if value.startswith("--") else next(values)
            else:
                result.append("M" if HUB_NAME.match(word) else word)
                word = value
        return [
            name,
            *result,
            *(part for flag, value in always.items() if value is not None for part in (flag, value) if part),
        ]

    def run(self, words: list[str]) -> int:
        """Run a command of ours, with globs followed and what it needs at its place."""
        output = {words[i + 1] for i, word in enumerate(words) if word in OUTPUTS}
        if words[0] == "prepare":  # a page that generates its files begins without them
            output = {each for each in output if each != "."} | set(generated(words))
        for word in words[1:]:
            if re.match("(?:runs|sweeps)/", word) and word not in output and not list(Path().glob(word)):
                self._stand_in(word)
        for path in map(Path, output):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.with_suffix(".summary.json").unlink(missing_ok=True)
        followed = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in words]
        return main([word for part in followed for word in part])

    def _stand_in(self, word: str) -> None:
        """A trained and evaluated run, or two arms with two seeds each."""
        if word.startswith("sweeps/"):
            sweep, trials = Path(*Path(word).parts[:2]), []
            for arm in ("regular", "step-jepa"):
                for seed, right in ((1, "1101"), (2, "1011" if arm == "regular" else "1010")):
                    trials.append({"name": f"{arm}/seed{seed}", "arm": arm, "label": arm})
                    run = sweep / arm / f"seed{seed}"
                    make_run(run, right, seed=seed, jepa={"mode": arm}, training={"logging_steps": 10})
            (sweep / "sweep.json").write_text(json.dumps({"grid": {"baseline": "regular"}, "trials": trials}))
        else:
            kind = "regular" if "regular" in word else "step-jepa"
            shutil.copytree(self._shared / kind, Path(*Path(word).parts[:2]))


def make_shared(folder: Path) -> Path:
    """Data, a model folder ``M`` and a run of each mode with an evaluation, which all pages share."""
    made = f"prepare stepmath --output_dir {folder}/data --train_size 40 --test_size 12 --max_steps 2"
    assert main(made.split()) == 0
    for name, flags in (("regular", "--regular"), ("step-jepa", "--step_jepa --predictors 2")):
        train = f"train --train_file {folder}/data/train.jsonl --output_dir {folder}/{name} --model_name preset:tiny "
        assert main(f"{train} {flags} --max_steps 2 --batch_size 4 --grad_accum 1".split()) == 0
        evaluate = f"evaluate --model_path {folder}/{name} --test_file {folder}/data/test.jsonl --max_new_tokens 3 "
        evaluate += "--max_examples 4 "
        assert main([*evaluate.split(), "--output_file", f"{folder}/{name}/test.jsonl"]) == 0
    assert main(["export", "--model_path", f"{folder}/regular", "--output_dir", f"{folder}/M"]) == 0
    return folder
