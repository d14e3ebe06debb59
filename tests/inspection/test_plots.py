"""What is drawn of an analysis and in which colour; pictures show what the data holds; the folder keeps all of it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgba

import tiny
from stepjepa.errors import UserError
from stepjepa.inspection.analysis import (
    DATA_FILE,
    JSON_FILE,
    Analysis,
    ModelAnalysis,
    Points,
    as_table,
    choose_points,
    load,
    output_files,
    save,
    view_names,
)
from stepjepa.inspection.embeddings import ViewEmbeddings
from stepjepa.inspection.plots import (
    PALETTE,
    REST,
    REST_COLOUR,
    choose_classes,
    draw_projection,
    draw_singular_values,
    project,
    write_figures,
)
from stepjepa.inspection.record import COLOURS

# -- points ------------------------------------------------------------------------------------------------------------

# Three pairs of record 1, one of record 0 and one of record 2; the numbers in the vectors say which is which.
RECORD = np.asarray([0, 1, 1, 1, 2])
PAIR = np.asarray([1, 1, 2, 3, 1])
VALUES = (10 * RECORD + PAIR)[:, None].astype(np.float32)
EMBEDDINGS = ViewEmbeddings(VALUES, -VALUES, RECORD, PAIR)
RECORDS = [
    tiny.make_record("", "q", answer, group=group)
    for answer, group in (("Good", 3), (" Bad\nfilm ", "b"), ("x" * 50, 3))
]


def points(colouring: str, views: tuple[str, str] = ("text", "code"), **options: Any) -> Points:
    return choose_points(EMBEDDINGS, colouring, RECORDS, views=views, **options)


def drawn(found: Points) -> list[tuple[float, str]]:
    return [(float(vector[0]), label) for vector, label in zip(found.vectors, found.labels, strict=True)]


def test_views_are_both_drawn() -> None:
    found = points("in_n_out")
    sources = [(value, "text") for value in (1, 11, 12, 13, 21)]
    assert drawn(found) == sources + [(-value, "code") for value, _ in sources]
    assert found.is_target.tolist() == [False] * 5 + [True] * 5
    sample = points("in_n_out", most=2, seed=1)
    assert (sample.vectors[:2] == -sample.vectors[2:]).all()


def test_labels_of_the_record_colour_the_text_alone() -> None:
    answers = [(1, "Good"), *[(value, "Bad film") for value in (11, 12, 13)], (21, "x" * 50)]
    assert drawn(points("rotten_tomatoes")) == answers
    assert [label for _, label in drawn(points("paraphrase"))] == ["group 3", *["group b"] * 3, "group 3"]
    # Where the code predicts the text, the text is the target.
    reverse = points("rotten_tomatoes", view_names("llm-jepa", True))
    assert drawn(reverse) == [(-value, label) for value, label in answers]
    with pytest.raises(UserError, match=r"memory.jsonl:7: no field 'group'.*prepare paraphrase"):
        choose_points(EMBEDDINGS, "paraphrase", [tiny.make_record("", "q", "a", line=7)], views=("text", "code"))


@pytest.mark.parametrize(("reverse", "steps"), [(False, [1, 2, 2, 3, 4]), (True, [2, 3, 1, 2, 3])])
def test_a_target_is_the_step_after_its_source(reverse: bool, steps: list[int]) -> None:
    found = dict(drawn(points("steps", view_names("step-jepa", reverse))))
    assert [found[place] for place in (11, 12, -11, -12, -13)] == [f"step {n}" for n in steps]


def test_the_largest_classes_have_a_colour() -> None:
    labels = [f"group {letter}" for number, letter in enumerate("ihgfedcba") for _ in range(9 - number)]
    assert choose_classes(labels, "paraphrase") == [f"group {letter}" for letter in "cdefghi"]
    numbered = [f"group {number}" for number in (10, 2, 1, 11)]
    assert choose_classes(numbered, "paraphrase") == [f"group {number}" for number in (1, 2, 10, 11)]
    steps = [f"step {number}" for number in (10, 9, 2, 1, 3, 4, 5, 6, 7) for _ in range(number)]
    assert choose_classes(steps, "steps") == [f"step {number}" for number in range(1, 8)]


def test_projections() -> None:
    vectors = np.random.default_rng(1).normal(size=(41, 7)).astype(np.float32)
    plane, caption = project("pca", vectors, 0)
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, values, right = np.linalg.svd(centred)
    assert np.abs(plane) == pytest.approx(np.abs(centred @ right[:2].T), abs=1e-6)
    assert caption["variance"] == pytest.approx(values[:2] ** 2 / (values**2).sum(), abs=1e-6)
    first, caption = project("tsne", vectors[:30], 3)
    assert np.array_equal(first, project("tsne", vectors[:30], 3)[0])
    assert caption == {"perplexity": 29 / 3}
    for name, fewest in (("pca", 2), ("tsne", 4)):
        with pytest.raises(UserError, match=f"{name} needs {fewest} points or more"):
            project(name, vectors[: fewest - 1], 0)
        # Rounding is not blown up to a picture.
        noise = np.random.default_rng(0).normal(size=(50, 8))
        plane, caption = project(name, (7 + 1e-6 * noise).astype(np.float32), 0)
        assert not plane.any() and caption == {}
        assert project(name, (7 + 1e-2 * noise).astype(np.float32), 0)[0].any()


# -- pictures ----------------------------------------------------------------------------------------------------------

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
        shown = {
            (float(x), float(y)): (rounded(colour), number)
            for number, collection in enumerate(axes.collections)
            for (x, y), colour in zip(collection.get_offsets(), collection.get_facecolors(), strict=True)
        }
        assert len(shown) == len(model.planes[name])
        arrays = model.arrays["classes"], model.arrays["is_target"]
        for (x, y), of_class, target in zip(model.planes[name].tolist(), *arrays, strict=True):
            assert shown[x, y] == (wanted[of_class], int(target))
    shown_labels = [label.replace("日", "▯").replace("$", r"\$") for label in analysis.classes]
    labels = [f"Enc({label})" if kind == "in_n_out" else label for label in shown_labels]
    extra = {"steps": ["later steps", "read as source", "read as target"], "paraphrase": ["all others"]}
    assert texts == labels + extra.get(kind, [])
    assert len(set(colours)) >= named


def test_titles_and_labels_say_what_is_shown() -> None:
    figure = draw_projection(make_analysis())
    assert "Enc(text) and Enc(code), coloured by view" in figure.get_suptitle()
    assert "synth_test.jsonl, last layer, last token" in figure.get_suptitle()
    first, _, below, _ = figure.axes
    assert first.get_title() == "regular\n20 pairs, cosine matched 0.750, shuffled 0.125"
    assert (first.get_xlabel(), first.get_ylabel()) == ("PC 1 (50.0% of variance)", "PC 2 (25.0% of variance)")
    assert (below.get_xlabel(), below.get_ylabel()) == ("t-SNE 1 (perplexity 4.33)", "t-SNE 2")
    # All of the left labels is in the picture.
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.yaxis.label.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1
    model = make_model("a", [0] * 5 + [1] * 5, both=True)
    model = replace(model, planes={"pca": np.zeros((10, 2))}, captions={"pca": {}})
    (axes,) = draw_projection(make_analysis(models=(model,))).axes
    assert [text.get_text() for text in axes.texts] == ["all points are one point"]


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


def test_singular_values_are_drawn_down_to_rounding() -> None:
    analysis = make_analysis()
    figure = draw_singular_values(analysis)
    for axes, kind, count in zip(figure.axes, ("difference", "unit_difference"), (6, 1), strict=True):
        assert axes.get_yscale() == "log"
        for line, model in zip(axes.lines, analysis.models, strict=True):
            assert list(line.get_ydata()) == model.numbers[kind]["values"][:count]
            assert (
                line.get_label().strip().startswith(f"{model.name} (mean of the {model.numbers[kind]['top']} largest")
            )
        assert len({line.get_color() for line in axes.lines}) == 2
    assert figure.axes[0].get_title() == "Enc(text) - Enc(code)"


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


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_what_was_drawn(tmp_path: Path) -> None:
    # Names that a font lacks, that Matplotlib would read as formulas, that would drop out of a legend.
    analysis = make_analysis("paraphrase", ("_run", "日本 $x_1$"), test_file="数据.jsonl")
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
    files = output_files(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert ElementTree.fromstring(files[3].read_bytes()).tag.endswith("svg")
    save(make_analysis(), tmp_path)
    # A kill at this moment leaves no picture that shows other data.
    assert sorted(file.name for file in tmp_path.iterdir()) == [JSON_FILE, DATA_FILE]


def test_a_folder_that_holds_no_whole_analysis_is_refused(tmp_path: Path) -> None:
    save(make_analysis(), tmp_path)
    described = json.loads((tmp_path / JSON_FILE).read_text())
    for changed, message in (({"version": 0}, "version 0"), ({"classes": None}, "can't be read as an analysis")):
        (tmp_path / JSON_FILE).write_text(json.dumps({**described, **changed}))
        with pytest.raises(UserError, match=message):
            load(tmp_path)
    (tmp_path / JSON_FILE).write_text(json.dumps(described))
    (tmp_path / DATA_FILE).unlink()
    with pytest.raises(UserError, match="no such data file of an analysis"):
        load(tmp_path)


def test_the_table_has_a_column_for_each_model() -> None:
    lines = [line.split("  ") for line in as_table(make_analysis()).splitlines()]
    cells = {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}
    assert cells[""] == ["regular", "llm-jepa"]
    assert cells["matched mean"] == ["0.75", "0.75"]
    assert cells["unit_difference top_mean"] == ["0.5", "0.5"]
