"""The pictures of ``docs/results.md``, one for each question; every seed is a point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from frame import BASELINE, REFERENCE, is_plain, runs, searched
from matplotlib.figure import Figure
from retrieval_models import LENGTHS, UNTRAINED
from retrieval_results import data_sets, models_with_runs

from stepjepa.base.files import atomic_write
from stepjepa.base.terminal import PALETTE

PLAIN, COSINE, INFONCE, OTHER = PALETTE[6], PALETTE[1], PALETTE[0], PALETTE[2]
SHARES = {"synth-1-16": 500, "synth-1-8": 1000, "synth-1-4": 2000, "synth-1-2": 4000, "synth-long": 8000}

# Of the picture of answers and retrieval, by arm.
MARKS = {
    "none": "*",
    "regular-1.35x": "^",
    "regular-1.75x": ">",
    "branched-cosine": "v",
    "infonce-alone": "s",
    "branched-infonce": "D",
    "separate-infonce": "o",
    "separate-infonce-k0": "P",
}
OTHER_ARM = "x"


def colour(arm: str) -> str:
    """Return the colour of an arm, by its loss."""
    if is_plain(arm.removesuffix(REFERENCE)):
        return PLAIN
    return INFONCE if "infonce" in arm else COSINE if "cosine" in arm else OTHER


def draw(table: pd.DataFrame, folder: Path) -> None:
    """Write all pictures.

    Args:
        table: of :func:`frame.read`.
        folder: for the files.
    """
    made = {"copying": copying(table), "flops": flops(table), "stopping": stopping(table), "shares": shares(table)}
    made["retrieval"] = plane(table)
    for name, figure in made.items():
        with atomic_write(folder / f"results-{name}.png", "wb") as stream:
            figure.savefig(stream, format="png", dpi=120)
        print(f"written: {folder / f'results-{name}.png'}")


def copying(table: pd.DataFrame) -> Figure:
    """Which answers does a gain consist of? Right answers on records with a number, and on the rest."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    grids: Any = figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=(19, 15))
    for axes, (file, title) in zip(grids, (("synth", "synth"), ("turk", "TURK")), strict=True):
        every = {arm for arm in table.arm[table.file == file] if not arm.endswith(REFERENCE)}
        arms = sorted(every, key=lambda arm: (not is_plain(arm), arm))
        for axis, column in zip(axes, ("number", "rest"), strict=True):
            for place, arm in enumerate(reversed(arms)):
                values = runs(table, file, arm)[column]
                axis.plot(values, [place] * len(values), "o", color=colour(arm), alpha=0.7)
            axis.set_yticks(range(len(arms)), list(reversed(arms)))
            axis.set_title(f"{title}: {'records with a number' if column == 'number' else 'all other records'}")
            axis.set_xlim(0, 100)
            axis.grid(axis="x", alpha=0.3)
    for axis in grids[-1]:
        axis.set_xlabel("right, %; every point is a seed")
    return figure


def flops(table: pd.DataFrame) -> Figure:
    """Does an objective help for the same FLOPs? Plain training is the line."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    for axis, (file, title) in zip(axes, (("synth", "synth"), ("turk", "TURK")), strict=True):
        of_file = table[(table.file == file) & ~table.arm.str.endswith(REFERENCE)]
        means = of_file.groupby("arm")[["cost", "right"]].mean()
        plain = means.index.map(is_plain)
        # A single seed is a point, and no mean.
        several = of_file.groupby("arm").seed.nunique() > 1
        line = means[plain & several].sort_values("cost")
        axis.plot(line.cost, line.right, "-", color=PLAIN)
        labelled = set()
        for arm in means.index:
            kind = {PLAIN: "plain", INFONCE: "InfoNCE", COSINE: "cosine", OTHER: "others"}[colour(arm)]
            values = runs(table, file, arm)["right"]
            label = None if kind in labelled else kind
            labelled.add(kind)
            axis.plot([means.cost[arm]] * len(values), values, "o", color=colour(arm), alpha=0.6, label=label)
        axis.set_title(title)
        axis.set_xlabel("FLOPs of training, plain = 1")
        axis.set_ylabel("right, %")
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def stopping(table: pd.DataFrame) -> Figure:
    """Which part of a gain is learning to stop? The published labels beside the right ones."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes: Any = figure.subplots(1, 3, sharey=True)
    bars = [
        (f"{'cosine' if 'cosine' in arm else 'plain'}, {labels} labels, {model}", file, arm + end)
        for model, file in (("preset", "synth"), ("SmolLM2", "smollm2"))
        for labels, end in (("right", ""), ("published", REFERENCE))
        for arm in (BASELINE, "branched-cosine")
        if ((table.file == file) & (table.arm == arm + end)).any()
    ]
    for axis, column in zip(axes, ("exact", "prefix", "stopped"), strict=True):
        for place, (_, file, arm) in enumerate(reversed(bars)):
            values = runs(table, file, arm)[column]
            axis.barh(place, values.mean(), color=colour(arm), alpha=0.4)
            axis.plot(values, [place] * len(values), "o", color=colour(arm))
        axis.set_yticks(range(len(bars)), [name for name, *_ in reversed(bars)])
        axis.set_xlim(0, 105)
        axis.set_title({"exact": "exact match, %", "prefix": "prefix match, %", "stopped": "ends its turn, %"}[column])
    return figure


