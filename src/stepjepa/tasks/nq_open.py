"""NQ-Open: short answers to questions that people asked a search engine, each with one right answer or several."""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from stepjepa.data.records import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, task
from stepjepa.tasks.raw_values import Unusable, as_list, chat_record, read_text_field

_SAME = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-") | dict.fromkeys("‘’ʼ", "'") | {"⁄": "/", "°": " "})
_REPLACEMENTS = (
    # An article counts where no word follows it: "vitamin A".
    (r"(?<!\S)[\"'(“]*(?:an?|the)\s+(?=[^\s;&/+-])", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"(?<!\w)\.(?=\d)", "0."),
    # "10-20" are two numbers.
    (r"(?<=\d)(?:[^\w\s.;]|[^\w\s;]{2,})(?=\d)", " "),
)
# A decimal point and a minus sign belong to their number, "C++" and "C#" are two things, "A+" is better than "A";
# currencies other than the dollar stay.
_PUNCTUATION = re.compile(
    r"(?<!\d)\.|\.(?!\d)|(?<=\S)-|-(?!\d)|[#+](?=\w)|(?<![^\W\d_])(?<![^\W\d_]\+)[#+]|[^\w\s;.£€¥₹#+-]|_"
)
_INITIALS = re.compile(r"(?<!\S)([^\W\d_]) (?=[^\W\d_](?!\S))")


def normal_forms(text: str) -> tuple[str, str]:
    """A text as it is compared; texts are equal if one of the two forms is.

    As in SQuAD: lower case, no articles, no punctuation, single spaces. Unlike there, a decimal point, a minus sign and
    what separates two numbers count (``1.5`` is not ``15``), commas that group digits don't; accents, compatibility
    forms of Unicode, invisible characters and the spacing of initials (``B. F. Skinner``) don't. In the first form
    punctuation is left out (``T-Bone`` becomes ``tbone``), in the second it parts words, and ``&`` is ``and``. Nothing
    but punctuation stands for itself; ``;``, which stands between several answers, stays as a word.
    """
    if not text.isascii():
        # One by one, which drops marks before they are sorted: that takes the square of their number.
        parts = (part for character in text for part in unicodedata.normalize("NFKD", character))
        text = "".join(part for part in parts if unicodedata.category(part) not in ("Mn", "Cf"))
    cleaned = " ".join(text.casefold().translate(_SAME).replace(";", " ; ").split())
    for pattern, replacement in _REPLACEMENTS:
        cleaned = re.sub(pattern, replacement, cleaned)
    bare = _PUNCTUATION.sub("", cleaned), _PUNCTUATION.sub(" ", cleaned.replace("&", " and "))
    joined, parted = (_INITIALS.sub(r"\1", " ".join(form.split())) for form in bare)
    return (joined, parted) if joined.strip("; ") else (cleaned, cleaned)


def _parts(form: str) -> list[str]:
    return [part.strip() for part in form.split(";")]


def _repaired(text: str) -> str:
    """Text whose UTF-8 was once read as Latin-1, as in some published answers (``MÃ¡ire``), put right."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


@task("nq-open")
class NqOpenTask(Task):
    """The truth lists the answers that count, with ``;`` between them: the aliases.

    On :func:`normal_forms` an answer is an alias, or a list of them (``exact``), begins with one (``prefix``), or has
    one in it as whole words (``contains``). Meaning is not judged: ``not Amma`` contains ``Amma``.
    """

    headline = "exact"
    lenient = "contains"
    system_prompt = "Answer the question below."
    file_names = ("nq_open",)

    def truth(self, record: Record) -> str:
        self._aliases(record)
        return record.answer

    def score(self, record: Record, response: Response) -> Scored:
        aliases = [normal_forms(alias) for alias in self._aliases(record)]
        said = normal_forms(response.text)
        parts = [pair for pair in zip(*map(_parts, said), strict=True) if any(pair)]

        def any_alias(fits: Callable[[str, str], bool], answer: tuple[str, ...]) -> bool:
            return any(fits(*pair) for alias in aliases for pair in zip(alias, answer, strict=True))

        scores: dict[str, bool | float] = {
            "exact": bool(parts) and all(any_alias(operator.eq, part) for part in parts),
            "prefix": bool(parts) and any_alias(lambda alias, text: f"{text} ".startswith(f"{alias} "), parts[0]),
            "contains": any_alias(lambda alias, text: f" {alias} " in f" {text} ", said),
        }
        says_something = any(word not in ("a", "an", "the") and re.search(r"\w", word) for word in said[0].split())
        answer = "; ".join(part for part, _ in parts) if scores["exact"] or says_something else None
        error = None if scores["exact"] else WRONG if answer else NO_ANSWER
        return Scored(scores, {"truth": "; ".join(joined for joined, _ in aliases), "answer": answer}, error)

    def _aliases(self, record: Record) -> list[str]:
        aliases = [part for part in _parts(record.answer) if part]
        if not aliases:
            told = "the assistant message has no answer in it; put the answers that count there, '; ' between them"
            raise record_error(record, told)
        return list(dict.fromkeys(reading for alias in aliases for reading in (alias, _repaired(alias))))

    @classmethod
    def convert(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        """A record in the published form, from a row of the hub: ``question``, and ``answer``, a list or one string."""
        question, answer = read_text_field(row, "question").strip(), row.get("answer")
        given = as_list(answer) or [answer]
        texts = [text.strip() for text in given if isinstance(text, str) and text.strip("; ")]
        if not texts:
            raise Unusable("no answer")
        return chat_record(cls.system_prompt, question, "; ".join(dict.fromkeys(texts)))
