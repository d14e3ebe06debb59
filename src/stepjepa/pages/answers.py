"""The browser of generated answers: filtered, searched, and side by side between two evaluations."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from stepjepa.evaluation.judging import RAN_ON
from stepjepa.files import read_jsonl
from stepjepa.pages.markup import environment, json_block
from stepjepa.pages.material import Evaluation, Run
from stepjepa.pages.section import Section
from stepjepa.terminal import visible_lines

LONGEST = 4000
"""Characters of a text that are shown: a model that ran on may have written more than anybody reads."""

_DATA = "answers-data"


def answers_section(runs: Sequence[Run]) -> Section | None:
    """The answers of all evaluations of some runs.

    Args:
        runs: as read from their folders.

    Returns:
        None where no evaluation has kept its answers.

    Raises:
        UserError: a file of answers can't be read.
    """
    texts = _Texts()
    found = [
        described
        for run in runs
        for evaluation in run.evaluations.values()
        if (described := _describe(run.name, evaluation, texts)) is not None
    ]
    if not found:
        return None
    template = environment().get_template("answers.html")
    html = template.render(data=Markup(json_block(_DATA, {"texts": texts.all, "evaluations": found})), count=len(found))
    parts = files("stepjepa.pages") / "templates"
    script, style = ((parts / f"answers.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return Section("answers", "Generated answers", html, script, style)


class _Texts:
    """Texts that many answers share, each kept once: two evaluations ask the same questions."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Where a text stands among all."""
        if text not in self._places:
            self._places[text] = len(self.all)
            self.all.append(text)
        return self._places[text]


def _describe(run: str, evaluation: Evaluation, texts: _Texts) -> dict[str, Any] | None:
    """One evaluation as the script takes it; None where nothing was generated.

    Of each answer: index, place of the prompt, place of the right answer, what was generated, whether it is right,
    whether the model stopped (null where nobody knows), the kind of error, and the scores in the order of ``scores``.
    """
    if evaluation.answers is None:
        return None
    lines = [line for _, line in read_jsonl(evaluation.answers) if isinstance(line.get("generated"), str)]
    if not lines:
        return None
    summary = evaluation.summary
    prompts = [shown(_text(line.get("prompt"))) for line in lines]
    # A system prompt that all begin with need not stand in the file thousands of times.
    begin = os.path.commonprefix(prompts) if len(prompts) > 1 else ""  # noqa: RUF071  # of characters, not of folders
    begin = begin[: begin.rfind("\n") + 1]
    names = list(dict.fromkeys(name for line in lines for name in _scores(line)))
    headline = summary.get("headline")
    answers = [
        [
            line.get("index"),
            texts.place(prompt[len(begin) :]),
            texts.place(shown(_text(line.get("truth")))),
            shown(line["generated"]),
            is_right(line, headline),
            _stopped(line),
            visible_lines(_text(line.get("error"))),
            [_number(_scores(line).get(name)) for name in names],
        ]
        for line, prompt in zip(lines, prompts, strict=True)
    ]
    return {
        "run": visible_lines(run),
        "name": visible_lines(evaluation.name),
        "test": summary.get("test_fingerprint"),
        "headline": visible_lines(_text(headline)),
        "scores": [visible_lines(name) for name in names],
        "samples": max(len(line.get("samples") or ()) for line in lines),
        "begin": begin,
        "answers": answers,
    }


def shown(text: str) -> str:
    """A text as the page shows it: what could not be seen or would turn the line about is written out, the end cut."""
    more = len(text) - LONGEST
    return visible_lines(text) if more <= 0 else f"{visible_lines(text[:LONGEST])}\n[... {more:,} more characters]"


def is_right(line: dict[str, Any], headline: str | None) -> bool | None:
    """Whether an answer counts as right: more than half of its samples are, by the score that decides.

    Returns:
        None where the line does not tell.
    """
    score = _scores(line).get(headline or "")
    return score > 0.5 if isinstance(score, bool | int | float) else None


def _scores(line: dict[str, Any]) -> dict[str, Any]:
    scores = line.get("scores")
    return scores if isinstance(scores, dict) else {}


def _stopped(line: dict[str, Any]) -> bool | None:
    """Whether the model ended its turn; of several samples, whether all did."""
    stopped = line.get("stopped")
    if stopped is None:
        return False if line.get("error") == RAN_ON else None
    return bool(stopped == 1)


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return int(value)
    return round(value, 4) if isinstance(value, int | float) else None


def _text(value: Any) -> str:
    """What a field says; several right answers stand on lines of their own."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "\n".join(map(_text, value)) if isinstance(value, Iterable) and not isinstance(value, dict) else str(value)
