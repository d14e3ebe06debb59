"""Read texts, lists and labels from rows of raw data sets, make records of them, and convert paraphrases."""

import ast
import re
from collections.abc import Mapping
from itertools import pairwise

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject

_ITEM = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


class Unusable(ValueError):  # noqa: N818  # a verdict on a row, not a mishap
    """Row that can't be converted; the message is the reason, used as a counter key."""


def chat_record(system: str, user: str, assistant: str, **extra: object) -> JsonObject:
    """Make a training record of three messages and optional further fields."""
    contents = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in contents.items()], **extra}


def read_text_field(row: Mapping[str, object], name: str) -> str:
    """Return a field that must hold text; raise :class:`Unusable` if it does not, or is empty."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"no text in '{name}'")
    return value


def read_steps_field(row: Mapping[str, object], name: str) -> list[str] | None:
    """Return a field that holds a list of texts, or the text of one as CSV has it; None for anything else."""
    value = row.get(name)
    texts = (as_list(value) or []) if isinstance(value, list) or str(value).lstrip().startswith("[") else []
    steps = [text for text in texts if isinstance(text, str)]
    return steps if steps and len(steps) == len(texts) else None


def read_label_field(row: Mapping[str, object], count: int) -> int:
    """Return the field ``label``, a number below ``count``; raise :class:`Unusable` for any other value."""
    label = as_label(row.get("label"))
    if label not in map(str, range(count)):
        # Such as -1, which marks unlabelled test records on the hub.
        raise Unusable(f"the label is none of 0 to {count - 1}")
    return int(label)


def as_label(value: object) -> str:
    """Return a class label as text; ``2.0``, from a table with empty cells, becomes ``2``."""
    return re.sub(r"\.0+$", "", str(value).strip())


def as_list(value: object) -> list[object] | None:
    """Return a list, or parse the text of one in Python or JSON syntax (``['a', "b"]``); None for anything else."""
    if isinstance(value, str):
        try:
            parsed = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        # NumPy writes two strings as 'a' 'b', which Python concatenates to one.
        value = parsed if isinstance(parsed, list) and len(parsed) == len(_ITEM.findall(value)) else None
    return value if isinstance(value, list) else None


# Columns of the paraphrase sets of the hub: a list of sentences, perhaps beside a ``text``; or two sentences.
_LISTS = ("set", "sentences", "paraphrases")
_PAIRS = [("text", "paraphrase"), ("sentence", "paraphrase"), ("source", "target"), ("anchor", "positive")]
_PAIRS += [(f"{name}1", f"{name}2") for name in ("sentence", "question", "text")]


def convert_paraphrases(row: Mapping[str, object]) -> list[JsonObject]:
    """Convert a row of n sentences of equal meaning to n - 1 pretraining records: a sentence and its successor.

    The row has two sentences (``sentence1``, ``sentence2``; ``text``, ``paraphrase``), perhaps with a ``label`` or
    ``is_duplicate``, of which only 1 is kept; or a list of sentences (``set``, ``sentences``, ``paraphrases``), perhaps
    with a first one beside it (``text``). UserError for others. ``position`` in a record is that of the user's
    sentence, from 1. There is no task for them: comparing an answer with one of many right paraphrases says nothing.
    """
    if as_label(row.get("label", row.get("is_duplicate", 1))).lower() not in ("1", "true"):
        raise Unusable("not labelled 1, as paraphrases")
    # Each sentence once, ignoring case and spacing.
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
            values = as_list(row[name])
            if values is None:
                raise UserError(f"'{name}' is no list of sentences")
            return [row.get("text"), *values]
    for pair in _PAIRS:
        if row.keys() >= set(pair):
            return [row[name] for name in pair]
    forms = "two sentences (sentence1 and sentence2, text and paraphrase) or a list (set, sentences, paraphrases)"
    raise UserError(f"the columns are {', '.join(map(str, row)) or '(none)'}; expected {forms}")
