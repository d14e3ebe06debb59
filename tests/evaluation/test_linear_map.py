"""A linear map behind embeddings: by hand, against scikit-learn, and evaluations that fit one, or projection heads."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stepjepa
import tiny
from slow_maps import same_signs, slow_map
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.questions import not_in_test
from stepjepa.data.record import Record
from stepjepa.evaluation import map_fitting
from stepjepa.evaluation.map_fitting import choose_readout, draw_pairs, fit_map, places_to_try, train_heads
from stepjepa.evaluation.mapped_retrieval import rank_behind_map
from stepjepa.evaluation.run import pair_embedder
from stepjepa.evaluation.summary_text import format_summary
from stepjepa.objectives import head_training
from stepjepa.objectives.embedding import normalised
from stepjepa.objectives.fitted import pairs_behind
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.linear_map import FITS, Fit, fit_linear_maps
from stepjepa.objectives.reading import embedding_config
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings

CONFIG = JepaConfig(mode="llm-jepa", predictors=0, pooling="mean")
OWN = ReadoutPlace(-1, "mean")

FIVE = ["one", "two", "three", "four", "five"]
TWENTY = [f"{first} {second}" for first in FIVE for second in ("six", "seven", "nine", "ten")]


def pairs(source: Any, target: Any) -> ViewEmbeddings:
    count = np.arange(len(source))
    return ViewEmbeddings(np.asarray(source, np.float32), np.asarray(target, np.float32), count, count + 1, count)


def test_a_ridge_map_by_hand() -> None:
    # Centred sources -1 and 1, targets -2 and 2. The scale is 2, so that the weight is 4 / (2 + 2 * penalty).
    known = pairs([[4], [6]], [[5], [9]])
    maps = [*fit_linear_maps(known.source, known.target, [Fit("ridge", penalty) for penalty in (0.0, 1.0, 3.0)])]
    assert [linear_map.weight.item() for linear_map in maps] == pytest.approx([2, 1, 0.5])
    mapped = pairs_behind(maps[1], pairs([[8]], [[11]]))
    # (8 - 5) * 1, and 11 - 7: both without the mean target.
    assert (mapped.source.item(), mapped.target.item()) == pytest.approx((3, 4))


def test_a_canonical_map_by_hand() -> None:
    # As before: squares 2 and 8, with penalty 1 twice as much. Whitened by 1/2 and 1/4 the sides correlate by
    # (2 + 2) / (2 * 4) = 1/2, by which each direction counts.
    known = pairs([[4], [6]], [[5], [9]])
    (linear_map,) = fit_linear_maps(known.source, known.target, [Fit("canonical", 1.0)])
    mapped = pairs_behind(linear_map, pairs([[8]], [[11]]))
    # 3 / 2 / 2, and 4 / 4 / 2; the direction has no sign of its own.
    assert mapped.source.item() == pytest.approx(mapped.target.item() * 1.5)
    assert abs(mapped.source.item()) == pytest.approx(0.75)


@pytest.mark.parametrize("count", [7, 61])  # fewer and more than dimensions
@pytest.mark.parametrize("fit", [Fit(*each) for each in product(("ridge", "canonical"), (1e-4, 1.0))], ids=str)
def test_a_map_is_that_of_the_textbook(count: int, fit: Fit) -> None:
    generator = np.random.default_rng(2)
    known = pairs(3 + generator.normal(size=(count, 13)), 5 + generator.normal(size=(count, 13)))
    new = pairs(generator.normal(size=(11, 13)), generator.normal(size=(11, 13)))
    (linear_map,) = fit_linear_maps(known.source, known.target, [fit])
    mapped, other = pairs_behind(linear_map, new), slow_map(fit, known, new.source, new.target)
    for actual, expected in ((mapped.source, other.source), (mapped.target, other.target)):
        np.testing.assert_allclose(actual, same_signs(expected, actual), atol=1e-5)
    np.testing.assert_allclose(mapped.source @ mapped.target.T, other.source @ other.target.T, atol=1e-4)


def test_canonical_maps_find_partners_whose_strong_directions_are_noise() -> None:
    """Regression predicts the directions in which targets vary most, whether they tell partners apart or not."""
    generator = np.random.default_rng(5)
    shared, noise = generator.normal(size=(2, 211, 7))
    source, target = np.c_[shared, noise], np.c_[10 * generator.normal(size=(211, 7)), shared]
    known, new = pairs(source[:150], target[:150]), pairs(source[150:], target[150:])
    ridge, canonical = (
        pairs_behind(next(fit_linear_maps(known.source, known.target, [Fit(method, 1e-4)])), new)
        for method in ("ridge", "canonical")
    )
    found = {
        name: ((normalised(each.source) @ normalised(each.target).T).argmax(1) == np.arange(61)).mean()
        for name, each in {"ridge": ridge, "canonical": canonical}.items()
    }
    assert found["canonical"] > 0.9 and found["ridge"] < 0.1


def test_equal_sources_predict_the_mean_target() -> None:
    for fit in FITS:
        (linear_map,) = fit_linear_maps(np.ones((5, 3), np.float32), np.eye(5, 3, dtype=np.float32), [fit])
        assert not linear_map(np.ones((2, 3), np.float32), "source").any()


def test_the_place_where_held_out_pairs_are_found_is_chosen() -> None:
    generator = np.random.default_rng(7)
    rotation = np.linalg.qr(generator.normal(size=(5, 5)))[0]

    def split(source: Any, target: Any) -> tuple[ViewEmbeddings, ViewEmbeddings]:
        return pairs(source[:40], target[:40]), pairs(source[40:], target[40:])

    sources = generator.normal(size=(61, 5))
    noise, rotated = (split(sources, target) for target in (generator.normal(size=(61, 5)), sources @ rotation))
    places = [ReadoutPlace(0, "mean"), ReadoutPlace(3, "last")]
    for right, order in enumerate(((rotated, noise), (noise, rotated))):
        known, held_out = (dict(zip(places, part, strict=True)) for part in zip(*order, strict=True))
        assert choose_readout(known, held_out, CONFIG).place == places[right]
    with pytest.raises(ValueError, match="at least one place"):
        choose_readout({}, {}, CONFIG)


def records(texts: Sequence[str], name: str) -> list[Record]:
    return [tiny.make_record("", f"{name} {text}", f"answer {text}") for text in texts]


@pytest.fixture(scope="module")
def jepa(trained_tokenizer: Any) -> Jepa:
    return Jepa(tiny.make_model("llama"), trained_tokenizer, CONFIG, processes=1, heads=False)


def test_places_are_those_of_separate_passes(jepa: Jepa) -> None:
    known = records(["one", "two", "three", "two", "seven"], "question")
    places = places_to_try(OWN, 2)
    assert len(places) == 6 and places_to_try(OWN, None) == [ReadoutPlace(-1, "mean")]
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    together = embedder.at(known, places)
    for layer, pooling, _ in places:
        config = embedding_config(None, layer=layer, pooling=pooling)
        alone = pair_embedder(jepa.model, jepa.tokenizer, config)(known)
        for side in ("source", "target"):
            values = getattr(together[ReadoutPlace(layer, pooling)], side)
            np.testing.assert_allclose(values, getattr(alone, side), rtol=1e-4, atol=1e-5)
    # All layers at once are the means of single ones, one behind the other; asked for alone, too.
    (everywhere,) = {*places_to_try(OWN, 2, all_layers=True)} - {*places}
    assert everywhere == ("all", "mean", True) and everywhere.words == "all layers, pooling mean"
    for given in (embedder.at(known, [everywhere]), embedder.at(known, [places[3], everywhere])):
        for side in ("source", "target"):
            single = [getattr(together[ReadoutPlace(layer, "mean")], side) for layer in range(3)]
            np.testing.assert_allclose(getattr(given[everywhere], side), np.hstack(single), rtol=1e-4, atol=1e-5)
    last = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="last"))
    with pytest.raises(ValueError, match="got 'mean'"):
        last.at(known, places)


def test_questions_of_the_test_file_are_not_fitted_on(jepa: Jepa) -> None:
    known, test = records(TWENTY, "known"), records(FIVE, "test")
    assert not_in_test([*known, test[2]], test) == known
    # Case and white space don't make another question.
    assert not_in_test([*known, *records(["ONE"], " test ")], test) == known
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    fitted = fit_map(draw_pairs(embedder, known, places_to_try(OWN, 1), file="known.jsonl"))
    mapped = rank_behind_map(
        embedder, fitted, test, [None] * len(test), file="known.jsonl", left_out=5, every_layer=True
    )
    assert mapped.summary() | {"records": 20, "left_out": 5, "file": "known.jsonl"} == mapped.summary()
    with pytest.raises(
        UserError,
        match=r"known.jsonl: has 19 records of some kind; linear maps and projection heads are fitted on at least",
    ):
        draw_pairs(embedder, known[1:], places_to_try(OWN, None), file="known.jsonl", kind="records of some kind")


class Watched:
    """An embedder of random pairs, whose every record has one; it keeps the questions that it is given."""

    reader = SimpleNamespace(config=CONFIG)
    tokenizer = SimpleNamespace(
        count_anew=lambda: None, tokenize_each=lambda given: [SimpleNamespace(all_pairs=(0,))] * len(given)
    )

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.places: list[Sequence[ReadoutPlace]] = []

    def at(self, given: Sequence[Record], places: Sequence[ReadoutPlace]) -> dict[ReadoutPlace, ViewEmbeddings]:
        self.places.append(places)
        self.asked.append([str(record.messages[0]["content"]) for record in given])
        drawn = np.random.default_rng(len(given)).normal(size=(2, len(given), 3))
        return {place: pairs(*drawn) for place in places}


def asked_of(given: Sequence[Record]) -> list[list[str]]:
    """The questions of known pairs, of those that compare maps, and of all."""
    watched = Watched()
    fitted = fit_map(draw_pairs(watched, given, places_to_try(OWN, None), file=None))  # type: ignore[arg-type]
    assert fitted.records == len(given) == len(watched.asked[2])
    return watched.asked


def test_records_that_choose_the_penalty_are_none_that_the_maps_to_choose_from_know() -> None:
    known, held_out, _ = asked_of(records(TWENTY, "known"))
    assert (len(known), len(held_out)) == (18, 2) and not {*known} & {*held_out}


def test_maps_that_are_compared_know_no_other_answer_to_a_question() -> None:
    """A map that knows a question finds its answers by heart, so that the smallest penalty was chosen."""
    twice = [*records(TWENTY, "known"), *records([text.upper() for text in TWENTY], "known")]
    known, held_out, _ = asked_of(twice)
    assert len(held_out) == 4 and len(known) == 32
    assert not {text.casefold() for text in known} & {text.casefold() for text in held_out}
    # Too few would be left.
    known, held_out, _ = asked_of(records(["one"] * 20, "known"))
    assert (len(known), len(held_out)) == (18, 2)


@pytest.fixture
def short_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projection heads of as many epochs as thousands of pairs have."""
    monkeypatch.setattr(head_training, "FEWEST_STEPS", 0)
    monkeypatch.setattr(map_fitting, "STEPS_TRIED", 30)


