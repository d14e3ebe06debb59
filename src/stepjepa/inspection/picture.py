"""Records as a PNG: the prefix tree of their sequences above, and below it who sees whom."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from stepjepa.files import atomic_write
from stepjepa.inspection.record import Inspection, visible_matrix
from stepjepa.inspection.view import COLOURS, READ, passing, visible_text
from stepjepa.terminal import drawable

FONT = "DejaVu Sans Mono"
LABELLED = 80
"""Most tokens that are written out beside the axes."""
MARKERS = {"source": "o", "target": "D"}


def write_png(inspection: Inspection, path: str | os.PathLike[str], title: str) -> None:
    """Draw the tree, each token at its position, and the attention matrix, each key in the colour of its branch."""
    from matplotlib.figure import Figure

    size, lines = len(inspection.tokens), _lines(inspection)
    side = max(5.0, size * 0.165) if size <= LABELLED else 8.5
    heights = 0.6 + 0.28 * (max(lines) + 1), side + 1.2
    figure = Figure(figsize=(side + 5.0, sum(heights)), dpi=130, layout="constrained")
    tree, matrix = figure.subplots(2, 1, height_ratios=heights)
    _draw_tree(tree, inspection, lines)
    _draw_matrix(matrix, inspection)
    _write_legend(figure, inspection)
    figure.suptitle(title, fontsize=11, parse_math=False)
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", bbox_inches="tight", pad_inches=0.15)


def _lines(inspection: Inspection) -> list[int]:
    """The line that each branch stands on: the first one behind another continues its line."""
    found: list[int] = []
    for branch in inspection.branches:
        goes_on = branch.parent is not None and branch.parent == branch.index - 1
        found.append(found[-1] if goes_on else max(found, default=-1) + 1)
    return found


def _draw_tree(axes: Any, inspection: Inspection, lines: list[int]) -> None:
    for branch, line in zip(inspection.branches, lines, strict=True):
        tokens = inspection.tokens[branch.start : branch.end]
        first, last = tokens[0].position, tokens[-1].position
        colour = COLOURS[branch.kind].strong
        axes.bar(range(first, last + 1), 0.8, 1, line - 0.4, color=colour, edgecolor="white", linewidth=0.6)
        for kind, marker in MARKERS.items():
            read = [token.position for token in tokens if any(each.startswith(kind) for each in token.readouts)]
            axes.scatter(read, [line] * len(read), s=26, marker=marker, facecolor="white", edgecolor="black", zorder=3)
        if branch.parent is not None and lines[branch.parent] != line:
            axes.plot([first - 0.5, first - 0.5], [lines[branch.parent] + 0.4, line + 0.4], color="#555555", zorder=2)
        goes_on = any(lines[other.index] == line and other.start == branch.end for other in inspection.branches)
        if not goes_on:
            axes.annotate(
                drawable(passing(inspection, branch), FONT), (last + 0.5, line), (4, 0), textcoords="offset points",
                va="center", fontsize=8, parse_math=False,
            )  # fmt: skip
    deepest = max(token.position for token in inspection.tokens)
    axes.set(xlim=(-1, deepest + 1), ylim=(max(lines) + 0.7, -0.7), xlabel="position", yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_matrix(axes: Any, inspection: Inspection) -> None:
    from matplotlib.colors import to_rgb

    size = len(inspection.tokens)
    colours = [COLOURS[inspection.branches[token.branch].kind].strong for token in inspection.tokens]
    keys = np.array([to_rgb(colour) for colour in colours])
    axes.imshow(np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0), interpolation="nearest")  # [T, T, 3]
    for branch in inspection.branches[1:]:
        axes.axhline(branch.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(branch.start - 0.5, color="#555555", linewidth=0.7)
    axes.set(xlabel="key: the token that is seen", ylabel="query: the token that looks")
    # Of many tokens only those are written out at which something is read.
    shown = [token for token in inspection.tokens if token.readouts or size <= LABELLED]
    labels = [f"{drawable(visible_text(token.text)[:18], FONT)} {token.place}".replace("$", r"\$") for token in shown]
    reads = [f"{READ} {', '.join(token.readouts)}  " if token.readouts else "" for token in shown]
    font: dict[str, Any] = {"family": FONT, "fontsize": 6.5}
    places = [token.place for token in shown]
    axes.set_yticks(places, [read + label for read, label in zip(reads, labels, strict=True)], **font)
    axes.set_xticks(places, labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)


def _write_legend(figure: Any, inspection: Inspection) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    met = {branch.kind for branch in inspection.branches}
    entries: list[Any] = [
        Patch(facecolor=each.strong, label=each.meaning) for kind, each in COLOURS.items() if kind in met
    ]
    if inspection.config.uses_views:
        look: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": "black", "linestyle": "none"}
        entries += [
            Line2D([], [], marker=marker, label=f"{kind} is read here", **look) for kind, marker in MARKERS.items()
        ]
    figure.legend(handles=entries, loc="outside right upper", fontsize=9, frameon=False)
