"""A picture of records as a prefix tree and an attention matrix."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from stepjepa.base.json_object import JsonObject
from stepjepa.inspection.plots import MARKERS, escaped, save_figure
from stepjepa.inspection.record import visible_matrix
from stepjepa.inspection.record_text import COLOURS, MEANING, READ, passing, visible_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from stepjepa.inspection.record import Inspection

LABELLED = 80
"""Maximum number of tokens that are all written out beside the axes of an attention matrix."""


def write_png(inspection: Inspection, path: str | os.PathLike[str], title: str) -> None:
    """Draw a ``record.Inspection``: the tree, each token at its position, and below it the attention matrix.

    Args:
        inspection: of ``inspect_records``.
        path: of the picture.
        title: above the picture.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    # The first branch behind another continues its line.
    lines: list[int] = []
    for branch in inspection.branches:
        continues = branch.parent is not None and branch.parent == branch.index - 1
        lines.append(lines[-1] if continues else max(lines, default=-1) + 1)
    size = len(inspection.tokens)
    side = max(5.0, size * 0.165) if size <= LABELLED else 8.5
    heights = 0.6 + 0.28 * (max(lines) + 1), side + 1.2
    figure = Figure(figsize=(side + 5.0, sum(heights)), layout="constrained")
    tree, matrix = figure.subplots(2, 1, height_ratios=heights)
    _draw_tree(tree, inspection, lines)
    _draw_matrix(matrix, inspection)
    kinds = {branch.kind for branch in inspection.branches}
    entries: list[Artist] = [
        Patch(facecolor=COLOURS[kind], label=meaning) for kind, meaning in MEANING.items() if kind in kinds
    ]
    if inspection.config.uses_views:
        style: JsonObject = {"markerfacecolor": "white", "markeredgecolor": "black", "linestyle": "none"}
        entries += [
            Line2D([], [], marker=mark, label=f"{kind} is read here", **style) for kind, mark in MARKERS.items()
        ]
    figure.legend(handles=entries, loc="outside right upper", fontsize=9, frameon=False)
    figure.suptitle(escaped(title), fontsize=11)
    save_figure(figure, path)


def _draw_tree(axes: Axes, inspection: Inspection, lines: list[int]) -> None:
    """Draw the branches of the tree as bars, with readouts as points."""
    for branch, line in zip(inspection.branches, lines, strict=True):
        tokens = inspection.tokens[branch.start : branch.end]
        first, last = tokens[0].position, tokens[-1].position
        places = range(first, last + 1)
        axes.bar(places, 0.8, 1, line - 0.4, color=COLOURS[branch.kind], edgecolor="white", linewidth=0.6)
        for kind, marker in MARKERS.items():
            read = [token.position for token in tokens if any(readout.startswith(kind) for readout in token.readouts)]
            axes.scatter(read, [line] * len(read), s=26, marker=marker, facecolor="white", edgecolor="black", zorder=3)
        if branch.parent is not None and lines[branch.parent] != line:
            axes.plot([first - 0.5, first - 0.5], [lines[branch.parent] + 0.4, line + 0.4], color="#555555", zorder=2)
        if branch.index + 1 == len(lines) or lines[branch.index + 1] != line:
            name = escaped(passing(inspection, branch))
            axes.annotate(name, (last + 0.5, line), (4, 0), textcoords="offset points", va="center", fontsize=8)
    deepest = max(token.position for token in inspection.tokens)
    axes.set(xlim=(-1, deepest + 1), ylim=(max(lines) + 0.7, -0.7), xlabel="position", yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_matrix(axes: Axes, inspection: Inspection) -> None:
    """Draw the attention matrix, coloured by the branch of the key."""
    from matplotlib.colors import to_rgb

    keys = np.array([to_rgb(COLOURS[inspection.branches[token.branch].kind]) for token in inspection.tokens])
    axes.imshow(np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0), interpolation="nearest")  # [T, T, 3]
    for branch in inspection.branches[1:]:
        axes.axhline(branch.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(branch.start - 0.5, color="#555555", linewidth=0.7)
    axes.set(xlabel="key: the token that is seen", ylabel="query: the token that looks")
    # With many tokens only those with a readout have a label.
    labelled = [token for token in inspection.tokens if token.readouts or len(inspection.tokens) <= LABELLED]
    labels = [f"{escaped(visible_text(token.text)[:18])} {token.place}" for token in labelled]
    reads = [f"{READ} {', '.join(token.readouts)}  " if token.readouts else "" for token in labelled]
    font: JsonObject = {"family": "DejaVu Sans Mono", "fontsize": 6.5}
    places = [token.place for token in labelled]
    axes.set_yticks(places, [read + label for read, label in zip(reads, labels, strict=True)], **font)
    axes.set_xticks(places, labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)
