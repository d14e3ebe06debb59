r"""Tasks of no data set in particular: answers compared as text, and answers that a solution marks."""

from __future__ import annotations

from stepjepa.data.records import Record
from stepjepa.tasks.answers import canonical, marked_answers, parse_number, same_answer, text_scores
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, task

GROUND_TRUTH = "ground_truth"


@task("generic")
class GenericTask(Task):
    """The truth is the last assistant message; the answer is all that the model said.

    Scores: ``exact``, ``prefix`` (the truth comes first, perhaps the model ran on), ``contains``.
    """

    headline = "exact"
    lenient = "prefix"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        return True

    def truth(self, record: Record) -> str:
        return record.answer

    def score(self, record: Record, response: Response) -> Scored:
        scores = text_scores(response.text, record.answer)
        error = None if scores["exact"] else WRONG if response.text.strip() else NO_ANSWER
        return Scored(scores, error=error)


@task("boxed")
class BoxedTask(Task):
    r"""The truth is the field ``ground_truth`` where a record has one, else what the assistant message marks.

    Answers are marked by ``\boxed{...}`` or ``#### ...``; one that is not marked is wrong. Scores: ``correct`` (the
    last marked answer is right), ``first_correct`` (the first one is, perhaps the model ran on to others), ``answered``
    (there is a marked answer), and ``exact``, ``prefix``, ``contains`` of the whole text against the record's solution.
    """

    headline = "correct"
    lenient = "first_correct"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """The truth is marked, or the field ``ground_truth`` is a number."""
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
                f"and there is no field '{GROUND_TRUTH}'; add one of them or pass --task generic",
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
    value = record.extra.get(GROUND_TRUTH)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise record_error(record, f"'{GROUND_TRUTH}' is {type(value).__name__}, expected a string or a number")
    if not str(value).strip():
        raise record_error(record, f"'{GROUND_TRUTH}' is empty; fill it or remove the field")
    return str(value)
