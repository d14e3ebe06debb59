"""Pictures of embeddings, and of records as a prefix tree and an attention matrix."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base import terminal
from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write
from stepjepa.base.json_object import JsonObject

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from stepjepa.inspection.record import Inspection

PALETTE = (*terminal.PALETTE[:-1], "#000000")
REST = "all others"
REST_COLOUR = "#BBBBBB"
MARKERS = {"source": "o", "target": "^"}
COLOURED_BY = {
    "in_n_out": "by view",
    "paraphrase": "by group of paraphrases",
    "rotten_tomatoes": "by answer",
    "steps": "by number of the step",
}
# Colourings that draw both views; the others draw the text alone, since its partner often contains the label.
BOTH_VIEWS = ("in_n_out", "steps")
LONGEST_LABEL = 24  # characters of a label in a legend
LABELLED = 80  # most tokens that are written out beside the axes of an attention matrix


class Points(NamedTuple):
    """The embeddings of one model that are drawn."""

    vectors: NDArray[np.float32]  # [M, D]
    is_target: NDArray[np.bool_]  # [M], whether a point is the target view of its pair
    labels: tuple[str, ...]  # [M], which decide the colours


def choose_classes(labels: Sequence[str], colouring: str) -> list[str]:
    """Return the labels that get their own colour (the first steps, else the most frequent), in the legend's order."""
    most = Counter(labels).most_common(None if colouring == "steps" else len(PALETTE))
    in_order = sorted((label for label, _ in most), key=lambda label: (len(label), label))  # "step 9" before "step 10"
    return in_order[: len(PALETTE)]


def project(name: str, vectors: NDArray[np.float32], seed: int) -> tuple[NDArray[np.float64], list[str]]:
    """Project vectors to the plane; vectors that differ by rounding alone become one point.

    Args:
        name: ``PCA`` or ``t-SNE``.
        vectors: ``[M, D]``.
        seed: of t-SNE.

    Returns:
        ``[M, 2]``, and the names of the two axes.

    Raises:
        UserError: there are fewer than 4 vectors.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    count = len(vectors)
    if count < 4:
        raise UserError(f"t-SNE needs 4 points or more, and there are {count}; take more records")
    wide = vectors.astype(np.float64)
    if np.linalg.norm(wide - wide.mean(0)) <= 1e-5 * np.linalg.norm(wide):
        return np.zeros((count, 2)), ["all points are one point", ""]
    if name == "PCA":
        pca = PCA(n_components=2, svd_solver="full")
        plane = pca.fit_transform(wide)
        return plane, [f"PC {n} ({share:.1%} of variance)" for n, share in enumerate(pca.explained_variance_ratio_, 1)]
    perplexity = min(30.0, (count - 1) / 3)
    plane = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(wide)
    return plane.astype(np.float64), [f"t-SNE 1 (perplexity {perplexity:.3g})", "t-SNE 2"]


def _text(text: str) -> str:
    """Escape dollar signs, between which Matplotlib reads formulas."""
    return text.replace("$", r"\$")


def save_figure(figure: Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the file's name ends in."""
    with atomic_write(file, "wb") as stream:
        figure.savefig(stream, format=Path(file).suffix.removeprefix("."), dpi=150, bbox_inches="tight")


def draw_projection(points: Mapping[str, Points], colouring: str, about: str, seed: int) -> Figure:
    """Draw the points of models: PCA above t-SNE, one column for each model.

    Args:
        points: title of a column -> the points of a model.
        colouring: a key of ``COLOURED_BY``.
        about: is added to the title.
        seed: of t-SNE.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    classes = choose_classes([label for model_points in points.values() for label in model_points.labels], colouring)
    colours = dict(zip(classes, PALETTE, strict=False))
    if any(set(model_points.labels).difference(classes) for model_points in points.values()):
        colours = {REST: REST_COLOUR, **colours}  # drawn first, so that it hides no other
    figure = Figure(figsize=(max(4.3 * len(points), 5.5) + 2.2, 9.7), layout="constrained")
    for row, name in zip(figure.subplots(2, len(points), squeeze=False), ("PCA", "t-SNE"), strict=True):
        for axes, (title, model_points) in zip(row, points.items(), strict=True):
            plane, (across, up) = project(name, model_points.vectors, seed)
            _scatter(axes, plane, model_points, colours)
            axes.set(xlabel=across, ylabel=up, title=_text(title))
            axes.set_aspect("equal", adjustable="datalim")
    title = f"Embeddings of views, coloured {COLOURED_BY[colouring]}; circles are sources, triangles targets\n{about}"
    figure.suptitle(_text(title), fontsize=12)
    # The blank: Matplotlib hides labels that begin with an underscore from the legend.
    entries = [Patch(color=colour, label=f" {_text(label[:LONGEST_LABEL])}") for label, colour in colours.items()]
    figure.legend(handles=entries, loc="outside right center", fontsize=9, frameon=False)
    return figure


def _scatter(axes: Axes, plane: NDArray[np.float64], points: Points, colours: Mapping[str, str]) -> None:
    """Draw points at their projections ``[M, 2]``; labels without a colour of their own get that of the rest."""
    label_of = np.asarray([label if label in colours else REST for label in points.labels])
    for label, colour in colours.items():
        for target, marker in enumerate(MARKERS.values()):
            across, up = plane[(label_of == label) & (points.is_target == target)].T
            axes.scatter(across, up, color=colour, marker=marker, s=14, alpha=0.65, linewidths=0)


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

    from stepjepa.inspection.record_text import COLOURS, MEANING

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
    figure.suptitle(_text(title), fontsize=11)
    save_figure(figure, path)


def _draw_tree(axes: Axes, inspection: Inspection, lines: list[int]) -> None:
    """Draw the branches of the tree as bars, with readouts as points."""
    from stepjepa.inspection.record_text import COLOURS, passing

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
            name = _text(passing(inspection, branch))
            axes.annotate(name, (last + 0.5, line), (4, 0), textcoords="offset points", va="center", fontsize=8)
    deepest = max(token.position for token in inspection.tokens)
    axes.set(xlim=(-1, deepest + 1), ylim=(max(lines) + 0.7, -0.7), xlabel="position", yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_matrix(axes: Axes, inspection: Inspection) -> None:
    """Draw the attention matrix, coloured by the branch of the key."""
    from matplotlib.colors import to_rgb

    from stepjepa.inspection.record import visible_matrix
    from stepjepa.inspection.record_text import COLOURS, READ, visible_text

    keys = np.array([to_rgb(COLOURS[inspection.branches[token.branch].kind]) for token in inspection.tokens])
    axes.imshow(np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0), interpolation="nearest")  # [T, T, 3]
    for branch in inspection.branches[1:]:
        axes.axhline(branch.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(branch.start - 0.5, color="#555555", linewidth=0.7)
    axes.set(xlabel="key: the token that is seen", ylabel="query: the token that looks")
    # With many tokens only those with a readout have a label.
    labelled = [token for token in inspection.tokens if token.readouts or len(inspection.tokens) <= LABELLED]
    labels = [f"{_text(visible_text(token.text)[:18])} {token.place}" for token in labelled]
    reads = [f"{READ} {', '.join(token.readouts)}  " if token.readouts else "" for token in labelled]
    font: JsonObject = {"family": "DejaVu Sans Mono", "fontsize": 6.5}
    places = [token.place for token in labelled]
    axes.set_yticks(places, [read + label for read, label in zip(reads, labels, strict=True)], **font)
    axes.set_xticks(places, labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)
