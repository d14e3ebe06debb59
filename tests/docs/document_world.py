"""A folder in which the commands of a document can be run: small data, a small model, runs; what makes them quick."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from document_blocks import ROOT
from made_up_runs import make_run
from stepjepa.cli import main, normalise

RECORDS = ("train.jsonl", "test.jsonl", "dev.jsonl", "data.jsonl", "corpus.jsonl", "mine.jsonl")

HUB_NAME = re.compile(r"^(?:M|(?:meta-llama|Qwen|HuggingFaceTB|google|allenai)/[\w.-]+)$")

# Command -> flags that are set, whatever the document says; None leaves a flag out.
SMALL: dict[str, dict[str, str | None]] = {
    "train": {"--max_steps": "2", "--batch_size": "4", "--grad_accum": "1", "--num_epochs": None, "--bf16": None},
    "evaluate": {"--max_examples": "4", "--max_new_tokens": "3"},
    "estimate": {"--batch_size": "4"},
    "verify": {"--max_records": "8"},
    "analyze": {"--max_examples": "12"},
    # A grid is planned, and trained by tests/experiments.
    "sweep": {"--dry_run": ""},
}
# Flag -> its value, where a document names it.
SMALLER = {"--size": "20", "--train_size": "40", "--test_size": "5", "--num_samples": "2", "--eval_generate": "2"}
SMALLER |= dict.fromkeys(("--eval_steps", "--save_steps", "--warmup_steps"), "1")
OUTPUTS = ("--output_dir", "--output_file", "--plot", "--png")
USES = re.compile(r"^(?:runs|sweeps)/")


class World:
    """One page's folder; its commands find there what those before them made, or a stand-in.

    Args:
        folder: an empty one, which the process is in.
        shared: from :func:`make_shared`.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder, self._shared = folder, shared
        for name in RECORDS:
            shutil.copy(shared / ("data/test.jsonl" if name == "test.jsonl" else "data/train.jsonl"), folder / name)
        shutil.copytree(shared / "M", folder / "M")
        rows = [
            "question,answer",
            *(f'What is {n} and 2?,"{n} + 2 = {n + 2}.\n\nThe answer is {n + 2}."' for n in range(9)),
        ]
        (folder / "mine.csv").write_text("\n".join(rows), encoding="utf-8")
        # Where examples/sweep.yaml has its data.
        shutil.copytree(shared / "data", folder / "runs" / "sweep-data")
        for name in ("examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        tested = [json.loads(line) for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
        said = [{"index": i, "generated": record["messages"][-1]["content"]} for i, record in enumerate(tested)]
        (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said), encoding="utf-8")
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
        if name == "prepare" and flags[:1] != ["stepmath"]:
            return [name, *_with(flags, {}, SMALLER)]
        flags = ["M" if HUB_NAME.match(flag) else flag for flag in flags]
        always = {} if {"--dry_run"} & {*flags} else SMALL.get(name, {})
        return [name, *_with(flags, always, SMALLER)]

    def run(self, words: list[str]) -> int:
        """Run a command of ours, with globs followed and what it needs at its place."""
        output = {words[i + 1] for i, word in enumerate(words) if word in OUTPUTS}
        for word in words[1:]:
            if USES.match(word) and word not in output and not _followed(word):
                self._stand_in(word)
        for name in output:
            self._remove(Path(name))
        followed = [found for word in words for found in (_followed(word) if "*" in word else [word])]
        return main(followed)

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

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
            path.with_suffix(".summary.json").unlink(missing_ok=True)


def _followed(word: str) -> list[str]:
    """What the shell makes of a relative path."""
    return sorted(map(str, Path().glob(word)))


def _with(flags: list[str], always: dict[str, str | None], named: dict[str, str]) -> list[str]:
    kept, skip = [], False
    for position, flag in enumerate(flags):
        if skip:
            skip = False
            continue
        if flag in always or flag in named:
            skip = position + 1 < len(flags) and not flags[position + 1].startswith("--")
            if flag not in always:
                kept += [flag, named[flag]]
            continue
        kept.append(flag)
    for flag, value in always.items():
        if value is not None and not (flag == "--max_steps" and "--same_flop" in flags):
            kept += [flag, value] if value else [flag]
    return kept


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
