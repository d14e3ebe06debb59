"""The pictures show what the data holds and say what they show; the folder keeps all that they are drawn from."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from stepjepa.analysis.files import (
    DATA_FILE,
    JSON_FILE,
    REST,
    Analysis,
    ModelAnalysis,
    load,
    output_files,
    save,
)
from stepjepa.analysis.plots import PALETTE, REST_COLOUR, draw_projection, draw_singular_values, write_figures
from stepjepa.errors import UserError
from stepjepa.inspection.view import COLOURS

PAIRS = 20


def make_model(name: str, classes: Any, both: bool, seed: int = 0) -> ModelAnalysis:
    generator = np.random.default_rng(seed)
    count = len(classes)
    values = np.sort(generator.uniform(1, 50, 6))[::-1].tolist()
    return ModelAnalysis(
        name,
        f"/runs/{name}",
        ("text", "code"),
        {"mode": "llm-jepa", "predictors": 1},
        {
            "pairs": PAIRS,
            "dimensions": 6,
            "matched": {"n": PAIRS, "mean": 0.75},
            "shuffled": {"n": 380, "mean": 0.125},
            "difference": {"values": values, "top": 6, "top_mean": float(np.mean(values))},
            "unit_difference": {"values": [1.0, 1e-9], "top": 2, "top_mean": 0.5},
        },
        {"pca": {"variance": [0.5, 0.25]}, "tsne": {"perplexity": 13 / 3}},
        {
            "source": generator.normal(size=(PAIRS, 6)).astype(np.float32),
            "target": generator.normal(size=(PAIRS, 6)).astype(np.float32),
            "record": np.arange(PAIRS),
            "pair": np.ones(PAIRS, np.int64),
            "is_target": np.arange(count) >= (count // 2 if both else count),
            "classes": np.asarray(classes),
        },
        {name: generator.normal(size=(count, 2)) for name in ("pca", "tsne")},
    )


def make_analysis(kind: str = "in_n_out", names: tuple[str, ...] = ("regular", "llm-jepa"), **changes: Any) -> Analysis:
    both = kind in ("in_n_out", "steps")
    classes = {
        "in_n_out": ([0] * PAIRS + [1] * PAIRS, ("text", "code")),
        "paraphrase": ([REST, 0, 1, 2] * (PAIRS // 4), ("group a", "_group b", "group $c_2$ 日")),
        "steps": ([0, 1] * (PAIRS // 2) + [1, REST] * (PAIRS // 2), ("step 1", "step 2")),
    }[kind]
    settings = {"t_sne_type": kind, "layer": -1, "pooling": "last"}
    models = tuple(make_model(name, classes[0], both, seed) for seed, name in enumerate(names))
    return replace(Analysis("data/synth_test.jsonl", "f", settings, classes[1], models), **changes)


def rounded(colour: Any) -> tuple[float, ...]:
    return tuple(np.round(colour[:3], 4).tolist())


def points_of(axes: Any) -> dict[tuple[float, float], tuple[Any, int]]:
    """Colour and collection of every point that is drawn."""
    return {
        (float(x), float(y)): (rounded(colour), number)
        for number, collection in enumerate(axes.collections)
        for (x, y), colour in zip(collection.get_offsets(), collection.get_facecolors(), strict=True)
    }


@pytest.mark.parametrize("kind", ["in_n_out", "paraphrase", "steps"])
def test_every_point_is_drawn_in_the_colour_that_the_legend_gives_its_label(kind: str) -> None:
    analysis = make_analysis(kind)
    figure = draw_projection(analysis)
    (legend,) = figure.legends
    texts = [text.get_text().strip() for text in legend.get_texts()]
    colours = [rounded(to_rgba(handle.get_color())) for handle in legend.legend_handles]
    named = len(analysis.classes)
    wanted = {**dict(enumerate(colours[:named])), REST: rounded(to_rgba(REST_COLOUR))}
    assert len(figure.axes) == 4
    for axes, (name, model) in zip(figure.axes, product(("pca", "tsne"), analysis.models), strict=True):
        drawn = points_of(axes)
        assert len(drawn) == len(model.planes[name])
        arrays = model.arrays["classes"], model.arrays["is_target"]
        for (x, y), of_class, target in zip(model.planes[name].tolist(), *arrays, strict=True):
            assert drawn[x, y] == (wanted[of_class], int(target))
    shown = [label.replace("日", "▯").replace("$", r"\$") for label in analysis.classes]
    labels = [f"Enc({label})" if kind == "in_n_out" else label for label in shown]
    extra = {"steps": ["later steps", "read as source", "read as target"], "paraphrase": ["all others"]}
    assert texts == labels + extra.get(kind, [])
    assert len(set(colours)) >= named


def test_titles_say_what_is_shown() -> None:
    figure = draw_projection(make_analysis())
    title = "Enc(text) and Enc(code) of synth_test.jsonl, coloured by view\nlast layer, last token"
    assert figure.get_suptitle() == title
    first, second, *below = figure.axes
    assert first.get_title() == "regular\n20 pairs\ncosine matched 0.750, shuffled 0.125"
    assert second.get_title().startswith("llm-jepa\n")
    assert (first.get_xlabel(), first.get_ylabel()) == ("PC 1 (50.0% of variance)", "PC 2 (25.0% of variance)")
    assert (below[0].get_xlabel(), below[0].get_ylabel()) == ("t-SNE 1 (perplexity 4.33)", "t-SNE 2")
    assert not list(below[0].get_xticks())
    settings = {"t_sne_type": "paraphrase", "layer": 2, "pooling": "mean"}
    alone = make_analysis("paraphrase", ("one",), settings=settings)
    assert draw_projection(alone).get_suptitle() == (
        "Enc(text) of synth_test.jsonl, coloured by group of paraphrases\nlayer 2, mean of tokens"
    )


def test_a_view_keeps_its_mark_where_a_model_was_trained_the_other_way_round() -> None:
    one, other = make_analysis().models
    # Of the other model the code is read first, as the source.
    arrays = {**other.arrays, "classes": 1 - other.arrays["classes"]}
    other = replace(other, views=("code", "text"), arrays=arrays)
    figure = draw_projection(make_analysis(models=(one, other)))
    shapes = [
        {tuple(np.round(part.get_facecolors()[0], 3)): len(part.get_paths()[0].vertices) for part in axes.collections}
        for axes in figure.axes[:2]
    ]
    assert shapes[0] == shapes[1]
    assert len(set(shapes[0].values())) == 2


def test_a_sample_and_points_without_spread_are_said_to_be_so() -> None:
    model = make_model("a", [0] * 5 + [1] * 5, both=True)
    zero = {"values": [0.0, 0.0], "top": 2, "top_mean": 0.0}
    numbers = {**model.numbers, "difference": zero, "unit_difference": zero}
    model = replace(model, planes={"pca": np.zeros((10, 2))}, captions={"pca": {}}, numbers=numbers)
    figure = draw_projection(make_analysis(models=(model, model)))
    assert "20 pairs (5 drawn)" in figure.axes[0].get_title()
    assert [text.get_text() for text in figure.axes[0].texts] == ["all points are one point"]
    figure = draw_singular_values(make_analysis(models=(model,)))
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["all differences are zero"] * 2


def test_singular_values_are_drawn_down_to_rounding() -> None:
    analysis = make_analysis()
    figure = draw_singular_values(analysis)
    for axes, kind, count in zip(figure.axes, ("difference", "unit_difference"), (6, 1), strict=True):
        assert axes.get_yscale() == "log"
        for line, model in zip(axes.lines, analysis.models, strict=True):
            assert line.get_ydata().tolist() == model.numbers[kind]["values"][:count]
            assert line.get_xdata().tolist() == list(range(1, count + 1))
            assert line.get_label().startswith(f"{model.name} (mean of the {model.numbers[kind]['top']} largest: ")
        assert len({line.get_color() for line in axes.lines}) == 2
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    assert figure.axes[0].get_title() == "Enc(text) - Enc(code)"
    assert "20 pairs in 6 dimensions, last layer, last token" in figure.get_suptitle()


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    # Names that a font lacks, that Matplotlib would read as formulas, that would drop out of a legend.
    analysis = make_analysis("paraphrase", ("_run", "日本 $x_1$"), test_file="数据.jsonl")
    files = write_figures(analysis, tmp_path)
    assert files == output_files(tmp_path)[2:] == sorted(tmp_path.iterdir())
    before = [file.read_bytes() for file in files]
    assert before[0].startswith(b"\x89PNG")
    assert ElementTree.fromstring(before[1]).tag.endswith("svg")
    write_figures(analysis, tmp_path)
    assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize("palette", [PALETTE, [colours.strong for colours in COLOURS.values()]])
def test_colours_of_pictures_are_told_apart_by_the_colour_blind(palette: Any) -> None:
    """Through the usual linear model of missing red or green receptors."""
    rgb = np.asarray([to_rgba(colour)[:3] for colour in palette]) ** 2.2
    to_lms = np.asarray([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    seen = {
        "protan": [[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]],
        "deutan": [[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]],
    }
    for matrix in seen.values():
        simulated = rgb @ (np.linalg.inv(to_lms) @ np.asarray(matrix) @ to_lms).T
        simulated = np.clip(simulated, 0, 1) ** (1 / 2.2)
        distance = np.linalg.norm(simulated[:, None] - simulated[None], axis=2) + 9 * np.eye(len(palette))
        assert distance.min() > 0.1


def test_what_is_kept_is_what_was_drawn(tmp_path: Path) -> None:
    analysis = make_analysis("steps")
    save(analysis, tmp_path)
    found = load(tmp_path)
    for name in ("test_file", "test_fingerprint", "settings", "classes"):
        assert getattr(found, name) == getattr(analysis, name)
    for kept, model in zip(found.models, analysis.models, strict=True):
        for name in ("name", "model_path", "views", "config", "numbers", "captions"):
            assert getattr(kept, name) == getattr(model, name)
        before, after = ({**each.arrays, **each.planes} for each in (model, kept))
        assert {name: (array.dtype, array.tolist()) for name, array in after.items()} == {
            name: (array.dtype, array.tolist()) for name, array in before.items()
        }
    write_figures(found, tmp_path)
    save(make_analysis(), tmp_path)
    # A kill at this moment leaves no picture that shows other data.
    assert sorted(file.name for file in tmp_path.iterdir()) == [JSON_FILE, DATA_FILE]


def test_a_folder_that_holds_no_whole_analysis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such data file of an analysis"):
        load(tmp_path)
    save(make_analysis(), tmp_path)
    described = json.loads((tmp_path / JSON_FILE).read_text())
    # Cut short between the two files, by a kill while an earlier analysis was replaced.
    kept = (tmp_path / JSON_FILE).read_bytes()
    save(make_analysis("steps"), tmp_path)
    (tmp_path / JSON_FILE).write_bytes(kept)
    with pytest.raises(UserError, match=r"not the data that analysis\.json was written with"):
        load(tmp_path)
    save(make_analysis(), tmp_path)
    for changed, message in (({"version": 0}, "version 0"), ({"classes": None}, "can't be read as an analysis")):
        (tmp_path / JSON_FILE).write_text(json.dumps({**described, **changed}))
        with pytest.raises(UserError, match=message):
            load(tmp_path)
    (tmp_path / JSON_FILE).write_text("{")
    with pytest.raises(UserError, match=r"analysis.json:1: is damaged: .*; run it again"):
        load(tmp_path)
