"""The points of an analysis in a page: which pair each is of, what colours it, and that texts stay texts."""

import json
import re
from typing import Any

import numpy as np
import pytest

from made_up_runs import make_run
from stepjepa.cli import main
from stepjepa.data.records import Record, parse_record
from stepjepa.inspection.analysis import Analysis, ModelAnalysis, choose_points, load, save
from stepjepa.inspection.embeddings import ViewEmbeddings
from stepjepa.pages.embeddings import describe_points, drawn_pairs, embedding_section
from stepjepa.pages.runs import read_runs

RECORDS, PAIRS = 7, 13


def records() -> list[Record]:
    turns = [{"role": "user", "content": "3?"}, {"role": "assistant", "content": "yes"}]
    return [parse_record({"messages": turns, "group": place % 3}) for place in range(RECORDS)]


def embeddings() -> ViewEmbeddings:
    """Of which the first number says the pair, and the second whether it is the target."""
    source = np.zeros((PAIRS, 3), np.float32)
    source[:, 0] = np.arange(PAIRS)
    target = source + np.asarray([0, 1, 0], np.float32)
    record, pair = np.arange(PAIRS) // 2, np.arange(PAIRS) % 2 + 1
    return ViewEmbeddings(source=source, target=target, record=record, pair=pair)


def make_analysis(kind: str, most: int, mode: str = "step-jepa", path: str = "elsewhere", **changes: Any) -> Analysis:
    views = ("step", "next step") if mode == "step-jepa" else ("text", "code")
    found = embeddings()
    points = choose_points(found, kind, records(), views=views, most=most, seed=11)
    classes = tuple(dict.fromkeys(points.labels))
    arrays = {name: getattr(found, name) for name in ("source", "target", "record", "pair")}
    arrays |= {"is_target": points.is_target, "classes": np.asarray([classes.index(each) for each in points.labels])}
    model = ModelAnalysis(
        "<b>model",
        path,
        views,
        {"mode": mode},
        {},
        {"pca": {"variance": [0.5, 0.25]}},
        arrays,
        {"pca": points.vectors[:, :2]},
    )
    return Analysis(
        "test.jsonl", "f" * 64, {"t_sne_type": kind, "max_points": most, "seed": 11}, classes, (model,), **changes
    )


@pytest.mark.parametrize("kind", ["in_n_out", "steps", "paraphrase"])
@pytest.mark.parametrize("most", [5, PAIRS, 1000])
def test_every_point_is_of_the_pair_that_was_drawn(kind, most):
    analysis = make_analysis(kind, most)
    model = analysis.models[0]
    assert drawn_pairs(analysis, model).tolist() == model.planes["pca"][:, 0].astype(int).tolist()


def test_colours_by_view_step_and_own_labels():
    analysis = make_analysis("steps", 1000)
    described = describe_points(analysis, analysis.models[0], {}, verdicts=True)
    by = {name: [each["names"][place] for place in each["of"]] for name, each in described["colourings"].items()}
    assert by["view"] == ["step"] * PAIRS + ["next step"] * PAIRS
    assert by["step"][:2] == ["step 1", "step 2"] and by["step"][PAIRS : PAIRS + 2] == ["step 2", "step 3"]
    assert "right or wrong" not in by, "no evaluation tells"
    assert described["target"] == [0] * PAIRS + [1] * PAIRS
    assert described["text"][PAIRS - 1] == "record 6, pair 1: step, step 1"
    groups = describe_points(
        make_analysis("paraphrase", 5), make_analysis("paraphrase", 5).models[0], {}, verdicts=True
    )
    assert list(groups["colourings"]) == ["view", "step", "group of paraphrases"]


def test_verdicts_and_texts_come_from_the_evaluation():
    analysis = make_analysis("in_n_out", 1000, mode="llm-jepa")
    lines = {
        0: {"scores": {"exact": True}, "headline": "exact", "prompt": "<b>3?</b>\n\u202e", "truth": "yes & no"},
        1: {"scores": {"exact": False}, "headline": "exact"},
    }
    described = describe_points(analysis, analysis.models[0], lines, verdicts=True)
    found = described["colourings"]["right or wrong"]
    assert [found["names"][place] for place in found["of"]][:5] == ["right"] * 2 + ["wrong"] * 2 + ["no verdict"]
    assert (found["names"], found["grey"]) == (["no verdict", "right", "wrong"], 1)
    assert described["text"][0] == ("record 0, pair 1: text, right<br>&lt;b&gt;3?&lt;/b&gt; \\u202e<br>yes &amp; no"), (
        "Plotly would take <b> for markup"
    )
    assert "right or wrong" not in describe_points(analysis, analysis.models[0], lines, verdicts=False)["colourings"]


def test_the_section_of_a_run_with_an_analysis_in_it(tmp_path):
    folder = make_run(tmp_path / "run", "1011010")
    (run,) = read_runs([folder])
    assert embedding_section(run) is None
    (folder / "look").mkdir()
    save(make_analysis("in_n_out", 1000, path=str(folder)), folder / "look")
    section = embedding_section(run)
    value = json.loads(re.search(r'id="scatter-data">(.*?)</script>', section.html, re.DOTALL)[1])
    assert set(value["charts"]) == {"scatter-0-pca"} and 'id="scatter-0-pca-data"' in section.html
    assert list(value["points"][0]["colourings"]) == ["view", "step", "right or wrong"]
    assert value["charts"]["scatter-0-pca"]["x"] == [float(place) for place in range(PAIRS)] * 2
    assert "<b>model" not in section.html and "&lt;b&gt;model" in section.html
    save(load(folder / "look"), tmp_path)
    assert embedding_section(run, tmp_path).html == section.html


def test_an_analysis_beside_the_runs_is_named(tmp_path, capsys):
    folder = make_run(tmp_path / "run", "1011010")
    (tmp_path / "look").mkdir()
    save(make_analysis("in_n_out", 1000, path=str(folder)), tmp_path / "look")
    page = ["report", str(folder), "--output_file", str(tmp_path / "page.html")]
    assert main([*page, "--analysis", str(tmp_path)]) == 2
    assert "holds no analysis.json; name an output folder of 'stepjepa analyze'" in capsys.readouterr().err
    assert main([*page, "--analysis", str(tmp_path / "look")]) == 0
    assert "Embeddings of the views" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["report", str(folder), "--analysis", str(tmp_path / "look")]) == 2
    assert "--analysis is for a page" in capsys.readouterr().err
