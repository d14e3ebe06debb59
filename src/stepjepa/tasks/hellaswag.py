"""HellaSwag: which of four endings goes on with a text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.answers.legible import opening
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.tasks.base import (
    NO_ANSWER,
    WRONG,
    Continuation,
    Likelihood,
    Response,
    Scored,
    Task,
    Unusable,
    chat_record,
)
from stepjepa.tasks.cells import as_label, as_list

SYSTEM_PROMPT = "Which one of A), B), C), or D) is the best ending for the context? Answer A, B, C, or D."
LETTERS = "ABCD"

_ENDING = "ending_"


class Choices(NamedTuple):
    """What is asked.

    Attributes:
        context: the text to go on with.
        endings: four texts, A to D.
    """

    context: str
    endings: tuple[str, ...]


def read_choices(record: Record) -> Choices:
    """Context and endings of a user message: the context, then lines that begin ``A) `` to ``D) ``.

    Where such a beginning stands several times, the last one that leaves room for the others counts, so that a
    context may have lines like ``A) `` of its own. A record with a ``text`` view says itself where its context ends.

    Raises:
        UserError: there are no four endings, or one of them or the context is empty.
    """
    message = record.messages[-2]["content"]
    known = record.text if record.text is not None and message.startswith(f"{record.text}\nA) ") else None
    endings: list[str] = []
    end = len(message)
    for letter in reversed(LETTERS):
        mark = f"\n{letter}) "
        start = len(known) if known is not None and letter == "A" else message.rfind(mark, 0, end)
        ending = message[start + len(mark) : end].strip()
        if start < 0 or not ending:
            raise UserError(
                f"the user message has no ending '{letter}) ...'; expected the context and then four lines that begin "
                "'A) ' to 'D) '",
                path=record.path,
                line=record.line,
            )
        endings.insert(0, ending)
        end = start
    if not message[:end].strip():
        raise UserError("the user message has no context before 'A) '; add it", path=record.path, line=record.line)
    return Choices(message[:end], tuple(endings))


# A letter that stands as an answer: alone, set off by a bracket or a stop, or followed by a reason; and not followed by
# another letter of the kind ("A or B", "A, B", "A) B)").
_OPEN, _CLOSE, _ALONE = r"[\s(\[\"'*]*", r"[)\]\"'*]*", r"(?=[)\].,:]|\s*$)"
_LETTER = (
    rf"{_OPEN}(?P<letter>[A-Da-d])(?![\w'])"
    r"(?=\s*$|[)\]\"'*.:,;!]|\s+(?i:because|since|as)\b|\s+(?i:is\s+(?:the\s+)?(?:best|correct|right|most))\b)"
    rf"(?!{_CLOSE}[.,;:]?\s*(?:(?:(?i:or|and)\b|[/&,]){_OPEN}(?:[A-D](?![\w'])|[a-d]{_ALONE})|{_OPEN}[A-Da-d]{_ALONE}))"
)
_FIRST = re.compile(_LETTER)
_STATED = re.compile(rf"\b(?i:answer|ending|option|choice|choose|pick|select)(?i:\s+is)?\s*:?{_LETTER}")
_BROKEN_LINE = re.compile(r":[^\S\n]*\n\s*")


def read_letter(text: str, endings: Sequence[str]) -> str | None:
    """The letter that an answer in words means, or None for no letter or several.

    Read are: an ending copied as it is, with or without its letter; letters that a phrase announces (``The answer
    is B``, ``option (b)``), all announced ones being the same; a letter that is all there is in the first line, however
    often and in whatever brackets; else a letter with which the first line begins (``B``,
    ``(B)``, ``b) because ...``). Two letters side by side (``A or B``), a letter with another letter's ending, and
    what comes after the first line (the model ran on) count for nothing.

    Args:
        text: what the model said.
        endings: A to D.
    """
    copied = _copied(text, endings)
    if copied:
        return copied
    line = _BROKEN_LINE.sub(": ", opening(text)).partition("\n")[0]
    words = set(re.findall(r"\w+", line.upper()))
    if len(words) == 1 and words < set(LETTERS) and "?" not in line:
        return words.pop()
    first = _FIRST.match(line)
    matches = list(_STATED.finditer(line)) or ([first] if first else [])
    letters = {match["letter"].upper() for match in matches}
    if len(letters) != 1:
        return None
    behind = _copied(line[matches[-1].end() :].lstrip(")]\"'*.:,; "), endings)
    return letters.pop() if behind is None or behind in letters else None


def _copied(text: str, endings: Sequence[str]) -> str | None:
    """The letter of the one ending that a text is."""
    plain = _plain(text)
    same = [letter for letter, ending in zip(LETTERS, endings, strict=True) if plain and _plain(ending) == plain]
    return same[0] if len(same) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


class HellaswagTask(Task):
    """The truth is a letter, A to D.

    Scores: ``correct``, the letter that the model finds most probable as the first of its answer is the true one;
    ``ending_correct``, the ending most probable per character behind the bare context is the true one
    (lm-evaluation-harness calls that acc_norm; it rewrites the ``[header]`` marks of the contexts, which are left as
    they are here, as in the published files); ``said_correct``, the letter read from what the model said,
    see :func:`read_letter`. The prompt is never cut. Without likelihoods, as for answers of another program,
    ``correct`` is ``said_correct`` and there is no ``ending_correct``. Of equally probable letters or endings the
    first counts; a probability that is not a number is none.
    """

    name = "hellaswag"
    headline = "correct"
    lenient = "said_correct"

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """The record has the system prompt of the published files, or its file is called ``hellaswag...``."""
        return record.messages[0] == {"role": "system", "content": SYSTEM_PROMPT} or Path(
            record.path
        ).name.lower().startswith("hellaswag")

    def truth(self, record: Record) -> str:
        """The true letter.

        Raises:
            UserError: the assistant message is none, or the user message has no four endings.
        """
        read_choices(record)
        letter = record.answer.strip()
        if letter not in tuple(LETTERS):
            raise UserError(
                f"the assistant message is {record.answer[:40]!r}, expected A, B, C or D",
                path=record.path,
                line=record.line,
            )
        return letter

    def continuations(self, record: Record) -> list[Continuation]:
        """The letters after the record's own prompt, and ``ending_A`` to ``ending_D`` after the bare context."""
        context, endings = read_choices(record)
        return [Continuation(letter, letter) for letter in LETTERS] + [
            Continuation(_ENDING + letter, f" {ending}", context)
            for letter, ending in zip(LETTERS, endings, strict=True)
        ]

    def score(self, record: Record, response: Response) -> Scored:
        """Compare the likelihoods, and what was said.

        Raises:
            UserError: as :meth:`truth`.
            ValueError: there are likelihoods, but not all that were asked for.
        """
        truth, endings = self.truth(record), read_choices(record).endings
        said = read_letter(response.text, endings)
        if response.likelihoods is None:
            extracted = {"truth": truth, "answer": said, "said": said}
            scores: dict[str, bool | float] = {"correct": said == truth}
        else:
            likely = _check(response.likelihoods)
            answer = most_likely([likely[letter].log_probability for letter in LETTERS])
            ending = most_likely(
                [
                    likely[_ENDING + letter].log_probability / len(text)
                    for letter, text in zip(LETTERS, endings, strict=True)
                ]
            )
            extracted = {"truth": truth, "answer": answer, "ending": ending, "said": said}
            scores = {"correct": answer == truth, "ending_correct": ending == truth}
        scores["said_correct"] = said == truth
        error = None if scores["correct"] else WRONG if extracted["answer"] else NO_ANSWER
        return Scored(scores, extracted, error)


