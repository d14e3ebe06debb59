"""NQ-Open: short answers to questions that people asked a search engine, each with one right answer or several."""

import re
import unicodedata
from collections.abc import Mapping

from stepjepa.base.json_object import JsonObject
from stepjepa.data.records import Record
from stepjepa.tasks.base import NO_ANSWER, WRONG, Response, Scored, Task, record_error
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
    """A text as it is compared: as in SQuAD lower case, no articles, no punctuation, single spaces.

    Unlike there, a decimal point, a minus sign and what separates two numbers count (``1.5`` is not ``15``). Commas
    that group digits, accents, compatibility forms of Unicode, invisible characters and the spacing of initials
    (``B. F. Skinner``) don't. ``;``, which stands between several answers, stays as a word, and nothing but punctuation
    stands for itself.
    """
    if not text.isascii():
        # One by one, which drops marks before they are sorted: that takes the square of their number.
        parts = (part for character in text.replace("−", "-") for part in unicodedata.normalize("NFKD", character))
        text = "".join(part for part in parts if unicodedata.category(part) not in ("Mn", "Cf"))
    form = text = " ".join(text.casefold().replace(";", " ; ").split())
    for pattern, replacement in _REPLACEMENTS:
        form = re.sub(pattern, replacement, form)
    return " ".join(form.split()) if form.strip("; ") else text


def _forms(text: str) -> list[str]:
    """Its normal forms with hyphens that join words and with hyphens that part them: ``tbone``, ``t bone``."""
    return [normal_form(text), normal_form(re.sub(r"(?<=[^\W\d])[-‐‑–](?=\w)|(?<=\w)[-‐‑–](?=[^\W\d])", " ", text))]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


class NqOpenTask(Task):
    """The truth lists the answers that count, with ``;`` between them: the aliases.

    On :func:`normal_form` an answer is an alias, or a list of them (``exact``), begins with one (``prefix``), or has
    one in it as whole words (``contains``). Meaning is not judged: ``not Amma`` contains ``Amma``.
    """

    name = "nq-open"
    headline = "exact"
    lenient = "contains"
    system_prompt = "Answer the question below."
    file_names = ("nq_open",)

    def truth(self, record: Record) -> str:
        self._aliases(record)
        return record.answer

    def score(self, record: Record, response: Response) -> Scored:
        aliases, forms = self._aliases(record), _forms(response.content)
        parts = [_parts(form) for form in forms]
        scores: dict[str, bool | float] = {
            "exact": any(each and all(part in aliases for part in each) for each in parts),
            "prefix": any(f"{each[0]} ".startswith(f"{alias} ") for each in parts if each for alias in aliases),
            "contains": any(f" {alias} " in f" {form} " for form in forms for alias in aliases),
        }
        answer = "; ".join(parts[0]) if scores["exact"] or re.search(r"\w", forms[0]) else None
        error = None if scores["exact"] else WRONG if answer else NO_ANSWER
        return Scored(scores, {"truth": "; ".join(aliases), "answer": answer}, error)

    def _aliases(self, record: Record) -> list[str]:
        aliases = [form for part in _parts(record.answer) for form in _forms(part)]
        if not aliases:
            raise record_error(record, "the assistant message has no answer in it; put them there, '; ' between them")
        return list(dict.fromkeys(aliases))

    @classmethod
    def convert(cls, row: Mapping[str, object]) -> JsonObject:
        """A record in the published form, from a row of the hub: ``question``, and ``answer``, a list or one string."""
        question, answer = read_text_field(row, "question").strip(), row.get("answer")
        given = [answer] if isinstance(answer, str) and answer[:1] != "[" else as_list(answer) or []
        texts = [text.strip() for text in given if isinstance(text, str) and text.strip("; ")]
        if not texts:
            raise Unusable("no answer")
        return chat_record(cls.system_prompt, question, "; ".join(dict.fromkeys(texts)))
