"""Means, intervals and their table."""

import math

import pytest

from stepjepa.summary import format_summary, mean_with_interval, summarise, wilson_interval


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
    assert wilson_interval(successes, trials) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(successes, trials):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, trials)


def test_scores_that_are_no_shares_have_no_interval():
    assert mean_with_interval([0.25, 1.0]) == {"mean": 0.625, "low": None, "high": None}
    assert mean_with_interval([True, False, False])["mean"] == pytest.approx(1 / 3)
    assert mean_with_interval([1.0, 0.0])["low"] == pytest.approx(wilson_interval(1, 2)[0])


def lines():
    scores = [{"exact": True, "f1": 1.0}, {"exact": False, "f1": 0.5}, {"exact": False, "f1": 0.0}]
    losses, counts = [0.5, 2.0, 1.0], [7, 1, 2]
    return [
        {"scores": score, "stopped": index != 2, "new_tokens": 5 + index, "gold_loss": loss, "gold_tokens": count}
        for index, (score, loss, count) in enumerate(zip(scores, losses, counts, strict=True))
    ]


def test_the_gold_loss_is_a_mean_over_tokens_not_over_examples():
    summary = summarise(lines())
    assert summary["gold_loss"] == pytest.approx((0.5 * 7 + 2.0 + 1.0 * 2) / 10)
    assert (summary["n"], summary["gold_tokens"], summary["generated_tokens"]) == (3, 10, 18)
    assert list(summary["scores"]) == ["exact", "f1", "stopped"]
    assert math.isclose(summary["ran_on"] + summary["scores"]["stopped"]["mean"], 1)


@pytest.mark.parametrize(("speed", "words"), [(9.0, "2.0 s, 9 tokens/s"), (None, "nothing generated now")])
def test_the_table_shows_every_score(speed, words):
    about = {"test_file": "t.jsonl", "task": "generic", "model_path": "runs/a", "seconds": 2.0, "similarity": None}
    table = format_summary({**summarise(lines()), **about, "tokens_per_second": speed})
    assert "3 examples of t.jsonl, task generic, model runs/a" in table
    assert "exact           33.33%   6.15 .. 79.23" in table
    assert "f1              0.5000\n" in table
    assert "0.7500 (10 tokens)" in table
    assert words in table
    assert "similarity" not in table
    about["similarity"] = {"matched_similarity": 0.25, "shuffled_similarity": -0.5}
    table = format_summary({**summarise(lines()), **about, "tokens_per_second": speed})
    assert "matched pairs of views 0.250, of shuffled ones -0.500" in table
    assert max(map(len, table.splitlines())) <= 100