@pytest.mark.usefixtures("short_heads")
def test_projection_heads_know_no_question_that_chooses_them() -> None:
    """Of each record that has a question a second time, in capitals, either both are held out or none is known."""
    twice = [*records(TWENTY, "known"), *records([text.upper() for text in TWENTY], "known")]
    watched = Watched()
    drawn = draw_pairs(watched, twice, places_to_try(OWN, 1), file=None)  # type: ignore[arg-type]
    heads = train_heads(drawn)
    tried, held_out, known = watched.asked
    assert len(watched.places[-1]) == map_fitting.FINALISTS < len(watched.places[0])
    assert len(held_out) == 4 and heads.records == len(known) == len(tried) == 32
    assert not {text.casefold() for text in known} & {text.casefold() for text in held_out}
    assert heads.place in places_to_try(OWN, 1)


@pytest.mark.usefixtures("short_heads")
def test_all_layers_at_once_are_tried_by_heads_alone(jepa: Jepa, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear map of them would have a matrix as large as their square; heads leave out what takes too much room."""
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    drawn = draw_pairs(embedder, records(TWENTY, "known"), [ReadoutPlace("all", "mean")], file=None)
    with pytest.raises(ValueError, match="expected at least one place"):
        fit_map(drawn)
    heads = train_heads(drawn)
    assert heads.place == ("all", "mean", True) and heads.heads.dimensions == 3 * 33
    assert "all layers" not in capsys.readouterr().err
    both = draw_pairs(embedder, records(TWENTY, "known"), [OWN, ReadoutPlace("all", "mean")], file=None)
    # 18 records of two vectors of three layers, 33 dimensions of 4 bytes each.
    monkeypatch.setattr(map_fitting, "MOST_BYTES", 18 * 2 * 3 * 33 * 4 - 1)
    assert train_heads(both).place == OWN
    said = "all layers at once are not tried, since their embeddings take 0.0 GB for 18 records, more than 0"
    assert f"note: projection heads: {said}\n" in capsys.readouterr().err


@pytest.mark.usefixtures("short_heads")
@pytest.mark.parametrize("count", [2, 5])  # without and with a short training before
def test_the_place_where_projection_heads_find_held_out_pairs_is_chosen(count: int) -> None:
    generator = np.random.default_rng(7)
    sources, noise = generator.normal(size=(2, 61, 5))
    texts = records([f"number {number}" for number in range(61)], "question")
    places = [ReadoutPlace(layer, "last") for layer in range(count)]

    class Embedder(Watched):
        def at(self, given: Sequence[Record], places: Sequence[ReadoutPlace]) -> dict[ReadoutPlace, ViewEmbeddings]:
            rows = [texts.index(record) for record in given]
            return {place: pairs(sources[rows], (noise, sources**3)[place == right][rows]) for place in places}

    for right in (places[0], places[-1]):
        assert train_heads(draw_pairs(Embedder(), texts, places, file=None)).place == right  # type: ignore[arg-type]


def test_records_that_choose_have_pairs(jepa: Jepa) -> None:
    """It ended with "none of 2 records has a pair", whatever the others had."""
    given = [replace(record, views=()) for record in records([*TWENTY, "eleven", "twelve"], "question")]
    chosen = random.Random(0).sample(range(22), 22)
    for number in chosen[2:]:
        given[number] = replace(given[number], views=None)
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    assert fit_map(draw_pairs(embedder, given, places_to_try(OWN, None), file="known.jsonl")).records == 20
    given[chosen[5]] = replace(given[chosen[5]], views=())
    fault = r"known.jsonl: has 19 records with a pair within max_length 512 \(3 of 22 records have no pair: .*\), of 22"
    with pytest.raises(UserError, match=f"{fault}; linear maps and projection heads are fitted on at least 20"):
        fit_map(draw_pairs(embedder, given, places_to_try(OWN, None), file="known.jsonl"))


def test_records_without_a_pair_are_counted_by_file_and_noted(jepa: Jepa, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts of the passes before were added to them."""
    empty = [replace(record, views=()) for record in records(["eleven", "twelve"], "question")]
    test = [*records(FIVE, "test"), empty[0]]
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    assert str(embedder(test).without_pair).startswith("1 of 6 records has no pair: ")
    known = not_in_test([*records(TWENTY, "known"), *empty], test)
    fitted = fit_map(draw_pairs(embedder, known, places_to_try(OWN, None), file="known.jsonl"))
    # The other one has a question of the test file.
    assert len(known) == 21 and fitted.records == 20
    assert "note: not used for the linear map: 1 of 21 records has no pair: " in capsys.readouterr().err
    mapped = rank_behind_map(
        embedder, fitted, test, [None] * len(test), file="known.jsonl", left_out=1, every_layer=False
    )
    assert str(mapped.retrieval.without_pair).startswith("1 of 6 records has no pair: ")


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any, trained_tokenizer: Any) -> Path:
    """A run without an objective; beside it ``test.jsonl``, and ``known.jsonl`` with one of its records."""
    folder = tmp_path_factory.mktemp("linear-map")
    tiny.make_model("llama").save_pretrained(folder / "base")
    trained_tokenizer.save_pretrained(folder / "base")
    test = records([*FIVE, "six", "seven"], "question")
    for name, part in {"test": test, "known": [*records(TWENTY, "question"), test[0]]}.items():
        write_jsonl(folder / f"{name}.jsonl", [{"messages": list(each.messages)} for each in part])
    command = ["train", "--train_file", folder / "known.jsonl", "--model_name", folder / "base", "--max_steps", "1"]
    assert main([*map(str, command), "--use_cpu", "--regular", "--output_dir", str(folder / "run")]) == 0
    return folder / "run"


