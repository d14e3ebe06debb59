"""Pictures of an analysis, drawn from kept data alone, and of records as a prefix tree and an attention matrix."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa import terminal
from stepjepa.errors import UserError
from stepjepa.files import atomic_write
from stepjepa.terminal import drawable

MOST_CLASSES = 7
"""Labels that have a colour of their own: more can't be told apart."""
PALETTE = (*terminal.PALETTE[:-1], "#000000")
REST_COLOUR = "#BBBBBB"
LINES = ("-", "--", "-.", ":")
MARKERS = {"source": "o", "target": "^"}
COLOURED_BY = {
    "in_n_out": "by view",
    "paraphrase": "by group of paraphrases",
    "rotten_tomatoes": "by answer",
    "steps": "by number of the step",
}
BOTH_VIEWS = ("in_n_out", "steps")
"""Colourings of both views; the others are of the text alone, whose partner often says the label outright."""
PLANE_NAMES = {"pca": "PC", "tsne": "t-SNE"}
FONT, MONOSPACED = "DejaVu Sans", "DejaVu Sans Mono"
LONGEST_LABEL = 24
"""Characters of a label in a legend."""
LABELLED = 80
"""Most tokens that are written out beside the axes of an attention matrix."""


class Points(NamedTuple):
    """Embeddings of one model to be drawn."""

    vectors: NDArray[np.float32]  # [M, D]
    is_target: NDArray[np.bool_]  # [M], whether a point is the target view of its pair
    labels: tuple[str, ...]  # [M], what colours it


def choose_classes(labels: Sequence[str], colouring: str) -> list[str]:
    """The labels that get a colour of their own (the first steps, else the most frequent), in the legend's order."""
    counts = Counter(labels)
    if colouring == "in_n_out":
        return list(counts)

    def order(label: str) -> tuple[int, str]:
        return len(label), label  # "step 9" before "step 10"

    most = sorted(counts, key=order) if colouring == "steps" else [label for label, _ in counts.most_common()]
    return sorted(most[:MOST_CLASSES], key=order)


def project(name: str, vectors: NDArray[np.float32], seed: int) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Points in the plane ``[M, 2]``, by ``pca`` or ``tsne``; UserError if they are too few.

    Also what a caption should say: ``variance`` (shares of the two axes) of PCA, ``perplexity`` of t-SNE. Points that
    differ by rounding alone are one point in the plane too, with an empty caption.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    count, fewest = len(vectors), {"pca": 2, "tsne": 4}[name]
    if count < fewest:
        told = f"{name} needs {fewest} points or more, and there are {count}; take more records"
        raise UserError(f"{told}, or pass --projections pca")
    wide = vectors.astype(np.float64)
    if np.linalg.norm(wide - wide.mean(0)) <= 1e-5 * np.linalg.norm(wide):
        return np.zeros((count, 2)), {}
    if name == "pca":
        pca = PCA(n_components=2, svd_solver="full")
        return pca.fit_transform(wide), {"variance": pca.explained_variance_ratio_.tolist()}
    perplexity = min(30.0, (count - 1) / 3)
    plane = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(wide)
    return plane.astype(np.float64), {"perplexity": perplexity}


def _text(text: str, font: str = FONT) -> str:
    """A text as it stands: Matplotlib reads formulas between dollar signs and warns of missing glyphs."""
    return "\n".join(drawable(line, font) for line in text.split("\n")).replace("$", r"\$")


