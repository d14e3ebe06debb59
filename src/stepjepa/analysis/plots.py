"""The pictures of an analysis: points in the plane, and singular values. Drawn from kept data alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stepjepa import terminal
from stepjepa.analysis.files import FORMATS, REST, Analysis, ModelAnalysis
from stepjepa.analysis.points import BOTH_VIEWS
from stepjepa.files import atomic_write
from stepjepa.terminal import drawable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
PALETTE = (*terminal.PALETTE[:-1], "#000000")
REST_COLOUR = "#BBBBBB"
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "^")  # source, target

COLOURED_BY = {
    "in_n_out": "by view",
    "paraphrase": "by group of paraphrases",
    "rotten_tomatoes": "by answer",
    "steps": "by number of the step",
}
PLANE_NAMES = {"pca": "PC", "tsne": "t-SNE"}

LONGEST_LABEL = 24
"""Characters of a label in a legend."""

VECTORS = 5000
"""More points than this become one image inside the SVG, which would be slow to open otherwise."""


def write_figures(analysis: Analysis, folder: str | os.PathLike[str]) -> list[Path]:
    """Draw ``projection`` and ``singular_values`` as PNG and SVG into a folder; the same data gives the same bytes."""
    from matplotlib import rc_context

    written = []
    for name, draw in (("projection", draw_projection), ("singular_values", draw_singular_values)):
        figure = draw(analysis)
        for kind in FORMATS:
            file = Path(folder) / f"{name}.{kind}"
            metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
            with rc_context({"svg.hashsalt": "stepjepa"}), atomic_write(file, "wb") as stream:
                figure.savefig(stream, format=kind, dpi=150, metadata=metadata, bbox_inches="tight")
            written.append(file)
    return written


def draw_projection(analysis: Analysis) -> Figure:
    """One row of axes for each projection, one column for each model."""
    from matplotlib.figure import Figure

    names, models = list(analysis.models[0].planes), analysis.models
    figure = Figure(figsize=(max(4.3 * len(models), 5.5) + 2.2, 4.1 * len(names) + 1.5), layout="constrained")
    grid = figure.subplots(len(names), len(models), squeeze=False)
    kind, views = analysis.settings["t_sne_type"], analysis.models[0].views
    shown = " and ".join(f"Enc({view})" for view in views)
    if kind not in BOTH_VIEWS:
        shown = f"Enc({'text' if 'text' in views else views[0]})"
    figure.suptitle(f"{shown} of {_file(analysis)}, coloured {COLOURED_BY[kind]}\n{_where(analysis)}", fontsize=12)
    for row, name in zip(grid, names, strict=True):
        for axes, model in zip(row, models, strict=True):
            _scatter(axes, model, name, analysis)
    for axes, model in zip(grid[0], models, strict=True):
        axes.set_title(_heading(model, analysis), fontsize=10)
    figure.legend(handles=_legend(analysis), loc="outside right center", fontsize=9, frameon=False)
    return figure


def _colours(analysis: Analysis) -> list[Any]:
    """One for each class; steps, which have an order, go from dark to light."""
    if analysis.settings["t_sne_type"] == "steps":
        from matplotlib import colormaps

        return [colormaps["viridis"](place) for place in np.linspace(0.0, 0.92, max(len(analysis.classes), 2))]
    return list(PALETTE)


def _scatter(axes: Any, model: ModelAnalysis, name: str, analysis: Analysis) -> None:
    from matplotlib.colors import to_rgba_array

    plane, of_class = model.planes[name], model.arrays["classes"]
    # Where colour tells the views apart, so does the mark, whichever of them a model reads as its source.
    marks = of_class if analysis.settings["t_sne_type"] == "in_n_out" else model.arrays["is_target"].astype(int)
    rgba = to_rgba_array([*_colours(analysis)[: len(analysis.classes)], REST_COLOUR])
    # In an order that has nothing to do with the classes, so that none hides the others; only the grey ones lie below.
    order = np.random.default_rng(0).permutation(len(plane))
    order = order[np.argsort(of_class[order] != REST, kind="stable")]
    for mark, marker in enumerate(MARKERS):
        chosen = order[marks[order] == mark]
        if not len(chosen):
            continue
        axes.scatter(
            *plane[chosen].T,
            c=rgba[of_class[chosen]],  # REST is -1: the last one
            marker=marker,
            s=float(np.clip(9000 / len(plane), 6, 30)),
            alpha=0.65,
            linewidths=0,
            rasterized=len(plane) > VECTORS,
        )
    axes.set_aspect("equal", adjustable="datalim")
    axes.tick_params(labelsize=7)
    caption = model.captions[name]
    if not caption:
        axes.text(0.5, 0.58, "all points are one point", transform=axes.transAxes, ha="center", fontsize=9)
    labels = [f"{PLANE_NAMES[name]} {number}" for number in (1, 2)]
    if "variance" in caption:
        shares = zip(labels, caption["variance"], strict=True)
        labels = [f"{label} ({share:.1%} of variance)" for label, share in shares]
    else:
        # Neither places nor distances have a unit here.
        axes.set(xticks=[], yticks=[])
        labels[0] += "".join(f" ({what} {value:.3g})" for what, value in caption.items())
    axes.set_xlabel(labels[0], fontsize=9)
    axes.set_ylabel(labels[1], fontsize=9)


def _heading(model: ModelAnalysis, analysis: Analysis) -> str:
    """Name, number of pairs and cosines of a model."""
    pairs, points = model.numbers["pairs"], len(model.arrays["classes"])
    drawn = points // 2 if analysis.settings["t_sne_type"] in BOTH_VIEWS else points
    few = f" ({drawn:,} drawn)" if drawn < pairs else ""
    found = {kind: model.numbers[kind].get("mean") for kind in ("matched", "shuffled")}
    cosines = ", ".join(f"{kind} {mean:.3f}" for kind, mean in found.items() if mean is not None)
    return f"{_text(model.name)}\n{pairs:,} pairs{few}\ncosine {cosines}"


def _text(text: str) -> str:
    """A text as it stands: Matplotlib reads formulas between dollar signs and warns of missing glyphs."""
    return drawable(text, FONT).replace("$", r"\$")


def _label(text: str) -> str:
    """The same for a legend, from which Matplotlib leaves out what begins with an underscore."""
    return f" {_text(text)}" if text.startswith("_") else _text(text)


def _file(analysis: Analysis) -> str:
    return _text(Path(analysis.test_file).name)


def _where(analysis: Analysis) -> str:
    settings = analysis.settings
    layer = "last layer" if settings["layer"] == -1 else f"layer {settings['layer']}"
    return f"{layer}, {'mean of tokens' if settings['pooling'] == 'mean' else 'last token'}"


def _legend(analysis: Analysis) -> list[Any]:
    from matplotlib.lines import Line2D

    def mark(colour: Any, marker: str, label: str) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=7, label=_label(label))

    kind = analysis.settings["t_sne_type"]
    named = list(zip(analysis.classes, _colours(analysis), strict=False))
    if kind == "in_n_out":
        marked = zip(named, MARKERS, strict=False)
        return [mark(colour, marker, f"Enc({label})") for (label, colour), marker in marked]
    short = [label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…" for label, _ in named]
    entries = [mark(colour, "s", label) for label, (_, colour) in zip(short, named, strict=True)]
    if any((model.arrays["classes"] == REST).any() for model in analysis.models):
        entries.append(mark(REST_COLOUR, "s", "later steps" if kind == "steps" else "all others"))
    if kind == "steps":
        views = zip(MARKERS, ("source", "target"), strict=True)
        entries += [mark("#555555", marker, f"read as {view}") for marker, view in views]
    return entries


def draw_singular_values(analysis: Analysis) -> Figure:
    """The singular values of source minus target, of all models: as they are, and of vectors scaled to length 1."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11.5, 5.0 + 0.18 * len(analysis.models)), layout="constrained")
    first, second = (f"Enc({view})" for view in analysis.models[0].views)
    kinds = {"difference": f"{first} - {second}", "unit_difference": "the same, each vector scaled to length 1"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        highest = max(model.numbers[kind]["values"][0] for model in analysis.models)
        for place, model in enumerate(analysis.models):
            found = model.numbers[kind]
            values = np.asarray(found["values"])
            # Below that is rounding of float32, which would stretch the axis over nothing.
            values = values[values > 1e-6 * highest]
            axes.plot(
                np.arange(1, len(values) + 1),
                values,
                color=PALETTE[place % len(PALETTE)],
                linestyle=LINES[place % len(LINES)],
                marker="o" if len(values) < 3 else None,
                label=_label(f"{model.name} (mean of the {found['top']} largest: {found['top_mean']:.3g})"),
            )
        if highest == 0:
            axes.text(0.5, 0.5, "all differences are zero", transform=axes.transAxes, ha="center")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("number, the largest first", fontsize=9)
        axes.set_ylabel("singular value", fontsize=9)
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        axes.tick_params(labelsize=8)
        # Below the axes, where it hides nothing.
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    pairs, sizes = (
        " or ".join(f"{count:,}" for count in sorted({model.numbers[what] for model in analysis.models}))
        for what in ("pairs", "dimensions")
    )
    title = f"Singular values of the difference of views, {_file(analysis)}\n"
    figure.suptitle(f"{title}{pairs} pairs in {sizes} dimensions, {_where(analysis)}", fontsize=12)
    return figure
