"""Retrieval: metrics by hand and against slow loops, and evaluations of trained and untrained models."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import ndcg_score

import stepjepa
import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.config.jepa import SETTINGS, JepaConfig
from stepjepa.data.record import Record
from stepjepa.evaluation import retrieval as module
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.retrieval import (
    answer_names,
    mean_over_queries,
    metrics,
    rank_targets,
    ranks_of_right,
)
from stepjepa.evaluation.retrieval_scores import RetrievalScores
from stepjepa.evaluation.run import pair_embedder
from stepjepa.evaluation.summary_text import format_summary
from stepjepa.objectives.index import nearest
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.reading import embedding_config
from stepjepa.objectives.view_embeddings import ViewEmbeddings
from stepjepa.store.record import read_record, trained_objective
from stepjepa.tasks.nl_rx import NlRxTask

CONFIG = JepaConfig(mode="llm-jepa", predictors=0)


def test_metrics_by_hand() -> None:
    result = metrics([np.array([1]), np.array([3]), np.array([2, 5, 17]), np.array([10]), np.array([11])])
    assert result["hits_at_1"].tolist() == [1, 0, 0, 0, 0]
    assert result["hits_at_10"].tolist() == [1, 1, 1, 1, 0]
    assert result["mrr"] == pytest.approx([1, 1 / 3, 1 / 2, 1 / 10, 1 / 11])
    # Gains 1 / log2(1 + rank); three right candidates gain at most 1 + 1 / log2(3) + 1 / 2.
    third = (1 / math.log2(3) + 1 / math.log2(6)) / (1 + 1 / math.log2(3) + 0.5)
    assert result["ndcg_at_10"] == pytest.approx([1, 1 / 2, third, 1 / math.log2(11), 0])


def slow_ranks(source: Any, candidates: Any, right: list[int]) -> list[int]:
    def cosine(first: Any, second: Any) -> float:
        norms = math.sqrt(float(first @ first)) * math.sqrt(float(second @ second))
        return float(first @ second) / norms

    order = sorted(range(len(candidates)), key=lambda index: (-cosine(source, candidates[index]), index in right))
    return sorted(order.index(index) + 1 for index in right)


@pytest.mark.parametrize("cosines", [1, 2**24])
def test_ranks_are_those_of_a_slow_loop(cosines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COSINES", cosines)
    generator = np.random.default_rng(3)
    source, candidates = generator.normal(size=(23, 5)), generator.normal(size=(31, 5)) * 7
    right = [sorted(generator.choice(31, count, replace=False).tolist()) for count in generator.integers(1, 13, 23)]
    ranks = ranks_of_right(source, candidates, right)
    for query, indices, result in zip(source, right, ranks, strict=True):
        assert result.tolist() == slow_ranks(query, candidates, indices)
    relevance = np.zeros((23, 31))
    for row, indices in zip(relevance, right, strict=True):
        row[indices] = 1
    unit = candidates / np.linalg.norm(candidates, axis=1, keepdims=True)
    expected = [ndcg_score([row], [query @ unit.T], k=10) for row, query in zip(relevance, source, strict=True)]
    assert metrics(ranks)["ndcg_at_10"] == pytest.approx(expected)


def test_autocast_rounds_no_cosine() -> None:
    """While a model trains in bfloat16 on a CPU its held-out records are embedded, and ranked, under autocast."""
    generator = np.random.default_rng(5)
    source, candidates = (generator.normal(size=(101, 7)).astype(np.float32) for _ in range(2))
    right = [[place] for place in range(101)]
    ranks, hits = ranks_of_right(source, candidates, right), nearest(source, candidates, 5)
    with torch.autocast("cpu", torch.bfloat16):
        again, hits_again = ranks_of_right(source, candidates, right), nearest(source, candidates, 5)
    assert [each.tolist() for each in again] == [each.tolist() for each in ranks]
    np.testing.assert_array_equal(hits_again, hits)


def test_equal_embeddings_find_nothing() -> None:
    ranks = ranks_of_right(np.ones((3, 5)), np.ones((7, 5)), [[0], [4], [2, 6]])
    assert [each.tolist() for each in ranks] == [[7], [7], [6, 7]]
    # In a product of matrices the same column in another place may have another last bit.
    generator = np.random.default_rng(7)
    source, target = generator.normal(size=(5, 67)), generator.normal(size=67)
    ranks = ranks_of_right(source, np.tile(target, (11, 1)), [[place] for place in (0, 3, 7, 9, 10)])
    assert [each.tolist() for each in ranks] == [[11]] * 5


def test_what_is_not_finite_finds_nothing() -> None:
    """No comparison with NaN holds, so that nothing would stand before a right candidate."""
    candidates = np.array([[np.nan, 0.0], [0.0, 1.0], [1.0, 0.0]])
    ranks = ranks_of_right(np.array([[np.nan, 1.0], [0.0, 1.0], [0.0, 1.0]]), candidates, [[1], [0], [0, 1]])
    assert [each.tolist() for each in ranks] == [[3], [3], [1, 3]]
    assert ranks_of_right([[1.0, 0.0]], candidates, [[2]])[0].tolist() == [2]


def test_the_interval_is_that_of_scipy() -> None:
    values = np.random.default_rng(1).exponential(size=97)
    other = bootstrap((values,), np.mean, method="percentile", n_resamples=9999).confidence_interval
    score = mean_over_queries(values, np.arange(97))
    assert (score["low"], score["high"]) == pytest.approx(tuple(other), abs=0.04)
    assert score == mean_over_queries(values, np.arange(97))
    # Each value four times in its record tells no more than once; by itself, it would halve the interval.
    assert mean_over_queries(np.repeat(values, 4), np.repeat(np.arange(97), 4)) == pytest.approx(score)


def test_the_interval_is_of_the_mean_over_queries_where_records_have_unequally_many() -> None:
    """Of 26 records half have seven queries, all right, and half have one, which is wrong: 7/8, not one half."""
    counts = np.tile([7, 1], 13)
    score = mean_over_queries(np.repeat(np.tile([1.0, 0.0], 13), counts), np.repeat(np.arange(26), counts))
    assert score["mean"] == 7 / 8
    assert 0.7 < score["low"] < 7 / 8 < score["high"] < 1


def test_a_share_has_wilsons_interval_also_where_all_queries_agree() -> None:
    """Newcombe (1998): 81 of 263 is .2553 to .3662. Resampling 13 of 13 would give 1 to 1."""
    share = mean_over_queries(np.array([1.0] * 81 + [0.0] * 182), np.arange(263))
    assert (share["low"], share["high"]) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    z = 1.959964
    expected = {"mean": 1.0, "low": 13 / (13 + z * z), "high": 1.0}
    for queries in (1, 3):
        assert mean_over_queries(np.ones(13 * queries), np.repeat(np.arange(13), queries)) == pytest.approx(expected)


def views(source: Any, target: Any, record: Any, same: Any) -> ViewEmbeddings:
    sides = (np.asarray(side, np.float32) for side in (source, target))
    return ViewEmbeddings(*sides, np.asarray(record), np.ones(len(record), np.int64), np.asarray(same))


def test_equal_texts_and_equal_answers_count_as_right() -> None:
    # The second and the fourth target are one text; the first and the third answer are equal, says the task.
    target = np.eye(5)[[0, 1, 2, 1]]
    source = np.eye(5)[[2, 1, 0, 0]]
    embeddings = views(source, target, [0, 1, 2, 3], [0, 1, 2, 1])
    plain = rank_targets(embeddings, [None] * 4, CONFIG)
    assert plain.candidates == 3
    assert (plain.means()["hits_at_1"], plain.of_text) == (0.25, None)
    equal = rank_targets(embeddings, ["a", None, "a", None], CONFIG)
    assert equal.means()["hits_at_1"] == 0.75
    assert equal.summary()["equal_text_only"]["hits_at_1"] == 0.25
    assert equal.of_records(5) == [[1], [1], [1], [3], []]
    # Names are of answers, so they say nothing of the several pairs of one record.
    several = rank_targets(replace(embeddings, record=np.asarray([0, 0, 1, 2])), ["a", "a", None], CONFIG)
    assert several.means()["hits_at_1"] == 0.25


def nl_rx(answers: list[str]) -> list[Record]:
    return [tiny.make_record("", f"question {number}", answer) for number, answer in enumerate(answers)]


def test_names_of_answers() -> None:
    records = nl_rx(["(dog)|(lake)", "lake|dog", "(.*)|(a)", ".*"])
    names = answer_names(NlRxTask(), records, CONFIG)
    assert names == ["(dog)|(lake)", "(dog)|(lake)", "(.*)|(a)", "(.*)|(a)"]
    for other in (JepaConfig(mode="step-jepa"), JepaConfig(mode="llm-jepa", reverse_pred=True)):
        assert answer_names(NlRxTask(), records, other) == [None] * 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any, trained_tokenizer: Any) -> dict[str, Path]:
    """A regular run and one with views, of two steps on eleven records; and their records."""
    folder = tmp_path_factory.mktemp("runs")
    tiny.make_model("llama").save_pretrained(folder / "base")
    trained_tokenizer.save_pretrained(folder / "base")
    lines = [{"messages": list(each.messages)} for each in nl_rx([f"answer {number % 7}" for number in range(11)])]
    write_jsonl(folder / "data.jsonl", lines)
    shared = ["--train_file", folder / "data.jsonl", "--model_name", folder / "base", "--use_cpu", "--max_steps", "2"]
    held_out = ["--eval_file", folder / "data.jsonl", "--eval_retrieval", "--eval_steps", "1", "--save_steps", "1"]
    held_out += ["--load_best_model_at_end", "--metric_for_best_model", "eval_retrieval_hits_at_1"]
    result = {"data": folder / "data.jsonl"}
    for name, flags in {"regular": ["--regular"], "views": ["--jepa_loss_type", "infonce", *held_out]}.items():
        command = ["train", *shared, "--output_dir", folder / name, *flags]
        assert main(list(map(str, command))) == 0
        result[name] = folder / name
    return result


def evaluate(run: Path, data: Path, *flags: object) -> int:
    command = ["evaluate", "--model_path", run, "--test_file", data, "--task", "generic", "--max_new_tokens", 3]
    return main([*map(str, command), "--output_file", str(run / "test.jsonl"), "--overwrite", *map(str, flags)])


def test_an_evaluation_with_retrieval(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(runs["views"], runs["data"], "--retrieval") == 0
    summary = json.loads((runs["views"] / "test.summary.json").read_text())
    result = summary["retrieval"]
    assert (result["queries"], result["candidates"], result["equal_text_only"]) == (11, 7, None)
    assert result["readout"] == {"views": "llm-jepa", "layer": -1, "pooling": "last"}
    # What the embeddings of the public interface give, one query after the other.
    jepa = Jepa.from_pretrained(runs["views"])
    embeddings = jepa.embed_pairs(stepjepa.read_records(runs["data"]))
    ranks = [slow_ranks(query, embeddings.target[:7], [place % 7]) for place, query in enumerate(embeddings.source)]
    lines = [json.loads(line) for line in (runs["views"] / "test.jsonl").read_text().splitlines()]
    assert [line["ranks"] for line in lines] == ranks
    for name, values in metrics(list(map(np.asarray, ranks))).items():
        assert result[name]["mean"] == pytest.approx(values.mean())
        assert result[name]["low"] <= result[name]["mean"] <= result[name]["high"]
    shown = capsys.readouterr().out
    assert "of 11 questions (95% interval" in shown
    assert "among 7 distinct answers" in shown
    details = format_summary(summary, details=True)
    assert "a right answer is among the ten nearest: 1.0000 (95% interval 0.7412 to 1.0000)" in details
    assert "embeddings of retrieval are read at: views llm-jepa, layer -1, pooling last" in details
    scores = stepjepa.evaluate(
        runs["views"], runs["data"], output_file=runs["views"] / "test.jsonl", task="generic", max_new_tokens=3,
        retrieval=True,
    )  # fmt: skip
    assert scores["retrieval_mrr"] == result["mrr"]["mean"]
    assert [name for name in scores.names if name.startswith("retrieval")] == [
        f"retrieval_{n}" for n in RETRIEVAL_METRICS
    ]
    without = format_summary({**summary, "retrieval": None}, details=True)
    assert not any(word in without for word in ("nearest answer", "nDCG", "retrieval"))


def test_a_model_without_an_objective_is_read_at_the_mean_or_where_it_is_named(
    runs: dict[str, Path], capsys: Any
) -> None:
    assert evaluate(runs["regular"], runs["data"], "--retrieval") == 0
    assert "no JEPA objective" in (said := capsys.readouterr().err) and "--layer and --pooling name another" in said
    usual = json.loads((runs["regular"] / "test.summary.json").read_text())["retrieval"]
    assert usual["readout"] == {"views": "llm-jepa", "layer": -1, "pooling": "mean"}
    assert evaluate(runs["regular"], runs["data"], "--retrieval", "--layer", -1, "--pooling", "mean") == 0
    assert "no JEPA objective" not in capsys.readouterr().err
    assert json.loads((runs["regular"] / "test.summary.json").read_text())["retrieval"] == usual
    assert evaluate(runs["regular"], runs["data"], "--retrieval", "--layer", 1, "--pooling", "mean") == 0
    result = json.loads((runs["regular"] / "test.summary.json").read_text())["retrieval"]
    assert result["readout"] == {"views": "llm-jepa", "layer": 1, "pooling": "mean"}
    model, tokenizer = Jepa.from_pretrained(runs["regular"]).model, Jepa.from_pretrained(runs["regular"]).tokenizer
    records = stepjepa.read_records(runs["data"])
    config = embedding_config(trained_objective(runs["regular"]), layer=1, pooling="mean")
    embeddings = pair_embedder(model, tokenizer, config)(records)
    assert result["mrr"]["mean"] == rank_targets(embeddings, [None] * 11, config).means()["mrr"]
    assert evaluate(runs["regular"], runs["data"], "--layer", 1) == 2
    assert "--layer does nothing without --retrieval" in capsys.readouterr().err
    assert evaluate(runs["regular"], runs["data"], "--retrieval", "--layer", 9) == 2
    assert "--layer: " in capsys.readouterr().err
    with pytest.raises(UserError, match="some/hub-id: the model has no JEPA objective"):
        embedding_config(None, path="some/hub-id")


def test_a_mean_replaces_the_token_of_training() -> None:
    trained = JepaConfig(last_token=-2).to_dict()
    assert embedding_config(trained).last_token == -2
    read = embedding_config(trained, pooling="mean")
    assert (read.pooling, read.last_token) == ("mean", None)


def test_views_are_read_by_every_setting_that_they_were_trained_with() -> None:
    """Each setting of the views that can differ from its default is another view, or another place in it."""
    without_views = {"require_pairs": True}  # says what happens to a record that has none
    other = {"predictors": 3, "last_token": -2, "step_separator": "line", "steps_from": "reasoning", "pooling": "mean"}
    other |= {"pair_distance": 2, "front_pred": True, "reverse_pred": True, "pairs": "all", "layout": "branched"}
    views = {name for name, about in SETTINGS.items() if about.get("views") and about["affects"] == "sequences"}
    assert views == {*other, *without_views}
    for name, value in other.items():
        trained = JepaConfig(mode="step-jepa", **{name: value})
        assert getattr(embedding_config(trained.to_dict()), name) == value, name


def test_retrieval_during_training_is_that_of_the_evaluation(runs: dict[str, Path]) -> None:
    lines = [json.loads(line) for line in (runs["views"] / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "eval_retrieval_mrr" in line]
    assert [line["step"] for line in logged] == [1, 2]
    for line in logged:
        folder = runs["views"] / f"checkpoint-{line['step']}"
        scores = RetrievalScores(stepjepa.read_records(runs["data"]))(Jepa.from_pretrained(folder), 3)
        assert {name: line[f"eval_retrieval_{name}"] for name in RETRIEVAL_METRICS} == pytest.approx(scores)
    # The best checkpoint is chosen by it, and loaded at the end.
    best = max(line["eval_retrieval_hits_at_1"] for line in logged)
    state = json.loads((runs["views"] / "checkpoint-2" / "trainer_state.json").read_text())
    results = read_record(runs["views"]).results
    assert state["best_metric"] == best == results.evaluation["eval_retrieval_hits_at_1"]


def test_retrieval_during_training_needs_views(runs: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    command = ["train", "--train_file", runs["data"], "--model_name", "preset:tiny", "--output_dir", tmp_path / "a"]
    for flags, fault in ((["--regular"], "has no views"), ([], "--eval_file")):
        more = ["--eval_file", runs["data"]] if flags else []
        assert main([*map(str, [*command, *flags, *more]), "--eval_retrieval"]) == 2
        assert fault in capsys.readouterr().err
