"""The points of ``stepjepa analyze``, coloured by view, step, verdict or label, each with the text that it embeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.analysis.files import JSON_FILE, REST, Analysis, ModelAnalysis, load
from stepjepa.analysis.plots import COLOURED_BY, PLANE_NAMES
from stepjepa.analysis.points import BOTH_VIEWS, NEXT_STEP, sampled
from stepjepa.errors import visible
from stepjepa.files import read_jsonl
from stepjepa.pages.answers import is_right
from stepjepa.pages.render import Section, chart, chart_text, json_block, render
from stepjepa.pages.runs import Run
from stepjepa.terminal import PALETTE

GREY = ("no verdict", "all others")
"""Classes without a colour of their own, drawn below the others."""

LONGEST = 120
"""Characters of a question or an answer beside a point."""


def embedding_section(run: Run, analysis: Path | None = None) -> Section | None:
    """The embeddings of views in the plane; None where there is no analysis.

    Args:
        run: whose evaluations on the same test file tell which answers are right, and what was asked.
        analysis: output folder of ``stepjepa analyze``; by default the first one in the run folder.

    Raises:
        UserError: the analysis, or a file of answers, can't be read.
    """
    folder = analysis or next((file.parent for file in sorted(run.folder.glob(f"*/{JSON_FILE}"))), None)
    if folder is None:
        return None
    found = load(folder)
    lines = _read_lines(run, found.test_fingerprint)
    charts, points, figures = {}, [], []
    for number, model in enumerate(found.models):
        own = Path(model.model_path).resolve() == run.folder.resolve()
        points.append(describe_points(found, model, lines, verdicts=own))
        for name, plane in model.planes.items():
            x, y = ([float(f"{value:.4g}") for value in column] for column in plane.T.tolist())
            charts[f"scatter-{number}-{name}"] = {"x": x, "y": y, "points": number}
            title = f"{visible(model.name)}, {'PCA' if name == 'pca' else PLANE_NAMES[name]}"
            axes = [f"{PLANE_NAMES[name]} {axis}" for axis in (1, 2)]
            for place, share in enumerate(model.captions[name].get("variance", ())):
                axes[place] += f" ({share:.1%} of variance)"
            xaxis, yaxis = ({"title": {"text": text}, "zeroline": False} for text in axes)
            drawn = chart(f"scatter-{number}-{name}", title, [], height=460, xaxis=xaxis, yaxis=yaxis)
            figures.append((title, drawn))
    html = render(
        "embeddings.html",
        figures=figures,
        choices=list(dict.fromkeys(name for each in points for name in each["colourings"])),
        file=visible(Path(found.test_file).name),
        data=json_block("scatter-data", {"charts": charts, "points": points, "palette": PALETTE}),
    )
    return Section("embeddings", "Embeddings of the views", html, "embeddings.js")


def describe_points(
    analysis: Analysis, model: ModelAnalysis, lines: Mapping[int, dict[str, Any]], *, verdicts: bool
) -> dict[str, Any]:
    """The texts beside the points of a model, and the labels that may colour them.

    Args:
        analysis: that the model belongs to.
        model: whose points.
        lines: of an evaluation on the same test file, by index.
        verdicts: that evaluation is of this model.

    Returns:
        ``target``, ``text``, and for each of ``colourings`` the ``names`` of classes, how many of the first are
        ``grey``, and the class ``of`` every point.
    """
    pairs_drawn = drawn_pairs(analysis, model)
    records, pairs = (model.arrays[name][pairs_drawn].tolist() for name in ("record", "pair"))
    is_target = model.arrays["is_target"].tolist()
    views = [model.views[int(target)] for target in is_target]
    labels: dict[str, list[str]] = {"view": views}
    if model.config.get("mode") == "step-jepa":
        labels["step"] = [f"step {pair + (view == NEXT_STEP)}" for pair, view in zip(pairs, views, strict=True)]
    if verdicts and lines:
        right = {index: is_right(line, line.get("headline")) for index, line in lines.items()}
        names = {True: "right", False: "wrong", None: "no verdict"}
        labels["right or wrong"] = [names[right.get(record)] for record in records]
    kind = analysis.settings["t_sne_type"]
    if kind not in BOTH_VIEWS:
        labels[COLOURED_BY[kind].removeprefix("by ")] = [
            "all others" if place == REST else visible(analysis.classes[place])
            for place in model.arrays["classes"].tolist()
        ]
    texts = []
    for place, (record, pair) in enumerate(zip(records, pairs, strict=True)):
        classes = ", ".join(dict.fromkeys(each[place] for each in labels.values()))
        line = lines.get(record, {})
        about = [f"record {record}, pair {pair}: {classes}", _end(line.get("prompt")), _begin(line.get("truth"))]
        texts.append("<br>".join(chart_text(visible(each)) for each in about if each))
    colourings = {name: _classes(each) for name, each in labels.items()}
    return {"target": [int(each) for each in is_target], "text": texts, "colourings": colourings}


def drawn_pairs(analysis: Analysis, model: ModelAnalysis) -> NDArray[np.int64]:
    """The pair ``[M]`` of every point, as :func:`stepjepa.analysis.points.choose_points` has drawn them."""
    pairs = sampled(len(model.arrays["pair"]), analysis.settings["max_points"], analysis.settings["seed"])
    return np.concatenate([pairs, pairs]) if analysis.settings["t_sne_type"] in BOTH_VIEWS else pairs


def _read_lines(run: Run, test_fingerprint: str) -> dict[int, dict[str, Any]]:
    """The answers to a test file, by index, each with the ``headline`` that decides."""
    for evaluation in run.evaluations.values():
        if evaluation.answers is not None and evaluation.summary.get("test_fingerprint") == test_fingerprint:
            headline = {"headline": evaluation.summary.get("headline")}
            return {line["index"]: line | headline for _, line in read_jsonl(evaluation.answers) if "index" in line}
    return {}


def _classes(labels: Sequence[str]) -> dict[str, Any]:
    def order(label: str) -> tuple[bool, int, str]:
        # Step 10 comes after step 9.
        return label not in GREY, len(label) if label.startswith("step ") else 0, label

    names = sorted(set(labels), key=order)
    places = {name: place for place, name in enumerate(names)}
    return {
        "names": [chart_text(name) for name in names],
        "of": [places[label] for label in labels],
        "grey": sum(name in GREY for name in names),
    }


def _end(text: object) -> str:
    """The end of a question, since many begin alike."""
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= LONGEST else f"…{line[1 - LONGEST :]}"


def _begin(text: object) -> str:
    line = " ".join(text.split()) if isinstance(text, str) else ""
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
