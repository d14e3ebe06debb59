"""NQ-Open: short answers to questions that people asked a search engine, each with one right answer or several."""

from __future__ import annotations

import operator
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stepjepa.data.records import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, task
from stepjepa.tasks.raw_values import Unusable, as_list, chat_record, read_text_field

_SEPARATOR = ";"
_ARTICLES = frozenset({"a", "an", "the"})

# Accents, and what nobody sees: soft hyphens, zero-width spaces, marks of direction.
_IGNORED = re.compile("[\u0300-\u036f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_SAME = str.maketrans(dict.fromkeys("‐‑‒–—―−", "-") | dict.fromkeys("‘’ʼ", "'") | {"⁄": "/", "°": " "})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BARE_FRACTION = re.compile(r"(?<!\w)\.(?=\d)")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:[^\w\s.;]|[^\w\s;]{2,})(?=\d)")
# A decimal point and a minus sign belong to their number; currencies that stand beside the dollar stay.
_PUNCTUATION = re.compile(
    # "C++" and "C#" are two things, "A+" is better than "A".
    r"(?<!\d)\.|\.(?!\d)|(?<=\S)-|-(?!\d)|(?!(?:(?<=[^\W\d_])[#+]|(?<=[^\W\d_]\+)\+)(?!\w))"
    r"[!-,/:<-@\[-`{-~¡§«¶·»¿\u2010-\u2027\u2030-\u205e\u3001-\u3003\u3008-\u3011]"
)
_INITIALS = re.compile(r"(?<!\S)([^\W\d_]) (?=[^\W\d_](?!\S))")


class NormalForms(NamedTuple):
    """A text as it is compared; texts are equal if one of the forms is.

    Attributes:
        joined: punctuation left out, as the scripts of SQuAD and NQ-Open do: ``T-Bone`` becomes ``tbone``.
        parted: punctuation parts words, and ``&`` is ``and``: ``t bone``.
    """

    joined: str
    parted: str


def normal_forms(text: str) -> NormalForms:
    """What is compared of an answer, or of several with ``;`` between them, which stays as a word.

    As in SQuAD: lower case, no articles, no punctuation, single spaces. Unlike there, a decimal point, a minus sign and
    what separates two numbers count (``1.5`` is not ``15``), commas that group digits don't; an article counts where no
    word follows it (``vitamin A``); accents, compatibility forms of Unicode, invisible characters and the spacing of
    initials (``B. F. Skinner``) don't. A text of nothing but punctuation stands for itself.
    """
    text = _decomposed(text).casefold()
    text = _IGNORED.sub("", text).translate(_SAME)
    words = _without_articles(text.replace(_SEPARATOR, f" {_SEPARATOR} ").split())
    cleaned = _THOUSANDS.sub("", " ".join(words))
    cleaned = _BETWEEN_DIGITS.sub(" ", _BARE_FRACTION.sub("0.", cleaned))
    bare = _PUNCTUATION.sub("", cleaned), _PUNCTUATION.sub(" ", cleaned.replace("&", " and "))
    joined, parted = (_INITIALS.sub(r"\1", " ".join(form.split())) for form in bare)
    if not joined.replace(_SEPARATOR, "").strip():
        return NormalForms(cleaned, cleaned)
    return NormalForms(joined, parted)


def _decomposed(text: str) -> str:
    # In pieces: sorting the marks of one run takes the square of their number.
    piece = 256
    return "".join(unicodedata.normalize("NFKD", text[at : at + piece]) for at in range(0, len(text), piece))


def _without_articles(words: list[str]) -> list[str]:
    kept: list[str] = []
    for word in reversed(words):
        if word.lstrip("\"'(“") in _ARTICLES and kept and kept[-1] not in _ARTICLES and kept[-1][0] not in ";&/+-":
            continue
        kept.append(word)
    return kept[::-1]


def _parts(form: str) -> list[str]:
    return [part.strip() for part in form.split(_SEPARATOR)]


def _repaired(text: str) -> str:
    """Text whose UTF-8 was once read as Latin-1, as in some published answers (``MÃ¡ire``), put right."""
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


@task("nq-open")
class NqOpenTask(Task):
    """The truth lists the answers that count, with ``;`` between them: the aliases.

    Scores, all on :func:`normal_forms`: ``exact`` (the answer is an alias, or a list of aliases), ``prefix`` (it begins
    with one), ``contains`` (an alias stands somewhere in it, as whole words). Meaning is not judged: ``9`` is not
    ``Nine``, and ``not Amma`` contains ``Amma``.

    The headline is ``exact``, NQ-Open's own metric since Lee et al. (2019). The LLM-JEPA paper describes ``contains``,
    which favours a model that says much; its script does something else (``--scoring reference``).
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
        parts = [pair for pair in zip(_parts(said.joined), _parts(said.parted), strict=True) if any(pair)]
        first = parts[0] if parts else ("", "")

        def any_alias(fits: Callable[[str, str], bool], answer: tuple[str, str]) -> bool:
            return any(fits(*pair) for alias in aliases for pair in zip(alias, answer, strict=True))

        scores: dict[str, bool | float] = {
            "exact": bool(parts) and all(any_alias(operator.eq, part) for part in parts),
            "prefix": any_alias(lambda alias, text: f"{text} ".startswith(f"{alias} "), first),
            "contains": any_alias(lambda alias, text: f" {alias} " in f" {text} ", said),
        }
        says_something = any(word not in _ARTICLES and any(map(str.isalnum, word)) for word in said.joined.split())
        answer = "; ".join(part for part, _ in parts) if scores["exact"] or says_something else None
        error = None if scores["exact"] else WRONG if answer else NO_ANSWER
        return Scored(scores, {"truth": "; ".join(alias.joined for alias in aliases), "answer": answer}, error)

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
        listed = as_list(answer)
        given = [answer] if listed is None else listed
        texts = [text.strip() for text in given if isinstance(text, str) and text.strip(f"{_SEPARATOR} ")]
        if not texts:
            raise Unusable("no answer")
        return chat_record(cls.system_prompt, question, "; ".join(dict.fromkeys(texts)))