def save_figure(figure: Any, file: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the file's name ends in."""
    with atomic_write(file, "wb") as stream:
        figure.savefig(stream, format=Path(file).suffix.removeprefix("."), dpi=150, bbox_inches="tight")


def draw_projection(titles: Sequence[str], points: Sequence[Points], settings: Any, where: str) -> Any:
    """A figure with one row of axes for each projection, one column for each model.

    Args:
        titles: of the models.
        points: of the models.
        settings: an ``AnalysisSettings``, for its projections, colouring and seed.
        where: the file and the place in the model, for the title.
    """
    from matplotlib.figure import Figure

    classes = choose_classes([label for each in points for label in each.labels], settings.t_sne_type)
    names = settings.projections
    figure = Figure(figsize=(max(4.3 * len(points), 5.5) + 2.2, 4.1 * len(names) + 1.5), layout="constrained")
    grid = figure.subplots(len(names), len(points), squeeze=False)
    figure.suptitle(_text(f"Embeddings of views, coloured {COLOURED_BY[settings.t_sne_type]}\n{where}"), fontsize=12)
    for row, name in zip(grid, names, strict=True):
        for axes, each in zip(row, points, strict=True):
            _scatter(axes, each, name, classes, settings.seed)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(_text(title), fontsize=10)
    figure.legend(handles=_legend(points, classes), loc="outside right center", fontsize=9, frameon=False)
    return figure


def _scatter(axes: Any, points: Points, name: str, classes: Sequence[str], seed: int) -> None:
    from matplotlib.colors import to_rgba_array

    plane, caption = project(name, points.vectors, seed)
    of_class = np.asarray([classes.index(each) if each in classes else len(classes) for each in points.labels])
    rgba = to_rgba_array([*PALETTE[: len(classes)], REST_COLOUR])
    # In an order that has nothing to do with the classes, so that none hides the others; only the grey ones lie below.
    order = np.random.default_rng(0).permutation(len(plane))
    order = order[np.argsort(of_class[order] < len(classes), kind="stable")]
    size = float(np.clip(9000 / len(plane), 6, 30))
    for target, marker in enumerate(MARKERS.values()):
        chosen = order[points.is_target[order] == target]
        if len(chosen):
            colours = rgba[of_class[chosen]]
            axes.scatter(*plane[chosen].T, c=colours, marker=marker, s=size, alpha=0.65, linewidths=0)
    axes.set_aspect("equal", adjustable="datalim")
    axes.tick_params(labelsize=7)
    if not caption:
        axes.text(0.5, 0.58, "all points are one point", transform=axes.transAxes, ha="center", fontsize=9)
    labels = [f"{PLANE_NAMES[name]} {number}" for number in (1, 2)]
    if "variance" in caption:
        labels = [f"{label} ({caption['variance'][axis]:.1%} of variance)" for axis, label in enumerate(labels)]
    else:
        # Neither places nor distances have a unit here.
        axes.set(xticks=[], yticks=[])
        labels[0] += "".join(f" ({what} {value:.3g})" for what, value in caption.items())
    axes.set_xlabel(labels[0], fontsize=9)
    axes.set_ylabel(labels[1], fontsize=9)


def _legend(points: Sequence[Points], classes: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    def mark(colour: Any, marker: str, label: str) -> Line2D:
        short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
        # The blank: what begins with an underscore is left out of a legend.
        return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=7, label=f" {_text(short)}")

    entries = [mark(colour, "s", label) for colour, label in zip(PALETTE, classes, strict=False)]
    if any(set(each.labels).difference(classes) for each in points):
        entries.append(mark(REST_COLOUR, "s", "all others"))
    if any(len(set(each.is_target.tolist())) > 1 for each in points):
        entries += [mark("#555555", marker, f"read as {view}") for view, marker in MARKERS.items()]
    return entries


def draw_singular_values(numbers: Mapping[str, Any], views: tuple[str, str], where: str) -> Any:
    """A figure of the singular values of source minus target, of models by name: as they are, and at length 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.0 + 0.18 * len(numbers)), layout="constrained")
    kinds = {"difference": f"Enc({views[0]}) - Enc({views[1]})", "unit_difference": "the same at length 1"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        highest = max(each[kind]["values"][0] for each in numbers.values())
        for place, (name, each) in enumerate(numbers.items()):
            # Below that is rounding of float32, which would stretch the axis over nothing.
            values = [value for value in each[kind]["values"] if value > 1e-6 * highest]
            mean = f"mean of the {each[kind]['top']} largest: {each[kind]['top_mean']:.3g}"
            style = {"color": PALETTE[place % len(PALETTE)], "linestyle": LINES[place % len(LINES)], "marker": "."}
            axes.plot(range(1, len(values) + 1), values, label=f" {_text(name)} ({mean})", **style)
        axes.set(yscale="log", title=title, xlabel="number, the largest first", ylabel="singular value")
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        # Below the axes, where it hides nothing.
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    figure.suptitle(_text(f"Singular values of the difference of views\n{where}"), fontsize=12)
    return figure


def write_png(inspection: Any, path: str | os.PathLike[str], title: str) -> None:
    """Draw a ``record.Inspection``: the tree, each token at its position, and below it the attention matrix."""
    from matplotlib.figure import Figure

    # The first branch behind another continues its line.
    lines: list[int] = []
    for branch in inspection.branches:
        goes_on = branch.parent is not None and branch.parent == branch.index - 1
        lines.append(lines[-1] if goes_on else max(lines, default=-1) + 1)
    size = len(inspection.tokens)
    side = max(5.0, size * 0.165) if size <= LABELLED else 8.5
    heights = 0.6 + 0.28 * (max(lines) + 1), side + 1.2
    figure = Figure(figsize=(side + 5.0, sum(heights)), layout="constrained")
    tree, matrix = figure.subplots(2, 1, height_ratios=heights)
    _draw_tree(tree, inspection, lines)
    _draw_matrix(matrix, inspection)
    _write_legend(figure, inspection)
    figure.suptitle(_text(title), fontsize=11)
    save_figure(figure, path)


def _draw_tree(axes: Any, inspection: Any, lines: list[int]) -> None:
    from stepjepa.inspection.record import COLOURS, passing

    for branch, line in zip(inspection.branches, lines, strict=True):
        tokens = inspection.tokens[branch.start : branch.end]
        first, last = tokens[0].position, tokens[-1].position
        places, colour = range(first, last + 1), COLOURS[branch.kind].strong
        axes.bar(places, 0.8, 1, line - 0.4, color=colour, edgecolor="white", linewidth=0.6)
        for kind, marker in MARKERS.items():
            read = [token.position for token in tokens if any(each.startswith(kind) for each in token.readouts)]
            axes.scatter(read, [line] * len(read), s=26, marker=marker, facecolor="white", edgecolor="black", zorder=3)
        if branch.parent is not None and lines[branch.parent] != line:
            axes.plot([first - 0.5, first - 0.5], [lines[branch.parent] + 0.4, line + 0.4], color="#555555", zorder=2)
        if branch.index + 1 == len(lines) or lines[branch.index + 1] != line:
            name = _text(passing(inspection, branch))
            axes.annotate(name, (last + 0.5, line), (4, 0), textcoords="offset points", va="center", fontsize=8)
    deepest = max(token.position for token in inspection.tokens)
    axes.set(xlim=(-1, deepest + 1), ylim=(max(lines) + 0.7, -0.7), xlabel="position", yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_matrix(axes: Any, inspection: Any) -> None:
    from matplotlib.colors import to_rgb

    from stepjepa.inspection.record import COLOURS, READ, visible_matrix, visible_text

    colours = [COLOURS[inspection.branches[token.branch].kind].strong for token in inspection.tokens]
    keys = np.array([to_rgb(colour) for colour in colours])
    axes.imshow(np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0), interpolation="nearest")  # [T, T, 3]
    for branch in inspection.branches[1:]:
        axes.axhline(branch.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(branch.start - 0.5, color="#555555", linewidth=0.7)
    axes.set(xlabel="key: the token that is seen", ylabel="query: the token that looks")
    # Of many tokens only those are written out at which something is read.
    shown = [token for token in inspection.tokens if token.readouts or len(inspection.tokens) <= LABELLED]
    labels = [f"{_text(visible_text(token.text)[:18], MONOSPACED)} {token.place}" for token in shown]
    reads = [f"{READ} {', '.join(token.readouts)}  " if token.readouts else "" for token in shown]
    font: dict[str, Any] = {"family": MONOSPACED, "fontsize": 6.5}
    places = [token.place for token in shown]
    axes.set_yticks(places, [read + label for read, label in zip(reads, labels, strict=True)], **font)
    axes.set_xticks(places, labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)


def _write_legend(figure: Any, inspection: Any) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from stepjepa.inspection.record import COLOURS

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
