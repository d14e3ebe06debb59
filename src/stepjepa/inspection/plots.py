"""Pictures of embeddings: their projections to the plane."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepjepa.base import terminal
from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def escaped(text: str) -> str:
    """Escape dollar signs, between which Matplotlib reads formulas."""
    return text.replace("$", r"\$")


def save_figure(figure: Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the file's name ends in."""
    with atomic_write(file, "wb") as stream:
        write_figure(figure, stream, Path(file).suffix.removeprefix("."))


def write_figure(figure: Figure, stream: IO[bytes], form: str) -> None:
    """Write a figure in a format such as ``png``."""
    figure.savefig(stream, format=form, dpi=150, bbox_inches="tight")


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
            axes.set(xlabel=across, ylabel=up, title=escaped(title))
            axes.set_aspect("equal", adjustable="datalim")
    title = f"Embeddings of views, coloured {COLOURED_BY[colouring]}; circles are sources, triangles targets\n{about}"
    figure.suptitle(escaped(title), fontsize=12)
    # The blank: Matplotlib hides labels that begin with an underscore from the legend.
    entries = [Patch(color=colour, label=f" {escaped(label[:LONGEST_LABEL])}") for label, colour in colours.items()]
    figure.legend(handles=entries, loc="outside right center", fontsize=9, frameon=False)
    return figure


def _scatter(axes: Axes, plane: NDArray[np.float64], points: Points, colours: Mapping[str, str]) -> None:
    """Draw points at their projections ``[M, 2]``; labels without a colour of their own get that of the rest."""
    label_of = np.asarray([label if label in colours else REST for label in points.labels])
    for label, colour in colours.items():
        for target, marker in enumerate(MARKERS.values()):
            across, up = plane[(label_of == label) & (points.is_target == target)].T
            axes.scatter(across, up, color=colour, marker=marker, s=14, alpha=0.65, linewidths=0)