def _check(likelihoods: Mapping[str, Likelihood]) -> Mapping[str, Likelihood]:
    expected = [*LETTERS, *(_ENDING + letter for letter in LETTERS)]
    missing = [label for label in expected if label not in likelihoods]
    if missing:
        raise ValueError(f"expected likelihoods of {', '.join(expected)}, got none of {', '.join(missing)}")
    return likelihoods


def most_likely(values: Sequence[float]) -> str | None:
    """The letter of the largest of four log-probabilities, the first of equal ones; None where none is possible."""
    usable = [-math.inf if math.isnan(value) else value for value in values]
    best = max(usable)
    return None if best == -math.inf else LETTERS[usable.index(best)]


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the published form, from a row of ``hellaswag`` as it is on the hub.

    Args:
        row: ``ctx`` (or ``ctx_a`` and ``ctx_b``), ``endings``, and ``label`` as a number or a digit.

    Raises:
        Unusable: the context is empty, there are not four endings, or the label is missing, as in the test split.
    """
    context = row.get("ctx")
    if context is None:
        context = " ".join(str(row.get(part) or "").strip() for part in ("ctx_a", "ctx_b"))
    endings = as_list(row.get("endings"))
    label = as_label(row.get("label"))
    if not isinstance(context, str) or not context.strip():
        raise Unusable("no context")
    if endings is None or len(endings) != len(LETTERS):
        raise Unusable("not four endings")
    endings = [" ".join(ending.split()) if isinstance(ending, str) else "" for ending in endings]
    if not all(endings):
        raise Unusable("an empty ending")
    if label is None:
        raise Unusable("no label")
    if label not in ("0", "1", "2", "3"):
        raise Unusable("the label is none of 0 to 3")
    context, number = context.strip(), int(label)
    listed = "".join(f"\n{letter}) {ending}" for letter, ending in zip(LETTERS, endings, strict=True))
    return chat_record(
        SYSTEM_PROMPT,
        context + listed,
        LETTERS[number],
        text=[{"role": "user", "content": context}],
        code=[{"role": "assistant", "content": endings[number]}],
    )
