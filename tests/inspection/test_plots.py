"""What is drawn of an analysis and in which colour; pictures show what the data holds; the folder keeps all of it."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba

import tiny
from stepjepa.base.errors import UserError
from stepjepa.evaluation.embeddings import ViewEmbeddings
from stepjepa.inspection import analysis
from stepjepa.inspection.analysis import AnalysisSettings, choose_points, group_of, view_names
from stepjepa.inspection.plots import (
    REST,
    Points,
    choose_classes,
    draw_projection,
    project,
    save_figure,
)

# -- points ------------------------------------------------------------------------------------------------------------

# Three pairs of record 1, one of record 0 and one of record 2; the numbers in the vectors say which is which.
RECORD = np.asarray([0, 1, 1, 1, 2])
PAIR = np.asarray([1, 1, 2, 3, 1])
VALUES = (10 * RECORD + PAIR)[:, None].astype(np.float32)
EMBEDDINGS = ViewEmbeddings(VALUES, -VALUES, RECORD, PAIR, np.arange(5))
RECORDS = [
    tiny.make_record("", "q", answer, group=group)
    for answer, group in (("Good", 3), (" Bad\nfilm ", "b"), ("x" * 50, 3))
]


def points(
    colouring: str, views: tuple[str, str] = ("question", "answer"), distance: int = 1, **options: Any
) -> Points:
    settings = AnalysisSettings(["run"], "t.jsonl", "out", t_sne_type=colouring, **options)
    return choose_points(EMBEDDINGS, RECORDS, views, settings, distance)


def drawn(found: Points) -> list[tuple[float, str]]:
    return [(float(vector[0]), label) for vector, label in zip(found.vectors, found.labels, strict=True)]


def test_views_are_both_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    result = points("in_n_out")
    sources = [(value, "Enc(question)") for value in (1, 11, 12, 13, 21)]
    assert drawn(result) == sources + [(-value, "Enc(answer)") for value, _ in sources]
    assert result.is_target.tolist() == [False] * 5 + [True] * 5
    monkeypatch.setattr(analysis, "MOST_POINTS", 2)
    sample = points("in_n_out", seed=1)
    assert (sample.vectors[:2] == -sample.vectors[2:]).all()


def test_labels_of_the_record_colour_the_text_alone() -> None:
    answers = [(1, "Good"), *[(value, "Bad film") for value in (11, 12, 13)], (21, "x" * 50)]
    assert drawn(points("rotten_tomatoes")) == answers
    assert [label for _, label in drawn(points("paraphrase"))] == ["group 3", *["group b"] * 3, "group 3"]
    # Where the code predicts the text, the text is the target.
    reverse = points("rotten_tomatoes", view_names("llm-jepa", True))
    assert drawn(reverse) == [(-value, label) for value, label in answers]
    with pytest.raises(UserError, match=r"memory.jsonl:7: no field 'group'.*prepare paraphrase"):
        group_of(tiny.make_record("", "q", "a", line=7))


@pytest.mark.parametrize(
    ("reverse", "distance", "steps"),
    [(False, 1, [1, 2, 2, 3, 4]), (True, 1, [2, 3, 1, 2, 3]), (False, 3, [1, 2, 4, 5, 6])],
)
def test_a_target_is_the_step_after_its_source(reverse: bool, distance: int, steps: list[int]) -> None:
    result = dict(drawn(points("steps", view_names("step-jepa", reverse), distance)))
    assert [result[place] for place in (11, 12, -11, -12, -13)] == [f"step {n}" for n in steps]


def test_the_largest_classes_have_a_colour() -> None:
    labels = [f"group {letter}" for number, letter in enumerate("ihgfedcba") for _ in range(9 - number)]
    assert choose_classes(labels, "paraphrase") == [f"group {letter}" for letter in "cdefghi"]
    numbered = [f"group {number}" for number in (10, 2, 1, 11)]
    assert choose_classes(numbered, "paraphrase") == [f"group {number}" for number in (1, 2, 10, 11)]
    steps = [f"step {number}" for number in (10, 9, 2, 1, 3, 4, 5, 6, 7) for _ in range(number)]
    assert choose_classes(steps, "steps") == [f"step {number}" for number in range(1, 8)]


def test_projections() -> None:
    vectors = np.random.default_rng(1).normal(size=(41, 7)).astype(np.float32)
    plane, (across, _) = project("PCA", vectors, 0)
    centred = vectors.astype(np.float64) - vectors.mean(0, dtype=np.float64)
    _, values, right = np.linalg.svd(centred)
    assert np.abs(plane) == pytest.approx(np.abs(centred @ right[:2].T), abs=1e-6)
    assert across == f"PC 1 ({values[0] ** 2 / (values**2).sum():.1%} of variance)"
    first, (across, _) = project("t-SNE", vectors[:30], 3)
    assert np.array_equal(first, project("t-SNE", vectors[:30], 3)[0])
    assert across == "t-SNE 1 (perplexity 9.67)"
    for name in ("PCA", "t-SNE"):
        with pytest.raises(UserError, match="4 points or more, and there are 3"):
            project(name, vectors[:3], 0)
        # Rounding is not blown up to a picture.
        noise = np.random.default_rng(0).normal(size=(50, 8))
        plane, (across, _) = project(name, (7 + 1e-6 * noise).astype(np.float32), 0)
        assert not plane.any() and across == "all points are one point"
        assert project(name, (7 + 1e-2 * noise).astype(np.float32), 0)[0].any()


# -- pictures ----------------------------------------------------------------------------------------------------------

LABELS = {
    "in_n_out": ("Enc(question)",) * 10 + ("Enc(answer)",) * 10,
    # Names that a font lacks, that Matplotlib would read as formulas, that would drop out of a legend.
    "paraphrase": ("_group b", "group $c_2$ 日") * 6 + tuple(f"group {n}" for n in range(8)),
    "steps": ("step 1", "step 2", "step 3", "step 4") * 5,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
def test_every_point_is_drawn_in_the_colour_that_the_legend_gives_its_label(kind: str, tmp_path: Path) -> None:
    both = np.arange(20) >= (10 if kind != "paraphrase" else 20)
    result = {
        f"model {seed} $x": Points(np.random.default_rng(seed).normal(size=(20, 6)).astype(np.float32), both, labels)
        for seed, labels in enumerate([LABELS[kind]] * 2)
    }
    figure = draw_projection(result, kind, "t.jsonl", 42)
    assert figure.get_suptitle().endswith("\nt.jsonl")
    save_figure(figure, tmp_path / "a.png")
    (legend,) = figure.legends
    texts = [text.get_text().strip() for text in legend.get_texts()]
    colours = dict(zip(texts, (to_rgba(each.get_facecolor())[:3] for each in legend.legend_handles), strict=True))
    assert (REST in texts) == (kind == "paraphrase")
    for axes, (name, each) in zip(figure.axes, product(("PCA", "t-SNE"), result.values()), strict=True):
        shown = {
            (float(x), float(y)): (*part.get_facecolors()[0][:3], number % 2)
            for number, part in enumerate(axes.collections)
            for x, y in part.get_offsets()
        }
        plane, _ = project(name, each.vectors, 42)
        for (x, y), label, target in zip(plane.tolist(), each.labels, each.is_target.tolist(), strict=True):
            wanted = colours.get(label.replace("$", r"\$"), colours.get(REST))
            assert shown[x, y] == pytest.approx((*wanted, int(target)))
