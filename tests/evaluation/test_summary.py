"""Means, intervals and their table."""

import math

import pytest

from stepjepa.evaluation.output import mean_with_interval, summarise
from stepjepa.evaluation.summary_text import format_summary


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),
    ],
)
def test_wilson_intervals_are_those_of_the_literature(successes, trials, low, high):
    result = mean_with_interval([1] * successes + [0] * (trials - successes))
    assert (result["low"], result["high"]) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))
    assert result["mean"] == pytest.approx(successes / trials)


def test_scores_that_are_no_shares_have_no_interval():
    assert mean_with_interval([0.25, 1.0]) == {"mean": 0.625, "low": None, "high": None}
    assert mean_with_interval([1.0, False]) == mean_with_interval([1, 0])


def lines():
    scores = [{"exact": True, "f1": 1.0}, {"exact": False, "f1": 0.5}, {"exact": False, "f1": 0.0}]
    losses, counts = [0.5, 2.0, 1.0], [7, 1, 2]
    return [
        {
            "scores": score,
            "error": None if score["exact"] else "ran on" if index == 2 else "wrong answer",
            "stopped": index != 2,
            "new_tokens": 5 + index,
            "gold_loss": loss,
            "gold_tokens": count,
        }
        for index, (score, loss, count) in enumerate(zip(scores, losses, counts, strict=True))
    ]


def test_the_gold_loss_is_a_mean_over_tokens_not_over_examples():
    summary = summarise(lines(), "exact")
    assert summary["gold_loss"] == pytest.approx((0.5 * 7 + 2.0 + 1.0 * 2) / 10)
    assert (summary["n"], summary["gold_tokens"], summary["generated_tokens"]) == (3, 10, 18)
    assert list(summary["scores"]) == ["exact", "f1", "stopped"]
    assert summary["errors"] == {"wrong answer": 1, "ran on": 1}
    assert math.isclose(summary["ran_on"] + summary["scores"]["stopped"]["mean"], 1)


ABOUT = {"generated_now": 3, "test_file": "t.jsonl", "task": "generic", "details": {}, "left_out": {}}


def full_summary():
    spread = {"n": 1, "mean": 0.5, "std": 0.25, "quantiles": {"0.1": 0.5, "0.9": 0.75}}
    similarity = {"pairs": 7.0, "matched_similarity": 0.25, "shuffled_similarity": 0.125, "source_rank": 3.0}
    similarity |= {"retrieval_top1": 0.5, "rank_pairs": 5.0, "right": spread, "wrong": {"n": 0}}
    about = {"model_path": "runs/a", "seconds": 2.0, "tokens_per_second": 9.0, "similarity": similarity}
    details = {
        "by_class": {"a": 0.5},
        "verdicts": {"equivalent": {"b": 3, "c": 0}, "d": {"b": 2}},
        "trivial": 1,
        "failures": {},
    }
    about |= {"details": details, "left_out": {"odd": 3}, "trained_on": {"exact": 0.5, "normalised": 0.5}}
    return {**summarise(lines(), "exact"), **ABOUT, **about}


def test_it_says_why_a_record_is_no_question_of_retrieval():
    hits = {"mean": 0.5, "low": 0.25, "high": 0.75}
    why = "3 of 10 records have no pair: the answer behind the first question is a tool call"
    retrieval = {"hits_at_1": hits, "queries": 7, "candidates": 5}
    shown = format_summary({**full_summary(), "retrieval": {**retrieval, "without_pair": why}})
    assert f"among 5 distinct answers\nnot among these questions: {why}\n" in shown
    assert "not among" not in format_summary({**full_summary(), "retrieval": retrieval})


def test_step_jepa_finds_steps_and_no_answers() -> None:
    hits = {"mean": 0.5, "low": 0.25, "high": 0.75}
    retrieval = {"hits_at_1": hits, "queries": 7, "candidates": 5, "readout": {"views": "step-jepa"}}
    shown = format_summary({**full_summary(), "retrieval": retrieval})
    assert "nearest next step is right by embeddings: 50.0% of 7 steps" in shown and "5 distinct next steps" in shown


