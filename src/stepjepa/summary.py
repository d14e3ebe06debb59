"""From one line per example to means with intervals, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Two-sided 95 % of the normal distribution.
Z95 = 1.959963984540054


def wilson_interval(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share; sound also near 0 and 1 and for few trials.

    Args:
        successes: how many of the trials succeeded.
        trials: how many there were, at least 1.
        z: quantile of the normal distribution; the default gives 95 %.

    Returns:
        Lower and upper end.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"expected 0 <= successes <= trials and trials >= 1, got {successes} of {trials}")
    share, square = successes / trials, z * z / trials
    middle = (share + square / 2) / (1 + square)
    half = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials)) / (1 + square)
    # At the ends the formula is exact but floats are not.
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == trials else middle + half
    return low, high


def mean_with_interval(values: Sequence[bool | float]) -> dict[str, float | None]:
    """``mean``, ``low``, ``high`` of a score; the ends are None unless every value is 0 or 1."""
    total = math.fsum(values)
    low: float | None = None
    high: float | None = None
    if all(value in (0, 1) for value in values):
        low, high = wilson_interval(round(total), len(values))
    return {"mean": total / len(values), "low": low, "high": high}


def summarise(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means of an evaluation.

    Args:
        lines: at least one, as ``evaluation`` writes them.

    Returns:
        ``n``; ``scores`` (name to ``mean``, ``low``, ``high``, with ``stopped`` among them); ``ran_on``, the share
        that was cut off at ``max_new_tokens``; ``gold_loss``, the LM loss per token of the right answers;
        ``gold_tokens``; ``generated_tokens``.
    """
    scores = {name: mean_with_interval([line["scores"][name] for line in lines]) for name in lines[0]["scores"]}
    scores["stopped"] = mean_with_interval([line["stopped"] for line in lines])
    gold_tokens = sum(line["gold_tokens"] for line in lines)
    return {
        "n": len(lines),
        "scores": scores,
        "ran_on": sum(not line["stopped"] for line in lines) / len(lines),
        "gold_loss": math.fsum(line["gold_loss"] * line["gold_tokens"] for line in lines) / gold_tokens,
        "gold_tokens": gold_tokens,
        "generated_tokens": sum(line["new_tokens"] for line in lines),
    }


def format_summary(summary: Mapping[str, Any]) -> str:
    """A summary as a short table for the terminal."""
    lines = [
        f"{summary['n']} examples of {summary['test_file']}, task {summary['task']}, model {summary['model_path']}",
        f"  {'score':<14}{'mean':>8}   95 % interval",
    ]
    for name, score in summary["scores"].items():
        if score["low"] is None:
            lines.append(f"  {name:<14}{score['mean']:8.4f}")
        else:
            interval = f"{100 * score['low']:.2f} .. {100 * score['high']:.2f}"
            lines.append(f"  {name:<14}{100 * score['mean']:7.2f}%   {interval}")
    if summary["similarity"] is not None:
        matched, shuffled = (summary["similarity"].get(f"{kind}_similarity") for kind in ("matched", "shuffled"))
        other = "not measured" if shuffled is None else f"{shuffled:.3f}"
        lines.append(f"  similarity of matched pairs of views {matched:.3f}, of shuffled ones {other}")
    lines.append(f"  LM loss on the right answers {summary['gold_loss']:.4f} ({summary['gold_tokens']} tokens)")
    if summary["tokens_per_second"] is None:
        speed = "nothing generated now"
    else:
        speed = f"{summary['seconds']:.1f} s, {summary['tokens_per_second']:.0f} tokens/s"
    lines.append(
        f"  {summary['generated_tokens']} tokens generated, {summary['ran_on']:.1%} of answers ran on; {speed}"
    )
    return "\n".join(lines)
