"""NQ-Open: short answers to questions that people asked a search engine, each with one right answer or several."""

import re
import unicodedata
from collections.abc import Mapping

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.raw_values import Unusable, as_list, chat_record, read_text_field

_REPLACEMENTS = (
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    # "10-20" are two numbers.
    (r"(?<=\d)[^\w\s.;]+(?=\d)", " "),
    (r"&(?=\s)", "and"),
    # A decimal point and a minus sign belong to their number, "C++" and "C#" are two things, currencies stay.
    (r"(?<!\d)\.|\.(?!\d)|(?<=\S)-|-(?!\d)|[#+](?=\w)|(?<![^\W\d_])(?<![^\W\d_]\+)[#+]|[^\w\s.;£€¥₹#+-]|_", ""),
    # An article counts where no word follows it: "vitamin A".
    (r"(?<!\S)(?:an?|the)\s+(?=[^\s;])", ""),
    (r"(?<!\S)([^\W\d_])\s+(?=[^\W\d_](?!\S))", r"\1"),
)


def normal_form(text: str) -> str:
    """Normalise a text for comparison, as SQuAD does: lower case, no articles, no punctuation, single spaces.

    Unlike SQuAD, a decimal point, a minus sign and a separator of two numbers count (``1.5`` is not ``15``). Commas
    that group digits, accents, compatibility forms of Unicode, invisible characters and the spacing of initials
    (``B. F. Skinner``) don't. ``;``, which separates answers, stays as a word. Pure punctuation stays unchanged.
    """
    if not text.isascii():
        # Character by character: marks are dropped before they are sorted, which takes quadratic time.
        parts = (part for character in text.replace("−", "-") for part in unicodedata.normalize("NFKD", character))
        text = "".join(part for part in parts if unicodedata.category(part) not in ("Mn", "Cf"))
    form = text = " ".join(text.casefold().replace(";", " ; ").split())
    for pattern, replacement in _REPLACEMENTS:
        form = re.sub(pattern, replacement, form)
    return " ".join(form.split()) if form.strip("; ") else text


def _forms(text: str) -> list[str]:
    """Return the normal forms with hyphens removed and with hyphens as spaces: ``tbone``, ``t bone``."""
    return [normal_form(text), normal_form(re.sub(r"(?<=[^\W\d])[-‐‑–](?=\w)|(?<=\w)[-‐‑–](?=[^\W\d])", " ", text))]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


class NqOpenTask(Task):
    """The truth lists the accepted answers, separated by ``;``: the aliases.

    In :func:`normal_form` an answer is an alias, or a list of them (``exact``), begins with one (``prefix``), or has
    one in it as whole words (``contains``). Meaning is not judged: ``not Amma`` contains ``Amma``.
    """

    name = "nq-open"
    headline = "exact"
    secondary_score = "contains"
    system_prompt = "Answer the question below."
    file_names = ("nq_open",)

    def truth(self, record: Record) -> str:
        self._aliases(record)
        return right_answer(record)

    def score(self, record: Record, response: Response) -> Scored:
        aliases, forms = self._aliases(record), _forms(response.content)
        parts = [_parts(form) for form in forms]
        scores: dict[str, bool | float] = {
            "exact": any(listed and all(part in aliases for part in listed) for listed in parts),
            "prefix": any(f"{listed[0]} ".startswith(f"{alias} ") for listed in parts if listed for alias in aliases),
            "contains": any(f" {alias} " in f" {form} " for form in forms for alias in aliases),
        }
        answer = "; ".join(parts[0]) if scores["exact"] or re.search(r"\w", forms[0]) else None
        error = None if scores["exact"] else WRONG if answer else NO_ANSWER
        return Scored(scores, {"truth": "; ".join(aliases), "answer": answer}, error)

    def _aliases(self, record: Record) -> list[str]:
        aliases = [form for part in _parts(right_answer(record)) for form in _forms(part)]
        if not aliases:
            raise record_error(record, "the assistant message has no answer in it; put them there, '; ' between them")
        return list(dict.fromkeys(aliases))

    @classmethod
    def convert(cls, row: Mapping[str, object]) -> JsonObject:
        """Convert a row (``question``; ``answer``, a list or one string) to a record in the published form."""
        question, answer = read_text_field(row, "question").strip(), row.get("answer")
        answers = [answer] if isinstance(answer, str) and answer[:1] != "[" else as_list(answer) or []
        texts = [text.strip() for text in answers if isinstance(text, str) and text.strip("; ")]
        if not texts:
            raise Unusable("no answer")
        return chat_record(cls.system_prompt, question, "; ".join(dict.fromkeys(texts)))