def test_a_linear_map_of_an_earlier_version_is_one_of_ridge_regression():
    """Its summary has no ``fit``, and --details ended in a KeyError."""
    hits = {"mean": 0.5, "low": 0.25, "high": 0.75}
    ranking = {"hits_at_1": hits, "queries": 7, "candidates": 5}
    mapped = {**ranking, "file": "known.jsonl", "records": 31, "left_out": 0, "penalty": 0.01}
    shown = format_summary({**full_summary(), "retrieval": {**ranking, "linear_map": mapped}}, details=True)
    assert "fit of the linear map: ridge, penalty 0.01\n" in shown


def test_the_first_lines_say_what_is_right_what_stopped_and_what_is_wrong():
    assert format_summary(full_summary()).splitlines() == [
        "right by exact match: 33.3% of 3 examples (95% interval 6.1 to 79.2%)",
        "stopped by itself: 66.7% of the answers",
        "wrong by exact match: 2 of 3 examples (1 wrong answer, 1 ran on)",
        "skipped: 3 records: odd 3",
        "mean cosine of matched views: 0.250, of shuffled ones 0.125",
        "50.0% of the test prompts were trained on (50.0% but for case and blanks)",
        "evaluated: 3 examples of t.jsonl, task generic, model runs/a",
    ]


def test_every_other_figure_has_a_name_and_a_unit():
    summary = full_summary()
    first = format_summary(summary)
    table = format_summary(summary, details=True)
    assert table.startswith(first)
    assert [line.strip() for line in table[len(first) + 1 :].splitlines()] == [
        "exact: 33.3% of 3 examples (95% interval 6.1 to 79.2%)",
        "f1: 0.5000, mean over 3 examples",
        "stopped by itself: 66.7% of 3 examples (95% interval 20.8 to 93.9%)",
        "by class: a 0.5000",
        "verdicts: examples: equivalent (b 3, c 0), d (b 2)",
        "trivial: 1 example",
        "pairs of views: 7",
        "cosine of matched views: 0.2500, mean",
        "cosine of shuffled views: 0.1250, mean",
        "source embeddings span: 3.0 directions (effective rank)",
        "sources whose nearest target is their own: 50.0%",
        "directions and nearest targets are of the last 5 pairs",
        "cosine of matched views where the answer is right: mean 0.500, standard deviation 0.250 over 1 example; "
        "quantiles 10% 0.500, 90% 0.750",
        "LM loss on right answers: 0.7500 nats a token, over 10 tokens",
        "generated: 18 tokens",
        "time: 3 examples in 2.0 s, 9.0 tokens a second",
    ]


def test_several_samples_are_told_by_their_mean_and_by_their_majority():
    summary = full_summary()
    share = {"mean": 2 / 3, "low": 0.25, "high": 0.9}
    summary["scores"] = {"exact": {"mean": 0.5, "low": None, "high": None}, "majority": share}
    first, second, wrong, *_ = format_summary(summary).splitlines()
    assert first == "exact match: 0.5000, mean over 3 examples"
    assert second == "right by the majority of the samples: 66.7% of 3 examples (95% interval 25.0 to 90.0%)"
    assert wrong == "wrong by the majority of the samples: 2 of 3 examples (1 wrong answer, 1 ran on)"


def test_what_nobody_knows_is_left_out():
    unknown = [{"scores": {"exact": True}, "error": None, "stopped": None, "new_tokens": None}]
    summary = summarise(unknown, "exact")
    assert [summary[name] for name in ("ran_on", "gold_loss", "generated_tokens")] == [None, None, None]
    table = format_summary({**summary, **ABOUT}, details=True)
    assert not {"LM loss", "model", "stopped", "wrong", "generated:"} & {*table.split(), *table.splitlines()}
    assert "LM loss" not in table and "model" not in table
