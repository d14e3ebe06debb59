"""Rows of raw data sets: the texts, lists and labels in them, the records that they become, and paraphrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from stepjepa.errors import UserError

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class Unusable(ValueError):  # noqa: N818  # a verdict on a row, not a mishap
    """A row that no record can be made of; the message is the reason, the same for like rows."""


def chat_record(system: str, user: str, assistant: str, **extra: Any) -> dict[str, Any]:
    """A training record of three messages, and perhaps other fields."""
    contents = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()], **extra}


def read_text_field(row: Mapping[str, Any], name: str) -> str:
    """A field that must hold text; :class:`Unusable` if it is missing, empty or something else."""
    value = row.get(name)
    if value is None:
        raise Unusable(f"no field '{name}'")
    if not isinstance(value, str):
        raise Unusable(f"'{name}' is {type(value).__name__}, not text")
    if not value.strip():
        raise Unusable(f"'{name}' is empty")
    return value


def read_label_field(row: Mapping[str, Any], count: int) -> int:
    """The field ``label``, a number below ``count``; :class:`Unusable` if it is missing or another."""
    label = as_label(row.get("label"))
    if label is None:
        raise Unusable("no label")
    if label not in map(str, range(count)):
        raise Unusable(f"the label is none of 0 to {count - 1}")
    return int(label)


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or array as a list; None for anything else.

    Text counts if Python, JSON or NumPy wrote it: ``['a', "b"]``, ``['a' 'b']``, which Python would read as one string.
    """
    if isinstance(value, str):
        text = value.strip()
        # Nothing but commas and white space may stand between the strings.
        if text[:1] != "[" or text[-1:] != "]" or _ITEM.sub("", text[1:-1]).strip(", \t\r\n"):
            return None
        try:
            return [ast.literal_eval(item.replace("\n", "\\n")) for item in _ITEM.findall(text[1:-1])]
        except (ValueError, SyntaxError):
            return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def as_label(value: Any) -> str | None:
    """A class label as text, ``2.0`` as ``2``; None where it is missing, or -1, which marks test records of the hub."""
    label = "" if value is None else str(value).strip()
    label = re.sub(r"^(-?[0-9]+)\.0+$", r"\1", label)
    return None if label.lower() in ("", "-1", "none", "nan") else label


# Columns of the paraphrase sets of the hub: a list of sentences, perhaps beside a first one; or two sentences.
_LISTS = ("set", "sentences", "paraphrases")
_FIRSTS = ("text", "sentence", "phrase")
_PAIRS = (("text", "paraphrase"), ("sentence", "paraphrase"), ("source", "target"), ("anchor", "positive"))
_NUMBERED = re.compile(r"(?:sentence|question|text|caption|paraphrase|sent)[ _]?(\d+)")


def convert_paraphrases(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Pretraining records of a row of n sentences that say the same: n - 1 times a sentence and its successor.

    The row has two sentences or more (``sentence1``, ``sentence2``; ``text``, ``paraphrase``), perhaps with a ``label``
    or ``is_duplicate``, of which only 1 is kept; or a list of sentences (``set``, ``sentences``, ``paraphrases``),
    perhaps with a first one beside it (``text``). UserError for others. ``position`` in a record is that of the user's
    sentence, from 1. There is no task for them: comparing an answer with one of many right paraphrases says nothing.
    """
    columns = {str(key).strip().lower(): value for key, value in row.items()}
    label = as_label(columns.get("label", columns.get("is_duplicate", 1)))
    if label is None:
        raise Unusable("no label")
    if label.lower() not in ("1", "true"):
        raise Unusable("label 0: no paraphrases" if label.lower() in ("0", "false") else "label neither 0 nor 1")
    # Each sentence once, whatever its case and spacing.
    different: dict[str, str] = {}
    for sentence in _sentences(columns):
        if isinstance(sentence, str) and sentence.strip():
            text = " ".join(sentence.split())
            different.setdefault(text.casefold(), text)
    if len(different) < 2:
        raise Unusable("fewer than two different sentences")
    return [
        chat_record("Paraphrase the sentence below.", *pair, position=position)
        for position, pair in enumerate(pairwise(different.values()), start=1)
    ]


def _sentences(columns: Mapping[str, Any]) -> list[Any]:
    for name in _LISTS:
        if name in columns:
            listed = as_list(columns[name])
            if listed is None:
                raise UserError(f"'{name}' is no list of sentences")
            return [columns[other] for other in _FIRSTS if other in columns][:1] + listed
    for pair in _PAIRS:
        if columns.keys() >= set(pair):
            return [columns[name] for name in pair]
    numbered = {int(match[1]): columns[name] for name in columns if (match := _NUMBERED.fullmatch(name))}
    if len(numbered) > 1:
        return [numbered[number] for number in sorted(numbered)]
    raise UserError(
        f"the columns are {', '.join(columns) or '(none)'}; expected two sentences (sentence1 and sentence2, text and "
        "paraphrase) or a list (set, sentences, paraphrases)"
    )
