"""Means, intervals and their table."""

import math

import pytest

from stepjepa.evaluation.output import format_summary, mean_with_interval, summarise


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
    found = mean_with_interval([1] * successes + [0] * (trials - successes))
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))
    assert found["mean"] == pytest.approx(successes / trials)


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


def test_the_table_shows_every_score():
    about = ABOUT | {"model_path": "runs/a", "seconds": 2.0, "tokens_per_second": 9.0}
    about |= {"similarity": {"matched_similarity": 0.25}, "details": {"by class": {"a": 0.5}}, "left_out": {"odd": 3}}
    table = format_summary({**summarise(lines(), "exact"), **about})
    for words in (
        "3 examples of t.jsonl, task generic, model runs/a",
        "exact      33.33%   95 % interval 6.15 .. 79.23",
        "f1         0.5000\n",
        "gold tokens: 10",
        "ran on: 0.3333",
        "seconds: 2.0",
        "matched similarity: 0.2500\n",
        "not right by exact: wrong answer 1, ran on 1",
        "by class: a 0.5000",
        "skipped: odd 3",
    ):
        assert words in table
    assert max(map(len, table.splitlines())) <= 100


def test_what_nobody_knows_is_left_out():
    unknown = [{"scores": {"exact": True}, "error": None, "stopped": None, "new_tokens": None}]
    summary = summarise(unknown, "exact")
    assert [summary[name] for name in ("ran_on", "gold_loss", "generated_tokens")] == [None, None, None]
    table = format_summary({**summary, **ABOUT})
    assert "gold" not in table
    assert "model" not in table
