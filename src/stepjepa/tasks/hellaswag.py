"""HellaSwag: which of four endings continues a text."""

import math
import re
from collections.abc import Mapping, Sequence

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.answers import answer_start
from stepjepa.tasks.base import NO_ANSWER, WRONG, Continuation, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.raw_values import Unusable, as_list, chat_record, read_label_field, read_text_field

LETTERS = "ABCD"


def read_choices(record: Record) -> tuple[str, tuple[str, ...]]:
    """Read context and four endings from a user message: the context, then lines that begin ``A) `` to ``D) ``.

    If such a beginning occurs several times, the last one that leaves room for the others counts.
    """
    context, endings = record.messages[-2]["content"], []
    for letter in reversed(LETTERS):
        context, mark, ending = context.rpartition(f"\n{letter}) ")
        endings.append(ending.strip() if mark else "")
    if not all(endings) or not context.strip():
        raise record_error(record, "the message lacks a context or four endings on lines that begin 'A) ' to 'D) '")
    return context, tuple(reversed(endings))


# A letter as an answer: before a bracket or punctuation, last in its line, or followed by a reason.
_LETTER = re.compile(r"(?<![\w'])([A-Da-d])(?=[)\]\"'`*.,:;!]|\s*$|\s+(?i:because|since|as)\b)(?!'\w)")
_CAPITAL = re.compile(r"(?<![\w'])(?:[B-D](?![\w'])|A(?=\s+(?:or|and)\b))")


def read_letter(text: str) -> str | None:
    """Return the letter that the first line of an answer names; None for no letter or several.

    It must be given as an answer: ``The answer is B``, ``(b) because ...``. ``A or B`` counts for nothing.
    """
    line = answer_start(re.sub(r":[^\S\n]*\n\s*", ": ", text))
    letters = {letter.upper() for letter in _LETTER.findall(line)}
    return letters.pop() if len(letters) == 1 and letters.issuperset(_CAPITAL.findall(line)) else None


class HellaswagTask(Task):
    """The truth is a letter, A to D; ``correct`` is by the letter that is most probable as the answer.

    ``ending_correct`` is by the ending most probable per character after the bare context, ``said_correct`` by
    :func:`read_letter`. Without likelihoods, as for external predictions, ``correct`` is ``said_correct``.
    """

    name = "hellaswag"
    headline = "correct"
    secondary_score = "said_correct"
    system_prompt = "Which one of A), B), C), or D) is the best ending for the context? Answer A, B, C, or D."
    file_names = ("hellaswag",)

    def truth(self, record: Record) -> str:
        read_choices(record)
        letter = right_answer(record).strip()
        if letter not in tuple(LETTERS):
            raise record_error(record, f"the assistant message is {record.answer[:40]!r}, expected A, B, C or D")
        return letter

    def continuations(self, record: Record) -> list[Continuation]:
        """Return the letters after the record's own prompt, and ``ending_A`` to ``ending_D`` after the bare context."""
        context, endings = read_choices(record)
        return [Continuation(letter, letter) for letter in LETTERS] + [
            Continuation(f"ending_{letter}", f" {ending}", context)
            for letter, ending in zip(LETTERS, endings, strict=True)
        ]

    def score(self, record: Record, response: Response) -> Scored:
        truth, endings = self.truth(record), read_choices(record)[1]
        letter = read_letter(response.content)
        extracted: dict[str, str | None] = {"truth": truth, "answer": letter, "said": letter}
        scores: dict[str, bool | float] = {"correct": letter == truth}
        if response.likelihoods is not None:
            values = {label: likelihood.log_probability for label, likelihood in response.likelihoods.items()}
            answer = _most_likely([values[name] for name in LETTERS])
            pairs = zip(LETTERS, endings, strict=True)
            ending = _most_likely([values[f"ending_{name}"] / len(text) for name, text in pairs])
            extracted = {"truth": truth, "answer": answer, "ending": ending, "said": letter}
            scores = {"correct": answer == truth, "ending_correct": ending == truth}
        scores["said_correct"] = letter == truth
        error = None if scores["correct"] else WRONG if extracted["answer"] else NO_ANSWER
        return Scored(scores, extracted, error)

    @classmethod
    def convert(cls, row: Mapping[str, object]) -> JsonObject:
        """Convert a row (``ctx``, ``endings``, ``label``) to a record in the published form.

        Raises:
            Unusable: a field is missing, or there are not four endings.
        """
        context = read_text_field(row, "ctx").strip()
        endings = [" ".join(str(ending).split()) for ending in as_list(row.get("endings")) or []]
        if len(endings) != len(LETTERS) or not all(endings):
            raise Unusable("not four endings")
        number = read_label_field(row, len(LETTERS))
        return chat_record(
            cls.system_prompt,
            context + "".join(f"\n{letter}) {ending}" for letter, ending in zip(LETTERS, endings, strict=True)),
            LETTERS[number],
            text=[{"role": "user", "content": context}],
            code=[{"role": "assistant", "content": endings[number]}],
        )


def _most_likely(values: Sequence[float]) -> str | None:
    """Return the letter of the largest of four log-probabilities, the first of equal ones; None if none is finite."""
    # NaN is left out, too.
    possible = {letter: value for letter, value in zip(LETTERS, values, strict=True) if value > -math.inf}
    return max(possible, key=possible.__getitem__, default=None)
