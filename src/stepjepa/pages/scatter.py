"""The points that ``stepjepa analyze`` has left, to be pointed at: coloured by view, step, right or wrong, or label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from stepjepa.analysis.files import JSON_FILE, REST, Analysis, ModelAnalysis, load
from stepjepa.analysis.plots import COLOURED_BY, PLANE_NAMES
from stepjepa.analysis.points import BOTH_VIEWS, NEXT_STEP, sampled_pairs
from stepjepa.errors import visible
from stepjepa.files import read_jsonl
from stepjepa.pages.answers import is_right
from stepjepa.pages.charts import PALETTE, chart, chart_text
from stepjepa.pages.markup import environment, json_block
from stepjepa.pages.material import Run
from stepjepa.pages.section import Section

UNKNOWN = ("no verdict", "all others")
"""Classes without a colour of their own, which lie below the others."""

LONGEST = 120
"""Characters of a question or an answer beside a point; of a question the last ones, since many begin alike."""


def scatter_section(run: Run, analysis: Path | None = None) -> Section | None:
    """The embeddings of views in the plane, each with what it is of.

    Args:
        run: its evaluations on the same test file tell which answers are right, and what was asked.
        analysis: output folder of ``stepjepa analyze``; by default the first one in the run folder.

    Returns:
        None where there is no analysis.

    Raises:
        UserError: the analysis, or a file of answers, can't be read.
    """
    folder = analysis or next((file.parent for file in sorted(run.folder.glob(f"*/{JSON_FILE}"))), None)
    if folder is None:
        return None
    found = load(folder)
    lines = _lines(run, found.test_fingerprint)
    charts: dict[str, dict[str, Any]] = {}
    points: list[dict[str, Any]] = []
    figures = []
    for number, model in enumerate(found.models):
        own = Path(model.model_path).resolve() == run.folder.resolve()
        points.append(describe_points(found, model, lines, verdicts=own))
        for name, plane in model.planes.items():
            chart_id = f"scatter-{number}-{name}"
            charts[chart_id] = {"x": _rounded(plane[:, 0]), "y": _rounded(plane[:, 1]), "points": number}
            title = f"{visible(model.name)}, {'PCA' if name == 'pca' else PLANE_NAMES[name]}"
            figures.append((title, Markup(chart(chart_id, [], _layout(name, model), label=title, height=460))))
    choices = list(dict.fromkeys(name for each in points for name in each["colourings"]))
    block = json_block("scatter-data", {"charts": charts, "points": points, "palette": PALETTE})
    html = (
        environment()
        .get_template("scatter.html")
        .render(figures=figures, choices=choices, file=visible(Path(found.test_file).name), data=Markup(block))
    )
    script = (files("stepjepa.pages") / "templates" / "scatter.js").read_text(encoding="utf-8")
    return Section("embeddings", "Embeddings of the views", html, script)


def describe_points(
    analysis: Analysis, model: ModelAnalysis, lines: Mapping[int, dict[str, Any]], *, verdicts: bool
) -> dict[str, Any]:
    """What stands beside the points of one model, and what may colour them.

    Args:
        analysis: it belongs to.
        model: whose points.
        lines: of an evaluation on the same test file, by index; empty where there is none.
        verdicts: that evaluation is of this model.

    Returns:
        ``target``, ``text`` and, in ``colourings``, the ``names`` of classes, how many of the first
        are ``grey``, and the class ``of`` every point.
    """
    of_pair = drawn_pairs(analysis, model)
    records, pairs = model.arrays["record"][of_pair].tolist(), model.arrays["pair"][of_pair].tolist()
    is_target = model.arrays["is_target"].tolist()
    views = [model.views[int(target)] for target in is_target]
    labels: dict[str, list[str]] = {"view": views}
    if model.config.get("mode") == "step-jepa":
        numbers = [pair + (view == NEXT_STEP) for pair, view in zip(pairs, views, strict=True)]
        labels["step"] = [f"step {number}" for number in numbers]
    if verdicts and lines:
        right = {index: is_right(line, line.get("headline")) for index, line in lines.items()}
        names = {True: "right", False: "wrong", None: "no verdict"}
        labels["right or wrong"] = [names[right.get(record)] for record in records]
    kind = analysis.settings["t_sne_type"]
    if kind not in ("in_n_out", "steps"):
        classes = model.arrays["classes"].tolist()
        labels[COLOURED_BY[kind].removeprefix("by ")] = [
            "all others" if place == REST else visible(analysis.classes[place]) for place in classes
        ]
    texts = []
    for place, record in enumerate(records):
        told = [
            f"record {record}, pair {pairs[place]}: {', '.join(dict.fromkeys(each[place] for each in labels.values()))}"
        ]
        if record in lines:
            told += [_end(lines[record].get("prompt")), _begin(lines[record].get("truth"))]
        texts.append("<br>".join(chart_text(visible(each)) for each in told if each))
    colourings = {name: _classes(each) for name, each in labels.items()}
    return {"target": [int(each) for each in is_target], "text": texts, "colourings": colourings}


def drawn_pairs(analysis: Analysis, model: ModelAnalysis) -> NDArray[np.int64]:
    """Which pair every point is of, as :func:`stepjepa.analysis.points.choose_points` has drawn them.

    Returns:
        ``[M]``, places in the model's arrays of pairs.
    """
    pairs = sampled_pairs(len(model.arrays["pair"]), analysis.settings["max_points"], analysis.settings["seed"])
    return np.concatenate([pairs, pairs]) if analysis.settings["t_sne_type"] in BOTH_VIEWS else pairs


def _lines(run: Run, test_fingerprint: str) -> dict[int, dict[str, Any]]:
    """The answers to a test file, by index, each with the ``headline`` that decides."""
    for evaluation in run.evaluations.values():
        if evaluation.answers is not None and evaluation.summary.get("test_fingerprint") == test_fingerprint:
            headline = {"headline": evaluation.summary.get("headline")}
            return {line["index"]: line | headline for _, line in read_jsonl(evaluation.answers) if "index" in line}
    return {}


def _classes(labels: Sequence[str]) -> dict[str, Any]:
    def order(label: str) -> tuple[bool, int, str]:
        # Step 10 stands behind step 9.
        return label not in UNKNOWN, len(label) if label.startswith("step ") else 0, label

    names = sorted(set(labels), key=order)
    places = {name: place for place, name in enumerate(names)}
    return {
        "names": [chart_text(name) for name in names],
        "of": [places[label] for label in labels],
        "grey": sum(name in UNKNOWN for name in names),
    }


def _layout(name: str, model: ModelAnalysis) -> dict[str, Any]:
    titles = [f"{PLANE_NAMES[name]} {number}" for number in (1, 2)]
    for place, share in enumerate(model.captions[name].get("variance", ())):
        titles[place] += f" ({share:.1%} of variance)"
    return {
        "xaxis": {"title": {"text": titles[0]}, "zeroline": False},
        "yaxis": {"title": {"text": titles[1]}, "zeroline": False},
        "margin": {"l": 50, "r": 10, "t": 10, "b": 45},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }


def _rounded(values: NDArray[Any]) -> list[float]:
    """Four digits: no screen shows more, and they are most of the page."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def _end(text: object) -> str:
    said = " ".join(text.split()) if isinstance(text, str) else ""
    return said if len(said) <= LONGEST else f"…{said[1 - LONGEST :]}"


def _begin(text: object) -> str:
    said = " ".join(text.split()) if isinstance(text, str) else ""
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
