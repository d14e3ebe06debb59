"""The attention matrix of a record as a PNG."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from stepjepa.drawing import drawable
from stepjepa.files import atomic_write
from stepjepa.inspection.palette import MEANING, STRONG, hues, name_of, visible_text
from stepjepa.inspection.record import Inspection, visible_matrix

FONT = "DejaVu Sans Mono"
LABELLED = 80
"""Longest row whose tokens are written out beside the axes."""
LISTED = 12
"""Most segments that the legend names one by one."""
_APART = 0.022
"""Share of the height that two marks beside the matrix need to stand one below the other."""
_NARROW = 0.012
"""Share of the width that a segment needs for its number above the matrix, and so much for each character of a name."""


def write_png(inspection: Inspection, path: str | os.PathLike[str], title: str) -> None:
    """Draw the attention matrix: a key's column has the colour of its segment, readouts are marked.

    Without colours, too, segments can be told apart: lines stand where they start, and their numbers above.

    Args:
        inspection: from ``inspection.inspect_record``.
        path: the file to write, replaced if it is there.
        title: over the picture.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    size = len(inspection.tokens)
    colours = _colours(inspection)
    keys = np.array([to_rgb(colours[segment.index]) for segment in inspection.segments for _ in range(segment.tokens)])
    picture = np.where(visible_matrix(inspection)[:, :, None], keys[None], 1.0)  # [T, T, 3]
    side = max(5.0, size * 0.165) if size <= LABELLED else 8.5
    figure = Figure(figsize=(side + 5.0, side + 1.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(picture, interpolation="nearest")
    for segment in inspection.segments[1:]:
        axes.axhline(segment.start - 0.5, color="#555555", linewidth=0.7)
        axes.axvline(segment.start - 0.5, color="#555555", linewidth=0.7)
    for name, marker in (("source", "o"), ("target", "D")):
        rows = [getattr(pair, name) for pair in inspection.pairs]
        axes.scatter(
            rows, rows, s=26, marker=marker, facecolor="none", edgecolor="black", linewidth=1.2, zorder=3, clip_on=False
        )
    for row, text in _readouts(inspection):
        axes.annotate(
            f"◂ {text}",
            (1.0, row),
            (3, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    _write_axes(axes, inspection)
    _write_legend(figure, inspection, colours)
    figure.suptitle(title, fontsize=11, parse_math=False)
    with atomic_write(path, "wb") as stream:
        figure.savefig(stream, format="png", bbox_inches="tight", pad_inches=0.15)


def _colours(inspection: Inspection) -> list[str]:
    """The colour of each segment."""
    chosen = hues(inspection.segments)
    return [STRONG[segment.kind][hue] for segment, hue in zip(inspection.segments, chosen, strict=True)]


def _readouts(inspection: Inspection) -> Iterator[tuple[float, str]]:
    """Where to write what is read beside the matrix: rows too near to each other share a line."""
    together: list[tuple[int, str]] = []
    apart = max(1.0, _APART * len(inspection.tokens))
    read = [(token.row, ", ".join(token.readouts)) for token in inspection.tokens if token.readouts]
    for row, text in read:
        if together and row - together[0][0] >= apart:
            yield sum(each for each, _ in together) / len(together), ", ".join(words for _, words in together)
            together = []
        together.append((row, text))
    if together:
        yield sum(each for each, _ in together) / len(together), ", ".join(words for _, words in together)


def _write_axes(axes: Any, inspection: Inspection) -> None:
    size = len(inspection.tokens)
    axes.set_xlabel("key: the token that is seen")
    axes.set_ylabel("query: the token that looks")
    named = [(segment, segment.tokens / size) for segment in inspection.segments]
    shown = [
        (segment, name_of(segment) if share > _NARROW * len(name_of(segment)) else str(segment.index))
        for segment, share in named
    ]
    above = axes.secondary_xaxis("top")
    above.set_xticks([(s.start + s.end - 1) / 2 for s, _ in shown], [text for _, text in shown], fontsize=7)
    above.tick_params(length=0, pad=1)
    if size > LABELLED:
        return
    labels = [f"{drawable(visible_text(token.text)[:18], FONT)} {token.row}" for token in inspection.tokens]
    font = {"family": FONT, "fontsize": 6.5, "parse_math": False}
    axes.set_yticks(range(size), labels, **font)
    axes.set_xticks(range(size), labels, rotation=90, **font)
    axes.tick_params(length=2, pad=1)


def _write_legend(figure: Any, inspection: Inspection, colours: list[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if len(inspection.segments) <= LISTED:
        names = {f"{name_of(s)}, {_at(s.start, s.end)}": colours[s.index] for s in inspection.segments}
    else:
        names = {MEANING[segment.kind]: STRONG[segment.kind][0] for segment in inspection.segments}
    entries: list[Any] = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    entries.append(Patch(facecolor="white", edgecolor="#999999", label="not seen"))
    if len(inspection.segments) > 1:
        entries.append(Line2D([], [], color="#555555", linewidth=0.7, label="start of a segment"))
    if inspection.pairs:
        for marker, name in (("o", "source"), ("D", "target")):
            mark = Line2D([], [], marker=marker, markerfacecolor="none", markeredgecolor="black", linestyle="none")
            mark.set_label(f"{name} is read here")
            entries.append(mark)
    figure.legend(handles=entries, loc="outside right upper", fontsize=9, frameon=False)


def _at(start: int, end: int) -> str:
    return f"row {start}" if end == start + 1 else f"rows {start}–{end - 1}"
