"""The rules of the published LLM-JEPA evaluation, for whoever must compare with a published figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepjepa.data.records import Record
from stepjepa.tasks.base import WRONG, Continuation, Response, Scored, Task
from stepjepa.tasks.hellaswag import LETTERS, most_likely

REFERENCE = "reference"
REFERENCE_PREFIX = "reference_prefix"

# Without MULTILINE: the marked line must be the last one.
_HASHES = re.compile(r"\n#### (.+)$")
_END = "<|end|>"


class ReferenceTask(Task):
    """A task with the published verdict put first, and its own scores beside it.

    ``reference`` follows the script where it is right and where it is not:

    ===========  ======================================================================================================
    nq-open      a part of the answer, split at ``; ``, stands somewhere in the truth, letter by letter; so an empty
                 answer is right, and so is ``a``
    gsm8k        the rest of the last line ``#### ...`` equals the truth's; without such a line both are None, and equal
    spider       what the ``sqlite3`` shell prints for both queries is equal, the order of the rows included; a query
                 that fails prints nothing and equals one that finds nothing
    hellaswag    the most probable of A to D as the next token is the truth; without likelihoods as all others
    all others   the answer equals the truth
    ===========  ======================================================================================================

    ``reference_prefix`` is its ``--startswith``: for every task, the answer begins with the truth.

    Two things are not reproduced: the published script cuts prompts (HellaSwag's to 128 tokens), here none is cut; and
    queries are run read-only and within limits, by the Spider task, not by a shell that may write.

    Args:
        task: the task to score with beside it. It is closed together with this one.
    """

    headline = REFERENCE
    lenient = REFERENCE_PREFIX
    beginning = REFERENCE_PREFIX

    def __init__(self, task: Task) -> None:
        self.task = task
        # The same class stands for many tasks; results of one must not be taken for those of another.
        self.name = f"{task.name}-{REFERENCE}"  # type: ignore[misc]
        self.takes = task.takes  # type: ignore[misc]

    def left_out(self, record: Record) -> str | None:
        return self.task.left_out(record)

    def truth(self, record: Record) -> str:
        return self.task.truth(record)

    def continuations(self, record: Record) -> Sequence[Continuation]:
        return self.task.continuations(record)

    def vote(self, scored: Scored, response: Response) -> str | None:
        return self.task.vote(scored, response)

    def details(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.task.details(lines)

    def close(self) -> None:
        self.task.close()

    def score(self, record: Record, response: Response) -> Scored:
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        own = self.task.score_all(records, responses)
        return [self._put_first(*each) for each in zip(records, responses, own, strict=True)]

    def _put_first(self, record: Record, response: Response, own: Scored) -> Scored:
        said = response.text.strip().removesuffix(_END).strip()
        if self.task.name == "hellaswag" and response.likelihoods is not None:
            said = most_likely([response.likelihoods[letter].log_probability for letter in LETTERS]) or ""
        match self.task.name:
            case "nq-open":
                verdict = any(part in record.answer for part in said.split("; "))
            case "gsm8k":
                verdict = _marked(said) == _marked(record.answer)
            case "spider":
                verdict = own.extracted["truth_output"] == own.extracted["answer_output"]
            case _:
                verdict = said == record.answer
        scores = {REFERENCE: verdict, REFERENCE_PREFIX: said.startswith(record.answer), **own.scores}
        return Scored(scores, own.extracted, None if verdict else own.error or WRONG)


def _marked(text: str) -> str | None:
    found = _HASHES.search(text)
    return found[1] if found else None
