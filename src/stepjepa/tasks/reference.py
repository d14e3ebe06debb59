"""Score answers by the rules of the published LLM-JEPA evaluation, beside those of a task."""

import re
from collections.abc import Sequence

from stepjepa.data.record import Record
from stepjepa.tasks.base import WRONG, Response, Scored, Task


def with_published_rules(task: Task) -> Task:
    """Return the task with the verdict of the published LLM-JEPA evaluation as headline, beside the task's own scores.

    ``reference`` is the verdict of the script, mistakes included; ``reference_prefix`` that of its ``startswith``: for
    every task, the answer begins with the truth. Not reproduced: the script cuts prompts, runs queries in a shell that
    may write, reads a code fence as SQL, and prints the output of statements in front of one that fails.
    """

    class Reference(type(task)):  # type: ignore[misc]
        name = f"{task.name}-reference"
        headline = "reference"
        secondary_score = beginning = "reference_prefix"
        __module__ = type(task).__module__

        def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
            scores = super().score_all(records, responses)
            return [_published_first(task.name, *scored) for scored in zip(records, responses, scores, strict=True)]

    reference: Task = Reference.from_options(task.options)
    return reference


def _published_first(name: str, record: Record, response: Response, scored: Scored) -> Scored:
    """Return scores with the verdict of the published evaluation in front."""
    answer = response.text.strip().removesuffix("<|end|>").strip()
    if name == "hellaswag" and response.likelihoods is not None:
        answer = scored.extracted["answer"] or ""
    match name:
        case "nq-open":
            # So an empty answer is right, and so is "a".
            verdict = any(part in record.answer for part in answer.split("; "))
        case "gsm8k":
            # Nothing marked equals nothing marked. Without MULTILINE, the marked line must be the last one.
            marked, gold = (re.search(r"\n#### (.+)$", text) for text in (answer, record.answer))
            verdict = (marked and marked[1]) == (gold and gold[1])
        case "spider":
            # What the sqlite3 shell prints: a query that fails prints nothing, as one that finds nothing.
            # A thought in front of a query makes a statement that fails.
            printed = scored.extracted["answer_output"] if response.content == response.text else None
            verdict = scored.extracted["truth_output"] == printed
        case _:
            verdict = answer == record.answer
    scores = {"reference": verdict, "reference_prefix": answer.startswith(record.answer), **scored.scores}
    return Scored(scores, scored.extracted, None if verdict else scored.error or WRONG)
