r"""Tasks: answers compared as text, answers marked in a solution, and GSM8K, whose marked answers are numbers."""

import math
import re
from collections.abc import Mapping

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.answers import (
    before_special_token,
    canonical,
    first_number,
    marked_answers,
    parse_number,
    plain_characters,
    same_answer,
    text_scores,
)
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.raw_values import Unusable, chat_record, read_text_field

_GROUND_TRUTH = "ground_truth"


class GenericTask(Task):
    """Compare the last assistant message with the whole answer of the model as text, by ``text_scores``."""

    name = "generic"
    detection_order = 3
    headline = "exact"
    secondary_score = "prefix"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        return True

    def truth(self, record: Record) -> str:
        return right_answer(record)

    def score(self, record: Record, response: Response) -> Scored:
        scores = text_scores(response.content, record.answer)
        error = None if scores["exact"] else WRONG if response.content.strip() else NO_ANSWER
        return Scored(scores, error=error)


class BoxedTask(Task):
    r"""The truth is the field ``ground_truth`` if a record has one, else the marked answer of the assistant message.

    Answers are marked by ``\boxed{...}`` or ``#### ...``. ``correct`` is the last marked answer, ``first_correct`` the
    first, ``answered`` whether there is one; ``exact`` and the like are of the whole solution.
    """

    name = "boxed"
    detection_order = 2
    headline = "correct"
    secondary_score = "first_correct"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Return whether the truth is marked, or the field ``ground_truth`` is a number."""
        ground_truth = _ground_truth(record) or ""
        return (
            bool(marked_answers(ground_truth) or marked_answers(record.answer))
            or parse_number(ground_truth) is not None
        )

    def truth(self, record: Record) -> str:
        ground_truth = _ground_truth(record)
        marked = marked_answers(right_answer(record) if ground_truth is None else ground_truth)
        marked = marked or ([] if ground_truth is not None else marked_answers(record.answer))  # within a thought
        if ground_truth is None and not marked:
            fault = r"the assistant message has neither \boxed{...} nor a line '#### ...'"
            remedy = f"add one, or a field '{_GROUND_TRUTH}', or pass `task generic`"
            raise record_error(record, f"no answer to compare with: {fault}; {remedy}")
        return marked[-1] if marked else str(ground_truth)

    def marked(self, text: str) -> list[str]:
        """Return the answers that a response marks, in order."""
        return marked_answers(text)

    def score(self, record: Record, response: Response) -> Scored:
        truth = self.truth(record)
        marked = self.marked(response.content)
        first, last = (marked[0], marked[-1]) if marked else (None, None)
        scores: dict[str, bool | float] = {
            "correct": last is not None and same_answer(last, truth),
            "first_correct": first is not None and same_answer(first, truth),
            "answered": last is not None,
            **text_scores(response.content, record.answer),
        }
        error = None if scores["correct"] else WRONG if marked else NO_ANSWER
        return Scored(scores, {"truth": truth, "answer": last, "first_answer": first}, error)

    def vote(self, scored: Scored, response: Response) -> str | None:
        """Return the marked answer; ``18`` and ``$18.00`` are the same vote."""
        answer = scored.extracted["answer"]
        return None if answer is None else canonical(answer)


def _ground_truth(record: Record) -> str | None:
    """Return the field ``ground_truth`` as text; None if it is absent, null, or NaN (an empty cell of a table)."""
    value = record.extra.get(_GROUND_TRUTH)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise record_error(record, f"'{_GROUND_TRUTH}' is {value!r:.50}, expected a number or text; remove or fill it")
    return str(value)


_MARK = re.compile(r"(?<!#)####(?!#)\s*")
_CALCULATOR = re.compile(r"<<[^<>=\n]*=[^<>\n]*>>")  # annotation of the data set, <<48/2=24>>


class Gsm8kTask(BoxedTask):
    """GSM8K: the answer is the first number after the last ``####``, or in a later box."""

    name = "gsm8k"
    detection_order = 1
    system_prompt = "Answer the math question, show steps."
    file_names = ("gsm8k",)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Return whether prompt or file name match, or the last line of the solution is ``#### 18``.

        A solution with the field ``ground_truth`` was generated by a model, and others in its
        file may end differently: they are left to ``boxed``.
        """
        solved = record.extra.get(_GROUND_TRUTH) is None and _ends_in_number(record.answer)
        # The rule of Task, not that of BoxedTask.
        return solved or super(BoxedTask, cls).recognises(record)

    def truth(self, record: Record) -> str:
        truth = super().truth(record)
        number = first_number(truth)
        if number is None:
            fault = f"the right answer is '{truth[:50]}', no number; pass `task boxed` to compare it as text"
            raise record_error(record, fault)
        return number

    def marked(self, text: str) -> list[str]:
        """Return the numbers that a response marks, in order; a line with ``####`` without a number is a heading."""
        text = _MARK.sub("\n#### ", _CALCULATOR.sub("", plain_characters(text)))
        numbers = list(map(first_number, marked_answers(text)))
        if not any(numbers) and "\n#### " in text:
            numbers = [first_number(before_special_token(text.rpartition("\n#### ")[2]))]
        return [number for number in numbers if number is not None]

    @classmethod
    def convert(
        cls, row: Mapping[str, object], *, steps: bool = False, socratic: bool = True, calculator: bool = True
    ) -> JsonObject:
        """Convert a row (``question``, ``answer``) of the files ``main`` or ``socratic`` to a training record.

        ``steps`` puts a blank line between the lines of the solution; ``socratic`` keeps the questions before them
        (``question ** answer``), ``calculator`` the annotations ``<<48/2=24>>``.

        Raises:
            Unusable: a field is missing, the answer has no number at its end, or with ``steps`` fewer than two steps.
        """
        question, answer = (read_text_field(row, name) for name in ("question", "answer"))
        if not _ends_in_number(answer):
            raise Unusable("'answer' does not end in a line '#### number'")
        if not calculator:
            answer = _CALCULATOR.sub("", answer)
        lines = answer.split("\n") if socratic else [line.split(" ** ", 1)[-1] for line in answer.split("\n")]
        if not steps:
            return chat_record(cls.system_prompt, question, "\n".join(lines))
        *solution, last = filter(None, map(str.strip, lines))
        if len(solution) < 2:
            raise Unusable("fewer than two steps")
        text = "\n\n".join(solution) + f"\n{last}"
        return chat_record(cls.system_prompt, question, text, total_steps=len(solution))


def _ends_in_number(solution: str) -> bool:
    """Return whether the last line of a solution is an answer in the form of the data set."""
    match = re.fullmatch(r"####[ \t]+(\S.*)", solution.rstrip().rpartition("\n")[2].strip())
    return match is not None and parse_number(match[1]) is not None
