"""Rows of raw data sets: the texts, lists and labels in them, the records that they become, and paraphrases."""

import ast
import re
from collections.abc import Mapping
from itertools import pairwise

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class Unusable(ValueError):  # noqa: N818  # a verdict on a row, not a mishap
    """A row that no record can be made of; the message is the reason, the same for like rows."""


def chat_record(system: str, user: str, assistant: str, **extra: object) -> JsonObject:
    """A training record of three messages, and perhaps other fields."""
    contents = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()], **extra}


def read_text_field(row: Mapping[str, object], name: str) -> str:
    """A field that must hold text; :class:`Unusable` if it is missing, empty or something else."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"no text in '{name}'")
    return value


def read_label_field(row: Mapping[str, object], count: int) -> int:
    """The field ``label``, a number below ``count``; :class:`Unusable` if it is missing or another."""
    label = as_label(row.get("label"))
    if label not in map(str, range(count)):
        # Among them -1, which marks test records of the hub.
        raise Unusable(f"the label is none of 0 to {count - 1}")
    return int(label)


def as_label(value: object) -> str:
    """A class label as text; ``2.0``, as a table with gaps has it, is ``2``."""
    return re.sub(r"\.0+$", "", str(value).strip())


def as_list(value: object) -> list[object] | None:
    """A list, or text of one as Python or JSON writes it (``['a', "b"]``); None for anything else."""
    if isinstance(value, str):
        try:
            found = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        # Python reads 'a' 'b', as NumPy writes two strings, as one.
        value = found if isinstance(found, list) and len(found) == len(_ITEM.findall(value)) else None
    return value if isinstance(value, list) else None


# Columns of the paraphrase sets of the hub: a list of sentences, perhaps beside a ``text``; or two sentences.
_LISTS = ("set", "sentences", "paraphrases")
_PAIRS = [("text", "paraphrase"), ("sentence", "paraphrase"), ("source", "target"), ("anchor", "positive")]
_PAIRS += [(f"{name}1", f"{name}2") for name in ("sentence", "question", "text")]


def convert_paraphrases(row: Mapping[str, object]) -> list[JsonObject]:
    """Pretraining records of a row of n sentences that say the same: n - 1 times a sentence and its successor.

    The row has two sentences (``sentence1``, ``sentence2``; ``text``, ``paraphrase``), perhaps with a ``label`` or
    ``is_duplicate``, of which only 1 is kept; or a list of sentences (``set``, ``sentences``, ``paraphrases``), perhaps
    with a first one beside it (``text``). UserError for others. ``position`` in a record is that of the user's
    sentence, from 1. There is no task for them: comparing an answer with one of many right paraphrases says nothing.
    """
    if as_label(row.get("label", row.get("is_duplicate", 1))).lower() not in ("1", "true"):
        raise Unusable("not labelled 1, as paraphrases")
    # Each sentence once, whatever its case and spacing.
    different: dict[str, str] = {}
    for sentence in _sentences(row):
        if isinstance(sentence, str) and sentence.strip():
            text = " ".join(sentence.split())
            different.setdefault(text.casefold(), text)
    if len(different) < 2:
        raise Unusable("fewer than two different sentences")
    return [
        chat_record("Paraphrase the sentence below.", *pair, position=position)
        for position, pair in enumerate(pairwise(different.values()), start=1)
    ]


def _sentences(row: Mapping[str, object]) -> list[object]:
    for name in _LISTS:
        if name in row:
            listed = as_list(row[name])
            if listed is None:
                raise UserError(f"'{name}' is no list of sentences")
            return [row.get("text"), *listed]
    for pair in _PAIRS:
        if row.keys() >= set(pair):
            return [row[name] for name in pair]
    forms = "two sentences (sentence1 and sentence2, text and paraphrase) or a list (set, sentences, paraphrases)"
    raise UserError(f"the columns are {', '.join(map(str, row)) or '(none)'}; expected {forms}")
