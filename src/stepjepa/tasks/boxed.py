r"""Answers of mathematics that a solution marks: ``\boxed{...}`` or ``#### ...``."""

from __future__ import annotations

from stepjepa.answers.scoring import canonical, marked_answers, parse_number, same_answer, text_scores
from stepjepa.data.records import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, task

FIELD = "ground_truth"


@task("boxed")
class BoxedTask(Task):
    r"""The truth is the field ``ground_truth`` where a record has one, else what the assistant message marks.

    Scores: ``correct`` (the last marked answer is right), ``first_correct`` (the first one is, perhaps the model ran
    on to others), ``answered`` (there is a marked answer), and ``exact``, ``prefix``, ``contains`` of the whole text
    against the record's solution. An answer that is not marked is wrong.
    """

    headline = "correct"
    lenient = "first_correct"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        r"""The truth holds ``\boxed{...}`` or ``#### ...``, or the field ``ground_truth`` is a number."""
        given = _ground_truth(record)
        if given is not None and (marked_answers(given) or parse_number(given) is not None):
            return True
        return bool(marked_answers(record.answer))

    def truth(self, record: Record) -> str:
        given = _ground_truth(record)
        marked = marked_answers(record.answer if given is None else given)
        if given is None and not marked:
            raise record_error(
                record,
                rf"no answer to compare with: the assistant message has neither \boxed{{...}} nor a line '#### ...', "
                f"and there is no field '{FIELD}'; add one of them or pass --task generic",
            )
        return marked[-1] if marked else str(given)

    def marked(self, text: str) -> list[str]:
        """The answers that a response marks, in order."""
        return marked_answers(text)

    def score(self, record: Record, response: Response) -> Scored:
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


def _ground_truth(record: Record) -> str | None:
    """The field ``ground_truth`` as text; None where it is absent or null."""
    value = record.extra.get(FIELD)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise record_error(record, f"'{FIELD}' is {type(value).__name__}, expected a string or a number")
    if not str(value).strip():
        told = f"'{FIELD}' is empty; fill it or remove the field, and the answer is read from the assistant message"
        raise record_error(record, told)
    return str(value)