def shares(table: pd.DataFrame) -> Figure:
    """Does an objective help with few records? By their number; and with 500, by how often they are trained on."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis, other = figure.subplots(1, 2)
    for arm, mark in ((BASELINE, "o-"), ("branched-infonce", "s-")):
        by_size = {records: runs(table, file, arm)["right"] for file, records in SHARES.items()}
        axis.plot(list(by_size), [values.mean() for values in by_size.values()], mark, color=colour(arm), label=arm)
        for records, values in by_size.items():
            axis.plot([records] * len(values), values, mark[0], color=colour(arm), alpha=0.4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(SHARES.values()), [f"{records:,}" for records in SHARES.values()])
    axis.set_xlabel("records trained on, each twelve times")
    axis.set_ylabel("right of the test records, %")
    axis.legend()
    search = searched(table, "limited-500")
    for arm, mark in (
        ("regular", "o-"),
        ("regular-prompt", "v-"),
        ("branched-cosine", "^-"),
        ("branched-infonce", "s-"),
    ):
        best = search[search.arm == arm].groupby("epochs").right.max()
        shade = OTHER if arm == "regular-prompt" else colour(arm)
        other.plot(best.index, best, mark, color=shade, label=arm)
    other.set_xscale("log", base=2)
    lengths = sorted(set(search.epochs))
    other.set_xticks(lengths, [str(each) for each in lengths])
    other.set_xlabel("epochs on 500 records, best learning rate")
    other.set_ylabel("right of 300 held-out records, %")
    other.legend()
    return figure


def plane(table: pd.DataFrame) -> Figure:
    """How do the same models answer, and retrieve? Right answers against hits at 1, a panel for each data set."""
    sets = [each for each in data_sets(table) if each.hits_over()]  # with plain training beside it
    columns = 2 if len(sets) in (2, 4) else min(len(sets), 3)
    rows = -(-len(sets) // columns)
    figure = Figure(figsize=(9, 1.2 + 3.4 * rows), layout="constrained")
    axes: Any = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for axis in axes[len(sets) :]:
        axis.set_axis_off()
    labels: dict[str, Any] = {}
    for axis, each in zip(axes, sets, strict=False):
        before: list[float] = []
        for model, part in models_with_runs(each.rows):
            if model.arm == UNTRAINED:
                before.append(part.hits_at_1.mean())
                continue
            shade = OTHER if model.arm == "none" else colour(model.arm)
            if model.arm == "none" and part.right.isna().all():
                line = axis.axhline(part.hits_at_1.mean(), color=shade, linestyle=":", linewidth=1)
                labels.setdefault("TF-IDF, words and characters (no answers)", line)
                continue
            behind_map = model.method.endswith(("ridge", "canonical", "classifier", "heads"))
            look: Any = {"color": shade, "alpha": 0.8, "markersize": 8, "fillstyle": "none" if behind_map else "full"}
            (points,) = axis.plot(part.right, part.hits_at_1, MARKS.get(model.arm, OTHER_ARM), **look)
            if not behind_map:
                length = LENGTHS.get(model.arm)
                words = model.words.replace("`", "") if length is None else f"plain training, {length}"
                words = words if model.arm in MARKS else "other weights, losses and partners"
                labels.setdefault(words, points)
        if before:
            line = axis.axhline(max(before), color="black", linestyle="--", linewidth=1)
            labels.setdefault("best map, model before training (no answers)", line)
        axis.set_title(f"{each.name.replace('`', '')}: {each.seeds}")
        axis.set_xlabel("right answers, %")
        # Marks at 0 and 100 are whole.
        axis.set_xlim(-4, 104)
        axis.set_ylim(-4, 104)
        axis.grid(alpha=0.3)
    for axis in axes[::columns]:
        axis.set_ylabel("hits at 1, %")
    (labels["hollow marks: behind a map, fitted on pairs"],) = axes[0].plot(
        [], [], "o", color="black", fillstyle="none", markersize=8
    )
    figure.legend(labels.values(), labels.keys(), fontsize=7, loc="outside lower center", ncols=3)
    return figure
