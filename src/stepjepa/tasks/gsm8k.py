"""GSM8K: word problems of primary school, the answer behind ``####`` on the last line of the solution."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepjepa.data.records import Record
from stepjepa.tasks.answers import last_number, marked_answers, parse_number, same_answer, stated_number
from stepjepa.tasks.base import Response, Scored, record_error, task
from stepjepa.tasks.generic import GROUND_TRUTH, BoxedTask
from stepjepa.tasks.raw_values import Unusable, chat_record, read_text_field

_CALCULATION = re.compile(r"<<[^<>=\n]*=[^<>\n]*>>")
_ANSWER_LINE = re.compile(r"####[ \t]+(\S.*)")
# Between a question and its answer in the socratic variant.
_SOCRATIC = " ** "


@task("gsm8k")
class Gsm8kTask(BoxedTask):
    """The last marked answer, as a number: ``#### 18``, or a box where that comes later or alone.

    Scores: those of :class:`~stepjepa.tasks.generic.BoxedTask`, which count marked answers only; with ``--last_number``
    also ``last_number_correct``, where a response that marks no answer is judged by its last number.
    """

    takes = ("last_number",)
    system_prompt = "Answer the math question, show steps."
    file_names = ("gsm8k",)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """By prompt or file name, or a solution whose last line is ``#### 18``.

        A solution with the field ``ground_truth`` is a model's, and others in its file may end otherwise: ``boxed``.
        """
        solved = record.extra.get(GROUND_TRUTH) is None and _ends_in_number(record.answer)
        return solved or cls.is_of_data_set(record)

    def truth(self, record: Record) -> str:
        truth = super().truth(record)
        if stated_number(truth) is None:
            told = f"the right answer is '{truth[:50]}', no number; pass --task boxed to compare it as text"
            raise record_error(record, told)
        return truth

    def marked(self, text: str) -> list[str]:
        """The answers that a response marks; without a digit a line with ``####`` is a heading."""
        return [answer for answer in marked_answers(text) if re.search("[0-9]", answer)]

    def score(self, record: Record, response: Response) -> Scored:
        scored = super().score(record, response)
        if self.options.last_number:
            answer = scored.extracted["answer"]
            guess = last_number(response.text) if answer is None else answer
            scored.scores["last_number_correct"] = guess is not None and same_answer(guess, self.truth(record))
            scored.extracted["answer_or_last_number"] = guess
        return scored

    @classmethod
    def convert(
        cls, row: Mapping[str, Any], *, steps: bool = False, socratic: bool = True, calculator: bool = True
    ) -> dict[str, Any]:
        """A training record of a row of the original files, ``main`` or ``socratic``.

        Args:
            row: ``question`` and ``answer``.
            steps: separate the lines of the solution by blank lines, so that each is a step; the line of the answer
                stays with the last one.
            socratic: keep the question in front of each line of the socratic variant (``question ** answer``).
            calculator: keep the annotations ``<<48/2=24>>``.
        """
        question, answer = (read_text_field(row, name) for name in ("question", "answer"))
        if not _ends_in_number(answer):
            raise Unusable("'answer' does not end in a line '#### number'")
        lines = answer.split("\n")
        if not socratic:
            lines = [line.split(_SOCRATIC, 1)[-1] for line in lines]
        if not calculator:
            lines = [_CALCULATION.sub("", line) for line in lines]
        if not steps:
            return chat_record(cls.system_prompt, question, "\n".join(lines))
        *solution, last = filter(None, map(str.strip, lines))
        if len(solution) < 2:
            raise Unusable("fewer than two steps")
        text = "\n\n".join(solution) + f"\n{last}"
        return chat_record(cls.system_prompt, question, text, total_steps=len(solution))


def _ends_in_number(solution: str) -> bool:
    """Whether the last line of a solution is an answer in the form of the data set."""
    match = _ANSWER_LINE.fullmatch(solution.rstrip().rpartition("\n")[2].strip())
    return match is not None and parse_number(match[1]) is not None
