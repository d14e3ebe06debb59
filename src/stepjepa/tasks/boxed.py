r"""Answers of mathematics that a solution marks: ``\boxed{...}`` or ``#### ...``."""

from __future__ import annotations

from stepjepa.answers.scoring import canonical, marked_answers, parse_number, same_answer, text_scores
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task
from stepjepa.tasks.stepmath import SYSTEM_PROMPT

FIELD = "ground_truth"


class BoxedTask(Task):
    r"""The truth is the field ``ground_truth`` where a record has one, else what the assistant message marks.

    Scores: ``correct`` (the last marked answer is right), ``first_correct`` (the first one is, perhaps the model ran
    on to others), ``answered`` (there is a marked answer at all), and ``exact``, ``prefix``, ``contains`` of the whole
    text against the record's solution. An answer that is not marked is wrong; numbers elsewhere in the text are not
    guessed at.
    """

    name = "boxed"
    headline = "correct"
    lenient = "first_correct"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        r"""The truth holds ``\boxed{...}`` or ``#### ...``, or the field ``ground_truth`` is a number."""
        given = _given(record)
        if given is not None and (marked_answers(given) or parse_number(given) is not None):
            return True
        return bool(marked_answers(record.answer))

    def truth(self, record: Record) -> str:
        """The right answer.

        Raises:
            UserError: there is none, or ``ground_truth`` is neither a string nor a number.
        """
        given = _given(record)
        if given is not None:
            return (marked_answers(given) or [given])[-1]
        marked = marked_answers(record.answer)
        if not marked:
            raise UserError(
                rf"no answer to compare with: the assistant message has neither \boxed{{...}} nor a line '#### ...', "
                f"and there is no field '{FIELD}'; add one of them or pass --task generic",
                path=record.path,
                line=record.line,
            )
        return marked[-1]

    def marked(self, text: str) -> list[str]:
        """The answers that a response marks, in order."""
        return marked_answers(text)

    def score(self, record: Record, response: Response) -> Scored:
        """Compare the marked answers with the truth."""
        truth = self.truth(record)
        marked = self.marked(response.text)
        first, last = (marked[0], marked[-1]) if marked else (None, None)
        scores: dict[str, bool | float] = {
            "correct": last is not None and same_answer(last, truth),
            "first_correct": first is not None and same_answer(first, truth),
            "answered": last is not None,
            **text_scores(response.text, record.answer),
        }
        error = None if scores["correct"] else WRONG if marked else NO_ANSWER
        return Scored(scores, {"truth": truth, "answer": last, "first_answer": first}, error)

    def vote(self, scored: Scored, response: Response) -> str | None:
        """The marked answer; ``18`` and ``$18.00`` are one vote."""
        answer = scored.extracted["answer"]
        return None if answer is None else canonical(answer)


class StepmathTask(BoxedTask):
    """The problems of ``stepjepa prepare stepmath``: as ``boxed``, known by their system prompt."""

    name = "stepmath"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """The record carries the generator's system prompt."""
        first = record.messages[0]
        return first["role"] == "system" and first["content"] == SYSTEM_PROMPT


def _given(record: Record) -> str | None:
    """The field ``ground_truth`` as text; None where it is absent or null."""
    value = record.extra.get(FIELD)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(
            f"'{FIELD}' is {type(value).__name__}, expected a string or a number", path=record.path, line=record.line
        )
    if not str(value).strip():
        raise UserError(
            f"'{FIELD}' is empty; fill it or remove the field, and the answer is read from the assistant message",
            path=record.path,
            line=record.line,
        )
    return str(value)
