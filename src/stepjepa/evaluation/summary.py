"""Summarise the lines of an evaluation: means with intervals, and a table for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def mean_with_interval(values: Sequence[bool | float]) -> dict[str, float | None]:
    """``mean`` of a score, and ``low`` and ``high``, Wilson's 95 % interval; None unless every value is 0 or 1.

    Wilson's interval (1927) is valid also for shares near 0 and 1 and for few values.
    """
    total = math.fsum(values)
    low = high = None
    if all(value in (0, 1) for value in values):
        from scipy.stats import binomtest

        interval = binomtest(round(total), len(values)).proportion_ci(method="wilson")
        low, high = float(interval.low), float(interval.high)
    return {"mean": total / len(values), "low": low, "high": high}


def summarise(lines: Sequence[Mapping[str, Any]], headline: str) -> dict[str, Any]:
    """The means of an evaluation.

    Args:
        lines: at least one line of ``judging.judge``, perhaps with ``gold_loss`` and ``gold_tokens``.
        headline: the score that decides what is right.

    Returns:
        ``n``; ``headline``; ``scores`` (``mean``, ``low`` and ``high`` by name, including ``stopped`` if it is known);
        ``errors``, the number of errors of each kind; ``ran_on``, the share of answers cut off at ``max_new_tokens``;
        ``gold_loss``, the LM loss per token of the right answers; ``gold_tokens``; ``generated_tokens``. Values that
        can't be computed from the lines are None.
    """
    scores = {name: mean_with_interval([line["scores"][name] for line in lines]) for name in lines[0]["scores"]}
    stopped = [line["stopped"] for line in lines]
    if None not in stopped:
        scores["stopped"] = mean_with_interval(stopped)
    tokens = [line["new_tokens"] for line in lines]
    gold_tokens = sum(line.get("gold_tokens", 0) for line in lines)
    return {
        "n": len(lines),
        "headline": headline,
        "scores": scores,
        "errors": dict(Counter(line["error"] for line in lines if line["error"] is not None).most_common()),
        "ran_on": None if None in stopped else 1 - math.fsum(stopped) / len(lines),
        "gold_loss": (
            math.fsum(line["gold_loss"] * line["gold_tokens"] for line in lines) / gold_tokens if gold_tokens else None
        ),
        "gold_tokens": gold_tokens,
        "generated_tokens": None if None in tokens else sum(tokens),
    }


def format_summary(summary: Mapping[str, Any]) -> str:
    """A summary as a short table for the terminal."""
    title = f"{summary['n']} examples of {summary['test_file']}, task {summary['task']}"
    width = max(14, *(len(name) + 2 for name in summary["scores"]))
    lines = [
        f"{title}, model {summary['model_path']}" if summary.get("model_path") else title,
        *(f"  left out: {count} records ({reason})" for reason, count in summary.get("left_out", {}).items()),
        f"  {'score':<{width}}{'mean':>8}   95 % interval",
    ]
    for name, score in summary["scores"].items():
        if score["low"] is None:
            lines.append(f"  {name:<{width}}{score['mean']:8.4f}")
        else:
            interval = f"{100 * score['low']:.2f} .. {100 * score['high']:.2f}"
            lines.append(f"  {name:<{width}}{100 * score['mean']:7.2f}%   {interval}")
    if summary["errors"]:
        # With several samples the error is that of the majority answer.
        decided = "majority" if "majority" in summary["scores"] else summary["headline"]
        lines.append(f"  not right by {decided}: {_short(summary['errors'])}")
    lines += [f"  {name}: {_short(value)}" for name, value in summary["details"].items()]
    if summary.get("similarity") is not None:
        lines += [f"  {name.replace('_', ' ')}: {_short(value)}" for name, value in summary["similarity"].items()]
    if seen := describe_trained_on(summary.get("trained_on")):
        lines.append(f"  {seen}")
    if summary["gold_loss"] is not None:
        lines.append(f"  LM loss on the right answers {summary['gold_loss']:.4f} ({summary['gold_tokens']} tokens)")
    if summary["generated_tokens"] is not None:
        speed = "nothing generated in this run"
        if summary.get("tokens_per_second") is not None:
            # The time of a resumed evaluation is that of its last part.
            now = summary["generated_now"]
            part = "" if now == summary["n"] else f"the last {now} examples: "
            speed = f"{part}{summary['seconds']:.1f} s, {summary['tokens_per_second']:.0f} tokens/s"
        lines.append(
            f"  {summary['generated_tokens']} tokens generated, {summary['ran_on']:.1%} of answers ran on; {speed}"
        )
    return "\n".join(lines)


def describe_trained_on(shares: Mapping[str, float] | None) -> str | None:
    """State the share of the test prompts that was trained on; None if that is zero or unknown.

    Args:
        shares: the result of ``data.prompts.share_trained_on``.
    """
    if not shares or not shares["normalised"]:
        return None
    return (
        f"{shares['exact']:.1%} of the test prompts were trained on ({shares['normalised']:.1%} but for case and "
        "blanks), so the scores are none of new prompts"
    )


def _short(value: Any) -> str:
    """A value of the summary on one line."""
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, Mapping) and not value:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} ({_short(inner)})" if isinstance(inner, Mapping) else f"{name} {_short(inner)}"
            for name, inner in value.items()
        )
    return str(value)
