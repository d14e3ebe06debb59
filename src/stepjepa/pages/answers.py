"""The browser of generated answers: filtered, searched, and side by side between two evaluations."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Sequence
from typing import Any

from stepjepa.evaluation.answering import RAN_ON
from stepjepa.files import read_jsonl
from stepjepa.pages.render import Section, json_block, render
from stepjepa.pages.runs import Evaluation, Run
from stepjepa.terminal import visible_lines

LONGEST = 4000
"""Characters of a text that are shown."""


def answers_section(runs: Sequence[Run]) -> Section | None:
    """The answers of all evaluations; None where no evaluation has kept any.

    Raises:
        UserError: a file of answers can't be read.
    """
    # Two evaluations ask the same questions, so each distinct text stands once.
    texts: dict[str, int] = {}
    evaluations = [_describe(run.name, evaluation, texts) for run in runs for evaluation in run.evaluations.values()]
    found = [each for each in evaluations if each is not None]
    if not found:
        return None
    data = json_block("answers-data", {"texts": list(texts), "evaluations": found})
    return Section("answers", "Generated answers", render("answers.html", data=data), "answers.js")


def _describe(run: str, evaluation: Evaluation, texts: dict[str, int]) -> dict[str, Any] | None:
    """One evaluation for the script, or None where nothing was generated.

    Of each answer: index, number of the prompt, number of the right answer, what was generated, whether it is right,
    whether the model stopped (null: not known), the kind of error, and the scores in the order of ``scores``.
    """
    lines = [] if evaluation.answers is None else [line for _, line in read_jsonl(evaluation.answers)]
    lines = [line for line in lines if isinstance(line.get("generated"), str)]
    if not lines:
        return None
    headline = evaluation.summary.get("headline")
    prompts = [shown_text(line.get("prompt")) for line in lines]
    # The system prompt, which all prompts begin with, stands once.
    begin = os.path.commonprefix(prompts) if len(prompts) > 1 else ""  # noqa: RUF071  # of characters, not of folders
    begin = begin[: begin.rfind("\n") + 1]
    names = list(dict.fromkeys(name for line in lines for name in _scores(line)))
    answers = [
        [
            line.get("index"),
            texts.setdefault(prompt[len(begin) :], len(texts)),
            texts.setdefault(shown_text(line.get("truth")), len(texts)),
            shown_text(line["generated"]),
            is_right(line, headline),
            _stopped(line),
            shown_text(line.get("error")),
            [_rounded(_scores(line).get(name)) for name in names],
        ]
        for line, prompt in zip(lines, prompts, strict=True)
    ]
    return {
        "run": visible_lines(run),
        "name": visible_lines(evaluation.name),
        "test": evaluation.summary.get("test_fingerprint"),
        "headline": shown_text(headline),
        "scores": [visible_lines(name) for name in names],
        "samples": max(len(line.get("samples") or ()) for line in lines),
        "begin": begin,
        "answers": answers,
    }


def shown_text(value: Any) -> str:
    """A field as the page shows it: several right answers on lines of their own, control characters escaped, cut."""
    if isinstance(value, Iterable) and not isinstance(value, str | dict):
        return "\n".join(map(shown_text, value))
    text = "" if value is None else str(value)
    more = len(text) - LONGEST
    return visible_lines(text) if more <= 0 else f"{visible_lines(text[:LONGEST])}\n[... {more:,} more characters]"


def is_right(line: dict[str, Any], headline: str | None) -> bool | None:
    """Whether the score that decides (the mean over samples) is above one half; None where the line lacks it."""
    score = _scores(line).get(headline or "")
    return score > 0.5 if isinstance(score, bool | int | float) else None


def _scores(line: dict[str, Any]) -> dict[str, Any]:
    scores = line.get("scores")
    return scores if isinstance(scores, dict) else {}


def _stopped(line: dict[str, Any]) -> bool | None:
    """Whether the model ended its turn, in all samples."""
    stopped = line.get("stopped")
    if stopped is None:
        return False if line.get("error") == RAN_ON else None
    return bool(stopped == 1)


def _rounded(value: Any) -> float | None:
    return round(float(value), 4) if isinstance(value, bool | int | float) else None