def evaluate(run: Path, *flags: object) -> int:
    data = ["--test_file", run.parent / "test.jsonl", "--output_file", run / "test.jsonl", "--task", "generic"]
    command = ["evaluate", "--model_path", run, *data, "--max_new_tokens", 3, "--overwrite", *flags]
    return main([*map(str, command)])


def test_an_evaluation_with_a_linear_map(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = run.parent / "known.jsonl"
    assert evaluate(run, "--retrieval", "--linear_map", known) == 0
    assert f"the same behind a linear map, fitted on 20 records of {known}: " in capsys.readouterr().out
    summary = json.loads((run / "test.summary.json").read_text())
    mapped = summary["retrieval"]["linear_map"]
    assert (mapped["records"], mapped["left_out"], mapped["queries"]) == (20, 1, 7)
    jepa = Jepa.from_pretrained(run)
    readout = mapped["readout"]
    config = embedding_config(None, layer=readout["layer"], pooling=readout["pooling"])
    embedded = [
        pair_embedder(jepa.model, jepa.tokenizer, config)(stepjepa.read_records(file))
        for file in (known, run.parent / "test.jsonl")
    ]
    # By the textbook, and one query after the other.
    known_pairs = replace(embedded[0], source=embedded[0].source[:20], target=embedded[0].target[:20])
    fit = Fit(mapped["fit"], mapped["penalty"])
    queries, candidates = slow_map(fit, known_pairs, embedded[1].source, embedded[1].target)
    cosines = queries @ candidates.T / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(candidates, axis=1)
    ranks = [int((row >= row[place]).sum()) for place, row in enumerate(cosines)]
    lines = [json.loads(line) for line in (run / "test.jsonl").read_text().splitlines()]
    assert [line["linear_map_ranks"] for line in lines] == [[rank] for rank in ranks]
    assert mapped["mrr"]["mean"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    details = format_summary(summary, details=True)
    assert "not used for the linear map: 1 record whose question is in the test file" in details
    assert (
        f"behind the linear map, embeddings of retrieval are read at: views llm-jepa, layer {readout['layer']}"
        in details
    )
    scores = stepjepa.evaluate(
        run, run.parent / "test.jsonl", output_file=run / "test.jsonl", task="generic", max_new_tokens=3,
        retrieval=True, linear_map=known,
    )  # fmt: skip
    assert scores["linear_map_mrr"] == mapped["mrr"]["mean"]
    assert "linear_map_hits_at_1" in scores.names


@pytest.mark.usefixtures("short_heads")
def test_an_evaluation_with_projection_heads(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = run.parent / "known.jsonl"
    assert evaluate(run, "--retrieval", "--linear_map", known, "--projection_heads") == 0
    captured = capsys.readouterr()
    assert "the same behind a linear map, fitted on 20 records of " in captured.out
    assert f"the same behind projection heads, fitted on 18 records of {known}: " in captured.out
    assert captured.err.count("not used for") == 0
    summary = json.loads((run / "test.summary.json").read_text())
    mapped = summary["retrieval"]["projection_heads"]
    assert (mapped["records"], mapped["left_out"], mapped["queries"], mapped["file"]) == (18, 1, 7, str(known))
    # The same heads, and one query after the other.
    jepa, readout = Jepa.from_pretrained(run), mapped["readout"]
    place = ReadoutPlace(readout["layer"], readout["pooling"])
    embedder = pair_embedder(jepa.model, jepa.tokenizer, embedding_config(None, pooling="mean"))
    test = stepjepa.read_records(run.parent / "test.jsonl")
    drawn = draw_pairs(embedder, not_in_test(stepjepa.read_records(known), test), [place], file=None)
    heads = train_heads(drawn)
    assert heads.heads.epochs == mapped["epochs"]
    behind = pairs_behind(heads.vector_map, embedder.at(test, [place])[place])
    cosines = normalised(behind.source) @ normalised(behind.target).T
    ranks = [int((row >= row[own]).sum()) for own, row in enumerate(cosines)]
    lines = [json.loads(line) for line in (run / "test.jsonl").read_text().splitlines()]
    assert [line["projection_heads_ranks"] for line in lines] == [[rank] for rank in ranks]
    assert mapped["mrr"]["mean"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    details = format_summary(summary, details=True)
    assert "behind the projection heads, mean reciprocal rank of the nearest right answer: " in details
    # Why they are fitted on fewer records than the map is.
    assert re.search(r"heads: \d+ epochs?, chosen by records that they are not trained on", details)
    settings = {"task": "generic", "max_new_tokens": 3, "retrieval": True, "linear_map": known}
    scores = stepjepa.evaluate(
        run, run.parent / "test.jsonl", output_file=run / "test.jsonl", **settings, projection_heads=True
    )
    assert scores["projection_heads_mrr"] == mapped["mrr"]["mean"]
    # Without them it is another evaluation.
    with pytest.raises(UserError, match="projection_heads"):
        stepjepa.evaluate(run, run.parent / "test.jsonl", output_file=run / "test.jsonl", **settings)
    assert evaluate(run, "--retrieval", "--projection_heads") == 2
    assert "--projection_heads does nothing without --linear_map" in capsys.readouterr().err


def test_a_named_readout_is_not_searched(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run, "--retrieval", "--linear_map", run.parent / "known.jsonl", "--layer", 1) == 0
    retrieval = json.loads((run / "test.summary.json").read_text())["retrieval"]
    assert retrieval["linear_map"]["readout"] == retrieval["readout"]
    for flags, fault in (
        (["--linear_map", run.parent / "known.jsonl"], "--linear_map does nothing without --retrieval"),
        (["--retrieval", "--linear_map", run.parent / "none.jsonl"], "none.jsonl"),
        (["--retrieval", "--linear_map", run.parent / "test.jsonl"], "has 0 records whose question is not in the test"),
    ):
        assert evaluate(run, *flags) == 2
        assert fault in capsys.readouterr().err


def test_skipped_lines_of_the_map_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run.parent / "damaged.jsonl"
    damaged.write_text((run.parent / "known.jsonl").read_text() + "not a record\n")
    assert evaluate(run, "--retrieval", "--linear_map", damaged) == 2
    assert "damaged.jsonl:22: " in capsys.readouterr().err
    assert evaluate(run, "--retrieval", "--linear_map", damaged, "--bad_records", "skip") == 0
    assert "22" in capsys.readouterr().err
    assert json.loads((run / "test.summary.json").read_text())["retrieval"]["linear_map"]["records"] == 20
