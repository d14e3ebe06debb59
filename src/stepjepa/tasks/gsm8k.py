"""GSM8K: word problems of primary school, the answer behind ``####`` on the last line of the solution."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from stepjepa.answers.scoring import last_number, marked_answers, parse_number, same_answer, stated_number
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.tasks.base import Response, Scored, TaskOptions, Unusable, chat_record
from stepjepa.tasks.boxed import BoxedTask

SYSTEM_PROMPT = "Answer the math question, show steps."

_CALCULATION = re.compile(r"<<[^<>=\n]*=[^<>\n]*>>")
_ANSWER_LINE = re.compile(r"####[ \t]+(\S.*)")
# Between a question and its answer in the socratic variant.
_SOCRATIC = " ** "


class Gsm8kTask(BoxedTask):
    """The last marked answer, as a number: ``#### 18``, or a box where that comes later or alone.

    Scores: those of :class:`~stepjepa.tasks.boxed.BoxedTask`, which count marked answers only; asked for by
    ``--last_number`` also ``last_number_correct``, where a response that marks no answer is judged by its last
    number. ``correct`` never depends on that setting, so that the strict and the lenient figure stand side by side.
    """

    name = "gsm8k"
    takes = ("last_number",)

    def __init__(self, last_number: bool = False) -> None:
        """A task; ``last_number`` adds the lenient score."""
        self.last_number = last_number

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """The task with the user's settings."""
        return cls(options.last_number)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """A file named ``gsm8k...``, the data set's system prompt, or a solution whose last line is ``#### 18``.

        A solution with the field ``ground_truth`` beside it is left to ``boxed``: it is a model's, and others in its
        file may end otherwise.
        """
        first = record.messages[0]
        if Path(record.path).name.lower().startswith("gsm8k") or first == {"role": "system", "content": SYSTEM_PROMPT}:
            return True
        return record.extra.get("ground_truth") is None and _answer_line(record.answer) is not None

    def truth(self, record: Record) -> str:
        """The right answer, a number.

        Raises:
            UserError: there is none, or it is no number.
        """
        truth = super().truth(record)
        if stated_number(truth) is None:
            raise UserError(
                f"the right answer is '{truth[:50]}', no number; pass --task boxed to compare it as text",
                path=record.path,
                line=record.line,
            )
        return truth

    def marked(self, text: str) -> list[str]:
        """The answers that a response marks; without a digit a line with ``####`` is a heading."""
        return [answer for answer in marked_answers(text) if re.search("[0-9]", answer)]

    def score(self, record: Record, response: Response) -> Scored:
        """Compare the marked answers with the truth and, if asked for, an unmarked one."""
        scored = super().score(record, response)
        if not self.last_number:
            return scored
        answer = scored.extracted["answer"]
        guess = last_number(response.text) if answer is None else answer
        right = guess is not None and same_answer(guess, self.truth(record))
        return Scored(
            {**scored.scores, "last_number_correct": right},
            {**scored.extracted, "answer_or_last_number": guess},
            scored.error,
        )


def _answer_line(solution: str) -> str | None:
    """The number on the last line of a solution in the form of the data set."""
    match = _ANSWER_LINE.fullmatch(solution.rstrip().rpartition("\n")[2].strip())
    return match[1] if match and parse_number(match[1]) is not None else None


def convert(
    row: Mapping[str, Any], *, steps: bool = False, socratic: bool = True, calculator: bool = True
) -> dict[str, Any]:
    """A training record of a row of the original files, ``main`` or ``socratic``.

    Args:
        row: ``question`` and ``answer``.
        steps: part the lines of the solution by blank lines, so that each is a step; the line of the answer stays
            with the last one. Otherwise the solution stays as it is.
        socratic: keep the question in front of each line of the socratic variant (``question ** answer``).
        calculator: keep the annotations ``<<48/2=24>>``.

    Raises:
        Unusable: a field is missing or empty, or the last line holds no answer.
    """
    question, answer = (_text(row, name) for name in ("question", "answer"))
    if _answer_line(answer) is None:
        raise Unusable("'answer' does not end in a line '#### number'")
    lines = answer.split("\n")
    if not socratic:
        lines = [line.split(_SOCRATIC, 1)[-1] for line in lines]
    if not calculator:
        lines = [_CALCULATION.sub("", line) for line in lines]
    if not steps:
        return chat_record(SYSTEM_PROMPT, question, "\n".join(lines))
    *solution, last = filter(None, map(str.strip, lines))
    if len(solution) < 2:
        raise Unusable("fewer than two steps")
    return chat_record(SYSTEM_PROMPT, question, "\n\n".join(solution) + f"\n{last}", total_steps=len(solution))


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise Unusable(f"no field '{name}'")
    if not isinstance(value, str):
        raise Unusable(f"'{name}' is {type(value).__name__}, not text")
    if not value.strip():
        raise Unusable(f"'{name}' is empty")
    return value
