"""The experiment: its grids expand, its data is cut as it says, its figures are kept whole and give its page."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from run_figures import from_folder, read_figures, write_figures

from made_up_runs import make_run
from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.evaluation.run import pair_embedder
from stepjepa.models.loading import load_model
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.tasks.regex import find_difference
from stepjepa.tasks.regex_languages import Languages

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "examples" / "experiment"
GRIDS = sorted(EXPERIMENT.glob("*.yaml"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    # Names as common as these may be taken by other tests' modules.
    names = (
        "data",
        "collect",
        "splits",
        "untouched",
        "frame",
        "cells",
        "ranking",
        "computed_baselines",
        "retrieval",
        "word_order",
        "pictures",
        "on_gpu",
    )
    names += ("retrieval_sets", "retrieval_results", "retrieval_claims", "results")
    for name in names:
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        importlib.sys.modules.pop(name, None)


def record(answer: str, number: int) -> str:
    turns = [("user", f"question {number}"), ("assistant", answer)]
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def test_answers_stay_together_and_nothing_is_lost(scripts: dict[str, ModuleType]) -> None:
    lines = [record(f"answer {number % 13}", number) for number in range(101)]
    parts = scripts["data"].cut(lines, 11, 17)
    assert sorted(line for part in parts for line in part) == sorted(lines)
    answers = [{scripts["data"].answer(line) for line in part} for part in parts]
    assert not answers[0] & answers[1] | answers[0] & answers[2] | answers[1] & answers[2]
    # Of an answer there are 7 or 8 records, so a set is at most that much too large.
    assert 11 <= len(parts[0]) < 11 + 8
    assert 17 <= len(parts[1]) < 17 + 8


def test_sums_are_right_and_both_orders_of_two_numbers_stay_together(scripts: dict[str, ModuleType]) -> None:
    lines = scripts["data"].sums()
    assert len(lines) == 100 * 100 and len({*lines}) == len(lines)
    turns = [[turn["content"] for turn in json.loads(line)["messages"]] for line in lines]
    numbers = [tuple(int(part.replace(" ", "")) for part in question.split("+")) for question, _ in turns]
    assert all(sum(pair) == int(answer.replace(" ", "")) for pair, (_, answer) in zip(numbers, turns, strict=True))
    assert ["4 9 + 0 7", "0 5 6"] in turns
    places: dict[tuple[int, ...], list[int]] = {}
    for place, pair in enumerate(numbers):
        places.setdefault(tuple(sorted(pair)), []).append(place)
    assert all(found == [*range(found[0], found[0] + len(found))] for found in places.values())
    asked = [[turn["content"] for turn in json.loads(line)["messages"]] for line in scripts["data"].sums(digits=False)]
    assert ["What is 49 + 7?", "56"] in asked


@pytest.mark.sample(5)
@pytest.mark.parametrize("grid", GRIDS, ids=[grid.stem for grid in GRIDS])
def test_every_grid_expands(grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only that the files are there is asked for before a trial begins.
    shared = [
        tmp_path.parent / "shared/data/llm_jepa" / f"{n}_{p}.jsonl"
        for n in ("synth", "gsm8k", "spider")
        for p in ("train", "test")
    ]
    own = [tmp_path / name for name in re.findall(r"runs/experiment/[\w/-]+\.jsonl", grid.read_text())]
    for path in (*shared, *own):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record("answer", 1) + "\n")
    # A model that is trained further: its folder with a configuration is asked for, too.
    for folder in re.findall(r"model_name: (runs/\S+)", grid.read_text()):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "terms"))
    assert main(["sweep", "--config", str(grid), "--output_dir", "planned", "--dry_run"]) == 0
    assert not (tmp_path / "planned").exists()


@pytest.mark.slow
def test_every_number_is_what_the_figures_give(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    results = scripts["results"]
    monkeypatch.setattr(results, "read", functools.cache(results.read))
    code, output = results.main(["--check"]), capsys.readouterr().out
    assert (code, output) == (0, "all figures agree: results.md, results-tables.md, evidence.md, README.md, runs.csv\n")
    # One verdict of one run turned round.
    figures = tmp_path / "figures"
    shutil.copytree(EXPERIMENT / "figures", figures)
    content = json.loads((figures / "turk.json").read_text())
    verdicts = content["runs"][0]["examples"]["headline"]
    content["runs"][0]["examples"]["headline"] = f"{int(verdicts[0], 16) ^ 8:x}{verdicts[1:]}"
    (figures / "turk.json").write_text(json.dumps(content))
    # The pages take seconds: the table of all runs is checked, and of the pages the rows of this file.
    monkeypatch.setattr(results, "PAGES", ())
    assert results.main(["--check", "--figures", str(figures)]) == 1
    before, after = (results.Questions(results.read(each)).rows("turk") for each in (results.FIGURES, figures))
    assert len(before) == len(after)
    assert before != after


def sweep_of(folder: Path, trials: list[tuple[str, int, str]]) -> Path:
    """A sweep folder: label, seed and right answers of every trial; without these the trial has failed."""
    listed = []
    for label, seed, right in trials:
        name = f"{label}/seed{seed}"
        jepa = {"mode": "regular"} if label.startswith("regular") else {"mode": "llm-jepa", "lbd": 0.5}
        longer = label == "regular-1.3x"
        if right:
            more = {"steps": 26, "training": {"num_train_epochs": 3.9}} if longer else {"steps": 20}
            flops = 1e9 if label == "regular" else 1.3e9
            make_run(folder / name, right, seed=seed, jepa=jepa, flops=flops, **more)
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.trial.json").write_text(json.dumps({"status": "finished" if right else "failed"}))
        listed.append({"name": name, "label": label, "seed": seed})
    (folder / "sweep.json").write_text(json.dumps({"trials": listed}))
    return folder


def test_figures_of_two_machines_are_put_together(scripts: dict[str, ModuleType], tmp_path: Path, capsys) -> None:
    figures = tmp_path / "figures"
    here = sweep_of(tmp_path / "here" / "a", [("regular", 23, "11000"), ("jepa", 23, "")])
    assert scripts["collect"].main([str(here), "--figures", str(figures), "--missing"]) == 0
    assert capsys.readouterr().out == "jepa/seed23\n"
    assert scripts["collect"].main([str(here), "--figures", str(figures)]) == 0
    there = sweep_of(tmp_path / "there" / "a", [("regular", 23, ""), ("jepa", 23, "11100")])
    assert scripts["collect"].main([str(there), "--figures", str(figures)]) == 0
    assert [each.key for each in read_figures(figures / "a.json")] == [("jepa", "23"), ("regular", "23")]


def test_rows_at_equal_steps_and_at_equal_flops(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    rights = {"regular": ("11000", "10000"), "regular-1.3x": ("11100", "10000"), "arm": ("11110", "11000")}
    trials = [
        (label, seed, right) for label, both in rights.items() for seed, right in zip((23, 82), both, strict=True)
    ]
    scripts["collect"].main([str(sweep_of(tmp_path / "steps-test", trials)), "--figures", str(tmp_path)])
    table = scripts["frame"].read(tmp_path)
    assert scripts["frame"].same_flops(table, "steps-test", "arm") == "regular-1.3x"
    heads = scripts["results"].HEADS
    row = dict(zip(heads, scripts["results"].Questions(table).rows("steps-test")[-1], strict=True))
    # By hand: 80 and 40 %, plain 40 and 20, for its FLOPs 60 and 20; differences 40 and 20, 20 and 20.
    assert (row["arm"], row["right, %"], row["FLOPs"]) == ("arm", "60.0 ± 28.3", "1.30")
    assert row["at equal steps, points [95 %]"] == "+30.0 [-97.1, +157.1]"
    assert row["at equal FLOPs, points [95 %]"] == "+20.0"


def test_runs_are_paired_with_those_of_their_version(scripts: dict[str, ModuleType]) -> None:
    rows = [("synth", "regular", "0.1", 10), ("synth", "arm", "0.2", 50), ("synth-again", "regular", "0.2", 30)]
    table = pd.DataFrame(rows, columns=["file", "arm", "version", "right"]).assign(seed=82)
    frame = scripts["frame"]
    assert frame.test(table, "synth", "arm", "regular").mean == 20
    assert not frame.partners(table, "synth", "arm", "regular")[1]
    # Without one of its own version another is taken, and that is said.
    assert frame.test(table[:2], "synth", "arm", "regular").mean == 40
    assert scripts["results"].Questions(table[:2]).against("synth", "arm", "regular") == r"+40.0\*"
    # Each seed has its own version; fewer pairs are not taken for the sake of one version.
    rows = [("synth", "regular", "0.1", 10, 82), ("synth", "regular", "0.1", 20, 23)]
    rows += [("synth", "arm", "0.1", 40, 82), ("synth", "arm", "0.2", 60, 23)]
    rows += [("synth-again", "regular", "0.2", 0, 82), ("synth-again", "regular", "0.2", 50, 23)]
    table = pd.DataFrame(rows, columns=["file", "arm", "version", "right", "seed"])
    assert frame.test(table, "synth", "arm", "regular").mean == 20
    result, mixed = frame.partners(table[:5], "synth", "arm", "regular")
    assert (list(result.right.sort_index()), mixed) == ([20, 10], True)


def test_a_score_is_taken_apart(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch) -> None:
    splits = scripts["splits"].split(["dog.*", "([0-9]){3,}"], ["(dog.*)|(dog.*)", "([a-z]){7,}", "lake", ".*(.*)"])
    assert splits == {
        "number": [False, True, False, False],
        "language": [True, False, False, False],
        "shape": [False, True, False, False],
        "trivial": [False, False, False, True],
    }
    monkeypatch.setattr(scripts["frame"], "read_splits", lambda: {"synth": splits})
    scripts["collect"].main([str(sweep_of(tmp_path / "synth", [("a", 23, "1100")])), "--figures", str(tmp_path)])
    row = scripts["frame"].read(tmp_path).iloc[0]
    result = [row[name] for name in ("right", "number", "language seen", "shape new", "rest")]
    assert result == pytest.approx([50, 100, 100, 100 / 3, 100 / 3])
    assert scripts["frame"].copies(row)


def test_weights_give_a_set_the_operators_of_another(scripts: dict[str, ModuleType]) -> None:
    # Of four answers two have "&" and one "|"; of those looked at two in three have "&", and none "~".
    here, there = ["a&b", "c&d", "a|b", "e"], ["a&b", "x&y", "z", "~(q)"]
    # 2 of 3 for two records, 1 of 3 for one, times four records; "|" is not among the others, "~" is not here.
    assert scripts["untouched"].weights(here, there) == pytest.approx([4 / 3, 4 / 3, 0, 4 / 3], abs=1e-4)
    assert scripts["frame"].share([1, 0, 1, 1], [2, 1, 0, 1]) == 75


@pytest.mark.slow
def test_languages_and_splits_are_those_of_the_data(scripts: dict[str, ModuleType], shared_data: Path) -> None:
    files = (shared_data / "llm_jepa" / f"synth_{name}.jsonl" for name in ("train", "test"))
    train, test = map(scripts["splits"].answers, files)
    languages = Languages()
    result = [languages.of(text) for text in train[:97]]
    assert result == [next(other for other in train if find_difference(other, text) is None) for text in train[:97]]
    splits, shape = scripts["splits"].read_splits()["synth"], scripts["splits"].shape
    assert splits["number"] == ["{" in text for text in test]
    shapes, known = set(map(shape, train)), set(train)
    assert splits["shape"] == [shape(text) in shapes for text in test]
    # Whoever has the text has the language.
    assert all(observed for observed, text in zip(splits["language"], test, strict=True) if text in known)


def test_figures_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"regular-{seed}", "1000001", seed=seed, flops=7e9) for seed in (23, 82)]
    figures = [from_folder(folder, "regular", "test") for folder in folders]
    shares = {"headline": [0.25, 1.0, 0.0], "lenient": [0.0, 1.0, 0.0], "stopped": None}
    figures[1] = replace(figures[1], run=replace(figures[1].run, indices=[2, 3, 11], examples=shares))
    file = tmp_path / "figures" / "a.json"
    write_figures(file, figures)
    for result, each in zip(read_figures(file), figures, strict=True):
        elsewhere = replace(each.run, folder=Path(f"{each.label}/seed{each.run.seed}"))
        assert result == replace(each, run=elsewhere)
    # "1000001" by hand: 65, in two digits.
    text = file.read_text()
    run = json.loads(text)["runs"][0]
    assert (run["examples"]["headline"], run["indices"]) == ("41", 7)
    for damaged in (text[:40], text.replace('"41"', '"ffff"'), text.replace('"steps": 10', '"step": 10')):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"a\.json"):
            read_figures(file)


def views(source: np.ndarray, target: np.ndarray) -> ViewEmbeddings:
    count = np.arange(len(source))
    return ViewEmbeddings(source.astype(np.float32), target.astype(np.float32), count, np.ones_like(count), count)


def test_plain_training_is_read_where_it_finds_most(scripts: dict[str, ModuleType], monkeypatch) -> None:
    retrieval, ranking, generator = scripts["retrieval"], scripts["ranking"], np.random.default_rng(5)
    monkeypatch.setattr(retrieval, "TRIED", 40)
    records = [parse_record(json.loads(record(f"answer {n}", n)), "a.jsonl", n) for n in range(73)]
    place = {each.answer: number for number, each in enumerate(records)}
    words, turn = generator.normal(size=(73, 7)), np.linalg.qr(generator.normal(size=(7, 7)))[0]
    # As they are, targets are near their sources at layer 2 alone; at layer 1 an exact map takes one to the other.
    target = {0: generator.normal(size=(73, 7)), 1: words @ turn + 3, 2: words + generator.normal(size=(73, 7)) / 2}

    def embed(some: list, layout: str, layers: Iterable[int] = range(3)) -> dict[tuple[int, str], tuple]:
        chosen = [place[each.answer] for each in some]
        shown = {
            pooling: words if (layout, pooling) == ("branched", "mean") else 0 * words + 1
            for pooling in retrieval.POOLINGS
        }
        return {
            (layer, pooling): (shown[pooling][chosen], target[layer][chosen])
            for layer, pooling in product(layers, retrieval.POOLINGS)
        }

    known, test = records[:60], ranking.asked(ranking.DATA["spider"]._replace(chosen=20), records[60:])
    plain, *behind, headed = retrieval.without_objective({"arm": "a"}, embed, known, test)
    assert plain["choice"].startswith("branched, layer 2, mean")
    assert [mapped["method"] for mapped in (*behind, headed)] == ["ridge", "canonical", "heads"]
    for mapped in behind:
        assert mapped["choice"].startswith("branched, layer 1, mean, penalty ")
        assert mapped["hits_at_1"] == mapped["hits_at_1_of_text"] == 100 > plain["hits_at_1"] > 50
        assert (mapped["queries"], mapped["candidates"]) == (13, 13)
    # With few answers, also a linear classifier: sources that tell which of three answers it is, at one layer.
    few = [
        replace(each, messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": f"answer {n % 3}"}))
        for n, each in enumerate(records)
    ]
    known, test = few[:60], ranking.asked(test.data._replace(computed=True), few[60:])

    def classes(some: list, layout: str) -> dict[tuple[int, str], tuple]:
        own = np.asarray([[each.answer == f"answer {n}" for n in range(3)] for each in some], np.float32)
        return {
            (0, "mean"): (0 * own, own),
            (1, "last"): (own @ np.float32([[0, 9, 1], [4, 0, 2], [1, 1, 1]]), 0 * own),
        }

    *_, classified, headed = retrieval.without_objective({"arm": "a"}, classes, known, test)
    assert (classified["method"], classified["choice"]) == ("classifier", "separate, layer 1, last")
    assert (classified["hits_at_1"], classified["candidates"]) == (100, 3)
    assert headed["method"] == "heads"
    known, test = records[:60], ranking.asked(test.data._replace(computed=False), records[60:])
    rows = retrieval.without_objective({"arm": "a"}, partial(embed, layers=[0, 1]), known, test)
    assert not any("layer 2" in row["choice"] for row in rows)


def test_one_pass_embeds_as_one_readout_at_a_time_does(scripts: dict[str, ModuleType]) -> None:
    retrieval = scripts["retrieval"]
    texts = ["seven", "a much longer question than the others have", "three words more", "eleven"]
    records = [parse_record(json.loads(record(text, n)), "a.jsonl", n) for n, text in enumerate(texts)]
    model, tokenizer = load_model("preset:tiny", texts=texts, predictors=0, seed=5)
    for layout in retrieval.LAYOUTS:
        everywhere = retrieval.embed_everywhere(model, tokenizer, records, layout, [0, 3])
        assert list(everywhere) == [(0, "last"), (0, "mean"), (3, "last"), (3, "mean")]
        for (layer, pooling), sides in everywhere.items():
            place = {"layout": layout, "jepa_layer": layer, "pooling": pooling}
            alone = pair_embedder(model, tokenizer, JepaConfig(mode="llm-jepa", predictors=0, **place))(records)
            for side, expected in zip(sides, (alone.source, alone.target), strict=True):
                np.testing.assert_allclose(side, expected, atol=1e-5)


def test_training_answers_are_candidates_that_distract(scripts: dict[str, ModuleType]) -> None:
    ranking, target = scripts["ranking"], np.eye(5)
    lines = [json.loads(record(f"answer {number}", number)) for number in (0, 1, 2, 0)]
    records = [parse_record(line, "a.jsonl", 1) for line in lines]
    test, train = (ranking.asked(ranking.DATA["turk"], part) for part in (records[:2], records))
    # The first question is nearer to a training answer than to its own; an answer of both files is asked once.
    source = np.array([[0.5, 0, 1, 0, 0], [0, 1, 0, 0, 0]])
    result = ranking.beside_training_answers({}, views(source, target[:2]), views(target[:4], target[:4]), test, train)
    assert (result["candidates"], result["hits_at_1"], result["mrr"]) == (3, 50, 75)


def test_an_answer_is_told_from_its_twin_by_the_order_of_its_parts(scripts: dict[str, ModuleType]) -> None:
    module = scripts["word_order"]
    assert [*module.swaps("(dog).*([0-9]){3,}")] == ["([0-9]).*(dog){3,}"]
    # Two numbers of times, or two parts, but not one of each; equal parts give nothing new.
    assert [*module.swaps("dog{3,}[a-z]{7,}dog")] == [
        "[a-z]{3,}dog{7,}dog",
        "dog{7,}[a-z]{3,}dog",
        "dog{3,}dog{7,}[a-z]",
    ]
    answers = ["([A-Z]).*(dog)", "([A-Z])|(dog)", "(dog).*([A-Z])", "(truck).*", "([a-z]).*([0-9])"]
    records = [parse_record(json.loads(record(answer, number))) for number, answer in enumerate(answers)]
    letters = lambda text, **_: SimpleNamespace(input_ids=[*text])  # noqa: E731
    asked = module.with_twins(scripts["ranking"].DATA["turk"], records, letters)
    # The second answer means the same swapped, the fourth has one part, and twins of the others are candidates once.
    assert asked.queries.tolist() == [0, 2, 4]
    assert [asked.records[place].answer for place in asked.twins] == [answers[2], answers[0], "([0-9]).*([a-z])"]
    assert [asked.records[place].answer for place in asked.candidates] == [*answers, "([0-9]).*([a-z])"]
    assert asked.right == [[0], [2], [4]]
    # Bags of letters: each answer is as near as its twin, and two are as near as the second answer, too.
    vectors = np.asarray(
        [[each.answer.count(letter) for letter in "AZdogtruck09az"] for each in asked.records], np.float32
    )
    mrr = 100 * (1 / 3 + 1 / 3 + 1 / 2) / 3
    assert module.figures(vectors, vectors, asked) == pytest.approx(
        {"nearer_than_twin": 50, "hits_at_1": 0, "mrr": mrr}
    )
    # Two questions are at their answers, the third at the twin, so that all five wrong candidates rank first.
    target = np.eye(8, dtype=np.float32)
    source = target.copy()
    source[4] = target[asked.twins[2]]
    found = module.figures(source, target, asked)
    assert found == pytest.approx({"nearer_than_twin": 200 / 3, "hits_at_1": 200 / 3, "mrr": 100 * (2 + 1 / 6) / 3})


def test_answers_and_retrieval_are_paired_by_seed(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch) -> None:
    retrieval, module = scripts["retrieval"], scripts["retrieval_results"]
    hits = {
        ("separate-infonce", "trained"): {"82": 60, "23": 50, "4": 99},
        ("regular-1.35x", "ridge"): {"82": 45, "23": 40},
    }
    hits[("regular-1.35x", "best readout")] = {"82": 1, "23": 2}
    rows = [
        {"arm": arm, "seed": seed, "method": method, "choice": "c", "hits_at_1": value, "mrr": value}
        for (arm, method), of_seed in hits.items()
        for seed, value in of_seed.items()
    ]
    monkeypatch.setattr(retrieval, "FILE", tmp_path / "retrieval.csv")
    retrieval.write(
        [*rows, {"arm": "none", "seed": "", "method": "TF-IDF, words", "hits_at_1": 3, "right": 5}], retrieval.FILE
    )
    table = pd.DataFrame([("retrieval", "separate-infonce", seed, 70.0) for seed in ("82", "23")])
    table.columns = ["file", "arm", "seed", "right"]
    result = module.joined(table)
    assert module.of_model(result, "separate-infonce", "trained").right.tolist()[:2] == [
        70,
        pytest.approx(np.nan, nan_ok=True),
    ]
    assert module.better_plain(result, "separate-infonce") == ("regular-1.35x", "ridge")
    # 60 - 45 and 50 - 40; the third seed has no partner.
    test = module.difference(result, ("separate-infonce", "trained"), module.better_plain(result, "separate-infonce"))
    assert (test.n, test.mean) == (2, 12.5)
    assert [model.arm for model, _ in module.models_with_runs(result)] == [
        "none",
        *["regular-1.35x"] * 2,
        "separate-infonce",
    ]


def rows_of_retrieval(hits: dict[tuple[str, str], dict[str, float]]) -> list[dict[str, object]]:
    """Rows of ``retrieval.py``: by arm and method, of each seed the hits."""
    about = {"choice": "c", "queries": 1000, "candidates": 968}
    return [
        {**about, "arm": arm, "seed": seed, "method": method, "hits_at_1": value, "mrr": value}
        for (arm, method), of_seed in hits.items()
        for seed, value in of_seed.items()
    ]


@pytest.mark.slow
def test_what_retrieval_shows_follows_its_intervals(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieval, module, claims = scripts["retrieval"], scripts["retrieval_results"], scripts["retrieval_claims"]
    monkeypatch.setattr(retrieval, "FILE", tmp_path / "retrieval.csv")
    plain, separate, branched = (
        ("regular-1.35x", "ridge"),
        ("separate-infonce", "trained"),
        ("branched-infonce", "trained"),
    )
    several = {plain: {"82": 40, "23": 50}, separate: {"82": 54, "23": 66}, branched: {"82": 24, "23": 36}}
    retrieval.write(rows_of_retrieval(several), tmp_path / "retrieval.csv")
    one = {plain: {"82": 48.3}, separate: {"82": 55}, branched: {"82": 40}}
    retrieval.write(rows_of_retrieval(one), tmp_path / "retrieval-turk.csv")
    answers = [("retrieval", "regular-1.35x", "82", 70.0, "equivalent", 600)]
    table = pd.DataFrame(answers, columns=["file", "arm", "seed", "right", "headline", "records"])
    synth, turk = module.data_sets(table)
    assert (synth.seeds, turk.seeds, turk.one_seed) == ("2 seeds", "one seed", True)
    assert synth.size == "1,000 queries, 600 of them answered, 968 candidates"
    # Differences of 14 and 16 points, half a standard error of sqrt(2) apart: 15 - 12.706 and 15 + 12.706.
    assert synth.hits_over() == "`separate` +15.0 [+2.3, +27.7] and `branched` -15.0 [-27.7, -2.3]"
    assert turk.hits_over() == "`separate` +6.7 and `branched` -8.3"
    text = claims.claim([synth, turk])
    shown = "**Better embeddings are shown for InfoNCE beside the LM loss on `synth` (`separate`).**"
    assert text.startswith(shown)
    assert text.endswith("even behind a map. Elsewhere InfoNCE finds fewer.")
    assert synth.share_of_plain() == "Plain training behind a ridge map has 75 % of the hits of the better layout"
    assert "[" not in turk.short_table().partition("---:|\n")[2]
    # Where plain training went on for the FLOPs of `separate`, that layout is compared with it.
    longer = several | {("regular-1.75x", "ridge"): {"82": 42, "23": 55}}
    retrieval.write(rows_of_retrieval(longer), tmp_path / "retrieval.csv")
    synth = module.data_sets(table)[0]
    assert synth.hits_over() == "`separate` +11.5 [+5.1, +17.9] and `branched` -15.0 [-27.7, -2.3]"
    assert synth.share_of_plain() == "Plain training behind a ridge map has 81 % of the hits of the better layout"
    assert "| plain, 1.75 times as long, ridge map | 2 | – | 48.5 ± 9.2 |" in synth.full_table()
    # An arm of one seed is no row of the short table, whatever its name.
    one_more = several | {("separate-vicreg", "trained"): {"23": 7}, ("mine", "trained, ridge"): {"23": 8}}
    retrieval.write(rows_of_retrieval(one_more), tmp_path / "retrieval.csv")
    synth = module.data_sets(table)[0]
    assert synth.variants() == (
        "One seed each, so nothing is claimed. Hits at 1: LM loss + VICReg 7.0 %; "
        "with the same seed InfoNCE of weight 0.1 has 66.0 %"
    )
    assert "VICReg" not in synth.short_table()
    assert "| LM loss + VICReg | 1 | – | 7.0 |" in synth.full_table()
    assert "| `mine`, ridge map | 1 | – | 8.0 |" in synth.full_table()
    # The weight that is compared is that of the data set.
    weight_1 = {(f"separate-infonce-1{end}", "trained"): {"82": hits} for end, hits in (("", 57), ("-middle", 74))}
    retrieval.write(rows_of_retrieval(weight_1), tmp_path / "retrieval-smollm2-turk.csv")
    smollm2 = next(each for each in module.data_sets(table) if each.file == "retrieval-smollm2-turk")
    assert smollm2.variants().endswith(
        "LM loss + InfoNCE of weight 1 on means of layer 15 74.0 %; with the same seed InfoNCE of weight 1 has 57.0 %"
    )
    # A single seed claims nothing, nor do intervals that include 0.
    several[separate] = {"82": 39, "23": 56}
    retrieval.write(rows_of_retrieval(several), tmp_path / "retrieval.csv")
    synth = module.data_sets(table)[0]
    text = claims.claim([synth, turk])
    assert text.startswith("**No gain in embeddings is shown for InfoNCE beside the LM loss.**")
    assert text.endswith("a model without it. Instead InfoNCE finds fewer, or no difference is shown.")
    assert claims.claim([turk]).startswith("**No gain in embeddings is shown")
    # Rows of a grid that has just begun.
    retrieval.write(rows_of_retrieval({branched: {"82": 24}}), tmp_path / "retrieval.csv")
    synth = module.data_sets(table)[0]
    assert (synth.seeds, synth.shows(), synth.hits_over()) == ("one seed", {}, "")
    assert "not both trained yet" in synth.share_of_plain()


@pytest.mark.slow
def test_readme_says_where_infonce_finds_more_than_any_linear_map(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieval, module, claims = scripts["retrieval"], scripts["retrieval_results"], scripts["retrieval_claims"]
    monkeypatch.setattr(retrieval, "FILE", tmp_path / "retrieval.csv")
    plain, infonce = ("regular-1.35x", "ridge"), ("separate-infonce", "trained")
    table = pd.DataFrame([], columns=["file", "arm", "seed", "right", "headline", "records"])

    def sets(hits: dict[str, float], before_training: float = 7, **of_plain: dict[str, float]) -> list:
        rows = {plain: {"82": 40, "23": 50}, ("untrained", "canonical"): {"82": before_training}, infonce: hits}
        rows |= {("regular-1.35x", method): of_seed for method, of_seed in of_plain.items()}
        retrieval.write(rows_of_retrieval(rows), tmp_path / "retrieval.csv")
        return module.data_sets(table)

    retrieval.write(rows_of_retrieval({plain: {"82": 48}, infonce: {"82": 60}}), tmp_path / "retrieval-turk.csv")
    more = sets({"82": 54, "23": 66})
    assert claims.gain(more) == "InfoNCE is shown to find more than a map behind a model without it on `synth` alone."
    # A data set with one seed is no row.
    row = "| `synth`, 2 seeds | – | 45.0 (plain training) | 60.0 | +15.0 [+2.3, +27.7] | – |"
    assert claims.summary(more).splitlines()[2:] == [row]
    # The best map is that of the model before training.
    equal = sets({"82": 54, "23": 66}, before_training=60)
    assert claims.gain(equal) == (
        "On no data set below is InfoNCE shown to find more than a map behind a model without it."
    )
    row = "| `synth`, 2 seeds | – | 60.0 (before training) | 60.0 | +0.0 [-76.2, +76.2] | – |"
    assert claims.summary(equal).splitlines()[2:] == [row]
    # Plain training has a map of every seed that is as strong in kind, so one model before training is none.
    of_plain = {"canonical": {"82": 41, "23": 49}, "heads": {"82": 53, "23": 55}}
    row = "| `synth`, 2 seeds | – | 54.0 (plain training, projection heads) | 60.0 | +6.0 [-57.5, +69.5] | – |"
    assert claims.summary(sets({"82": 54, "23": 66}, 60, **of_plain)).splitlines()[2:] == [row]
    # With every seed it is, and is paired by seed: 54 - 53 and 66 - 59.
    rows = {plain: {"82": 40, "23": 50}, ("untrained", "heads"): {"82": 53, "23": 59}, infonce: {"82": 54, "23": 66}}
    retrieval.write(rows_of_retrieval(rows), tmp_path / "retrieval.csv")
    row = "| `synth`, 2 seeds | – | 56.0 (before training, projection heads) | 60.0 | +4.0 [-34.1, +42.1] | – |"
    assert claims.summary(module.data_sets(table)).splitlines()[2:] == [row]


def arms_on_a_gpu(on_gpu: ModuleType, folder: Path, names: str) -> list:
    return [on_gpu.Arm(name, 82, Path("grid.yaml"), folder / f"{name}-82", epochs=4) for name in names]


def test_the_pace_of_each_training_is_printed(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch, capsys
) -> None:
    on_gpu, now = scripts["on_gpu"], [0.0]
    monkeypatch.setattr(on_gpu.time, "monotonic", lambda: now[0])
    arms = arms_on_a_gpu(on_gpu, tmp_path, "ab")
    shared = on_gpu.Shared(arms, 2, 200, [], tmp_path, tmp_path / "a.tar.gz", began=0.0)
    for arm in arms:
        arm.state, arm.running = on_gpu.TRAINS, [SimpleNamespace()]
        arm.run_folder.mkdir(parents=True)
    for now[0], epochs in ((0, (0, 0)), (10, (0.25, 0.5)), (20, (0.5, 1))):
        for arm, each in zip(arms, epochs, strict=True):
            (arm.run_folder / "metrics.jsonl").write_text(json.dumps({"epoch": each}) + "\n")
        shared.watch(now[0])
    # Of 4 epochs the slower one trains one in 40 seconds; the start of a training is no pace.
    first, _, last = capsys.readouterr().out.splitlines()
    assert first.endswith("trained: a-82 0%, b-82 0%")
    assert last.endswith("trained: a-82 12%, b-82 25%; all at 160 s")


def test_results_are_packed_without_weights_and_with_all_rows(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    on_gpu, retrieval = scripts["on_gpu"], scripts["retrieval"]
    folder = tmp_path / "on-gpu"
    arms = arms_on_a_gpu(on_gpu, folder, "ab")
    for arm, hits in zip(arms, (3, 5), strict=True):
        arm.run_folder.mkdir(parents=True)
        (arm.run_folder / "model.safetensors").write_bytes(bytes(7))
        (arm.run_folder / "run.json").write_text("{}")
        retrieval.write(
            [{"arm": arm.name, "seed": "82", "method": "trained", "choice": "c", "hits_at_1": hits}], arm.table
        )
    on_gpu.Shared(arms, 2, 1, [], folder, tmp_path / "out" / "a.tar.gz").pack()
    with tarfile.open(tmp_path / "out" / "a.tar.gz") as packed:
        assert {Path(name).name for name in packed.getnames()} == {"run.json", "retrieval.csv"}
        packed.extractall(tmp_path / "home", filter="data")
    assert list(retrieval.read(tmp_path / "home/on-gpu/retrieval.csv").hits_at_1) == [3, 5]
    assert (tmp_path / "home/on-gpu/a-82/grid/a/seed82/run.json").exists()


def grid_of_two_arms(folder: Path, on_gpu: ModuleType, program: str, monkeypatch) -> Path:
    """A grid whose two arms run ``program`` in place of stepjepa."""
    monkeypatch.setattr(on_gpu, "LAUNCHER", (sys.executable, "-c", program))
    grid = folder / "grid.yaml"
    grid.write_text("train: {num_epochs: 4}\narms: {a: {}, b: {}}\nseeds: [82]\nbaseline: a\n")
    return grid


def test_arms_run_side_by_side_and_what_fails_is_named(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch, capsys
) -> None:
    on_gpu = scripts["on_gpu"]
    # Writes the record of a trained run, or fails as arm b.
    trains = "import json, sys; from pathlib import Path; arm = sys.argv[sys.argv.index('--only') + 1].split(',')[0]"
    trains += "; run = Path(sys.argv[sys.argv.index('--output_dir') + 1]) / arm / 'seed82'; run.mkdir(parents=True)"
    trains += "; (run / 'run.json').write_text(json.dumps({'status': 'finished'})); sys.exit(arm == 'b')"
    grid = grid_of_two_arms(tmp_path, on_gpu, trains, monkeypatch)
    monkeypatch.setattr(on_gpu, "HERE", tmp_path)
    (tmp_path / "retrieval.py").write_text("import sys; print(sys.argv[1:])")
    folder = tmp_path / "on-gpu"
    options = ["--seconds", "30", "--data", "smollm2", "--layers", "0", "15", "--output_dir", str(folder)]
    before = signal.getsignal(signal.SIGTERM)
    assert on_gpu.main([str(grid), *options]) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    arguments = [str(folder / "a-82/grid"), "--file", str(folder / "a-82/retrieval.csv")]
    arguments += ["--data", "smollm2", "--layers", "0", "15"]
    assert (folder / "a-82" / "log").read_text() == f"{arguments}\n"
    assert re.search(r"a-82: finished after \d+ s; b-82: failed\n$", capsys.readouterr().out)
    assert (tmp_path / "on-gpu.tar.gz").exists()
    with pytest.raises(SystemExit):
        on_gpu.main([str(grid), *options])
    assert "name another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_time_limit_ends_what_runs_and_packs_it(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch, capsys
) -> None:
    on_gpu = scripts["on_gpu"]
    # Trains for an hour, and writes something first.
    trains = "import sys, time; from pathlib import Path; folder = Path(sys.argv[sys.argv.index('--output_dir') + 1])"
    trains += "; folder.mkdir(parents=True); (folder / 'begun').touch(); time.sleep(3600)"
    grid = grid_of_two_arms(tmp_path, on_gpu, trains, monkeypatch)
    options = ["--seconds", "3", "--jobs", "1", "--output_dir", str(tmp_path / "on-gpu")]
    began = time.monotonic()
    assert on_gpu.main([str(grid), *options]) == 0
    assert time.monotonic() - began < 30
    assert capsys.readouterr().out.endswith("a-82: ended by the time limit, trains; b-82: waits\n")
    with tarfile.open(tmp_path / "on-gpu.tar.gz") as packed:
        assert "on-gpu/a-82/grid/begun" in packed.getnames()
