"""Every run of the experiment as a row of one table: its scores, what they are made of, its costs and embeddings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from run_figures import Figures, read_figures
from splits import read_splits
from untouched import read_weights

from stepjepa.study.statistics import PairedT, paired_t

BASELINE = "regular"
# Ends the name of a file of arms that a later version trained again.
AGAIN = "-again"
# Arms with the labels of the published code, which are compared with each other only.
REFERENCE = "-reference"


class Test(NamedTuple):
    """The data, the test and the model of the runs in a file of figures.

    ``split`` is the test set in ``splits.json``; ``whole``: they trained on all of its training file, so that the file
    says which answers are new to them; ``weighted``: its records have weights, see ``untouched.py``; ``tabled``: its
    arms are in the table of all arms, not in a section of their own alone.
    """

    title: str
    split: str | None = None
    whole: bool = False
    weighted: bool = False
    tabled: bool = True


# By the file of figures; the other files are of validation sets, on which settings were chosen.
TESTS = {
    "synth": Test("synth", "synth", whole=True),
    "synth-again": Test("synth, trained again", "synth", whole=True),
    "synth-untouched": Test("synth, untouched test", "untouched", weighted=True, tabled=False),
    "synth-small": Test("synth, preset:small", "synth", whole=True),
    "synth-long": Test("synth, 12 epochs", "synth", whole=True),
    "synth-1-2": Test("synth, 4,000 records, 12 epochs", "synth"),
    "synth-1-4": Test("synth, 2,000 records, 12 epochs", "synth", tabled=False),
    "synth-1-8": Test("synth, 1,000 records, 12 epochs", "synth", tabled=False),
    "synth-1-16": Test("synth, 500 records, 12 epochs", "synth", tabled=False),
    "limited-500-test": Test("500 records, own length and rate", "untouched", weighted=True, tabled=False),
    "limited-2000-test": Test("2,000 records, own length and rate", "untouched", weighted=True, tabled=False),
    "synth-finetune": Test("synth, pretrained on texts", "synth", whole=True),
    "smollm2": Test("synth", "synth", tabled=False),
    "smollm2-turk": Test("TURK", "turk", tabled=False),
    "smollm2-250": Test("synth, 250 records", "synth", tabled=False),
    "smollm2-full": Test("synth, all weights", "synth", tabled=False),
    "smollm2-recipe": Test("synth, published recipe", "synth", whole=True, tabled=False),
    "synth-copying": Test("synth, one setting changed", "synth", tabled=False),
    "turk-fresh": Test("TURK, ten other seeds", "turk", tabled=False),
    "retrieval": Test("synth, answers and retrieval", "synth", whole=True, tabled=False),
    "retrieval-turk": Test("TURK, answers and retrieval", "turk", whole=True, tabled=False),
    "retrieval-synth-128": Test(
        "synth, 16 epochs of 128 pairs, answers and retrieval", "synth", whole=True, tabled=False
    ),
    "retrieval-turk-128": Test("TURK, 16 epochs of 128 pairs, answers and retrieval", "turk", whole=True, tabled=False),
    "retrieval-spider": Test("Spider, answers and retrieval", tabled=False),
    "retrieval-small": Test("synth, preset:small, answers and retrieval", "synth", whole=True, tabled=False),
    "retrieval-smollm2": Test("synth, SmolLM2, answers and retrieval", "synth", tabled=False),
    "retrieval-smollm2-turk": Test("TURK, SmolLM2, answers and retrieval", "turk", tabled=False),
    "retrieval-smollm2-spider": Test("Spider, SmolLM2, answers and retrieval", tabled=False),
    "retrieval-sums": Test("sums, answers and retrieval", tabled=False),
    "retrieval-smollm2-sums": Test("sums, SmolLM2, answers and retrieval", tabled=False),
    "turk": Test("TURK", "turk", whole=True),
    "turk-again": Test("TURK, trained again", "turk", whole=True),
    "steps-test": Test("problems of two steps"),
    "steps-3-test": Test("problems of two and three steps"),
    "gsm8k": Test("GSM8K"),
}
# FLOPs over the derived ones, which leave out the networks of a user's own terms: 'train --track_flop' measures both,
# and the mean of ten steps of synth is this (docs/log.md, 2026-11-25).
NETWORKS = {"next-latent": 1.072, "next-latent-wrong": 1.072, "next-latent-prompt": 1.069, "nitp": 1.024}
# FLOPs count as equal within this share: networks of terms have made them differ by more than the 2 % of 'compare'.
SAME_FLOPS = 0.03
# Below this share, in per cent, of a few records nothing is said of copying.
_LEARNT = 10
SIMILARITY = ("matched_similarity", "shuffled_similarity", "source_rank", "target_rank", "retrieval_top1")


def read(directory: Path) -> pd.DataFrame:
    """All runs of all files of figures; shares in per cent.

    Columns: ``file``, ``arm``, ``seed``, ``records``; ``right``, the headline score, and of the tests of
    regular expressions ``number``, ``rest``, ``language seen``, ``language new``, ``rest, language new``,
    ``shape new``, ``trivial`` (see ``splits.py``); ``exact``, ``prefix``, ``stopped``; ``gold_loss``, ``tokens``,
    ``flops``, ``steps``; similarities and effective ranks; ``version`` of stepjepa; ``headline``, the name of the score
    that says which answers are right; ``cost``, FLOPs with those of :data:`NETWORKS` over those of plain training.
    """
    splits = read_splits()
    files = sorted(directory.glob("*.json"))
    table = pd.DataFrame([_row(file.stem, each, splits) for file in files for each in read_figures(file)])
    plain = table[table.arm == BASELINE].groupby(["file", "version"]).flops.mean()
    keys = list(zip(table.file, table.version, strict=True))
    # Another version shares other prefixes, so runs are compared with the plain training of their own.
    spent = table.flops * table.arm.map(NETWORKS).fillna(1)
    return table.assign(cost=[flops / plain.get(key, math.nan) for flops, key in zip(spent, keys, strict=True)])


def _row(file: str, each: Figures, splits: dict[str, dict[str, list[bool]]]) -> dict[str, object]:
    right, about = each.run.examples["headline"] or [], TESTS.get(file, Test(file))
    row: dict[str, object] = {"file": file, "arm": each.label, "seed": each.run.seed}
    weights = read_weights() if about.weighted else [1.0] * len(right)
    row["records"], row["right"] = len(right), share(right, weights)
    if about.split in splits:
        # An evaluation of the first records of a file asks about these alone.
        asked = {what: [bits[index] for index in each.run.indices] for what, bits in splits[about.split].items()}
        number = asked["number"]
        parts = {"number": number, "rest": [not bit for bit in number]}
        if about.whole:
            language = asked["language"]
            parts |= {"language seen": language, "language new": [not bit for bit in language]}
            parts["rest, language new"] = [not any(both) for both in zip(number, language, strict=True)]
            parts |= {"shape new": [not bit for bit in asked["shape"]], "trivial": asked["trivial"]}
        row |= {
            name: share(right, [w * bit for w, bit in zip(weights, bits, strict=True)]) for name, bits in parts.items()
        }
    row |= {name: 100 * each.scores[name] for name in ("exact", "prefix", "stopped") if name in each.scores}
    row |= {name: each.run.figures[name] for name in ("gold_loss", "tokens", "flops")}
    row |= {
        "steps": each.run.steps,
        "version": each.run.versions["stepjepa"],
        "headline": each.run.protocol["headline"],
    }
    return row | {name: each.similarity.get(name) for name in SIMILARITY}


def share(right: Sequence[float], weights: Sequence[float]) -> float | None:
    """Weighted per cent of right answers; None where all weights are 0."""
    total = sum(weights)
    return 100 * sum(value * weight for value, weight in zip(right, weights, strict=True)) / total if total else None


# The last table, and the runs of each of its arms, which a page asks for thousands of times.
_by_arm: tuple[pd.DataFrame, dict[tuple[str, str], pd.DataFrame]] = (pd.DataFrame(), {})


def runs(table: pd.DataFrame, file: str, arm: str) -> pd.DataFrame:
    """The runs of an arm, by seed; neither they nor the table are to be changed."""
    global _by_arm  # noqa: PLW0603
    if _by_arm[0] is not table:
        _by_arm = (table, {key: part.set_index("seed").sort_index() for key, part in table.groupby(["file", "arm"])})
    if (file, arm) not in _by_arm[1]:
        raise ValueError(f"expected runs of {arm} in {file}, got none")
    return _by_arm[1][file, arm]


def partners(table: pd.DataFrame, file: str, arm: str, baseline: str) -> tuple[pd.DataFrame, bool]:
    """The runs of a baseline that an arm is paired with, by seed, and whether some are of another version.

    Each is of the version of the arm's run with its seed, and may be in the file of what was trained again. Where this
    leaves fewer pairs than the runs of the file itself, it is those, though another version rounds otherwise.
    """
    ours, theirs = runs(table, file, arm), runs(table, file, baseline)
    candidates = theirs
    if (file + AGAIN, baseline) in _by_arm[1]:
        candidates = pd.concat([theirs, runs(table, file + AGAIN, baseline)]).sort_index(kind="stable")
    same_version = candidates[candidates.version.to_numpy() == ours.version.reindex(candidates.index).to_numpy()]
    same_version = same_version[~same_version.index.duplicated()]
    return (same_version, False) if len(same_version) >= len(theirs.index.intersection(ours.index)) else (theirs, True)


def test(table: pd.DataFrame, file: str, arm: str, baseline: str, column: str = "right") -> PairedT | None:
    """The paired t-test of two arms over the seeds that both have, in percentage points; None without such a seed."""
    ours, theirs = runs(table, file, arm)[column], partners(table, file, arm, baseline)[0][column]
    seeds = [seed for seed in ours.index if seed in theirs.index]
    return paired_t(list(ours[seeds]), list(theirs[seeds])) if seeds else None


def same_flops(table: pd.DataFrame, file: str, arm: str) -> str | None:
    """The plain training of the same settings that costs as many FLOPs as an arm; of several the best, if any."""
    means = table[table.file == file].groupby("arm")[["cost", "right"]].mean()
    plain = means[[is_plain(str(each)) and not str(each).endswith("-low") for each in means.index]]
    near = plain[(means.cost[arm] / plain.cost - 1).abs() <= SAME_FLOPS]
    return None if near.empty else str(near.right.idxmax())


def objectives(table: pd.DataFrame, file: str) -> list[str]:
    """The arms of a file that are not plain training, with right labels."""
    arms = sorted(set(table.arm[table.file == file]))
    return [arm for arm in arms if not is_plain(arm) and not arm.endswith(REFERENCE)]


def is_plain(arm: str) -> bool:
    """Whether an arm is plain training with right labels, as long as the others or for the FLOPs of one."""
    return re.fullmatch(rf"{BASELINE}(-[\d.]+x(-low)?)?", arm) is not None


def searched(table: pd.DataFrame, file: str) -> pd.DataFrame:
    """The runs of a search over learning rates and lengths: ``arm``, ``rate``, ``epochs`` and ``right``, held out."""
    of_file = table[table.file == file]
    parts = of_file.arm.str.extract(r"(?P<arm>.+)_learning_rate(?P<rate>[\d.e-]+)_num_epochs(?P<epochs>\d+)$")
    return parts.astype({"rate": float, "epochs": int}).assign(right=of_file.right, gold_loss=of_file.gold_loss)


def copies(row: pd.Series) -> bool:
    """Whether a run has learnt to copy the number: its share there is at least half of that on the rest."""
    return bool(row["number"] >= max(row["rest"] / 2, _LEARNT))
