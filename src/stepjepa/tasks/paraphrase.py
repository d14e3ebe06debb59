"""Paraphrases for pretraining: sentences that say the same, each of which predicts the next one of its group.

There is no task of this name: a model pretrained so is looked at (``stepjepa analyze --t_sne_type paraphrase``) or
fine-tuned on something else. Comparing what it generates with one of many right paraphrases would measure nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from stepjepa.errors import UserError
from stepjepa.tasks.base import Unusable, chat_record
from stepjepa.tasks.cells import as_label, as_list

SYSTEM_PROMPT = "Paraphrase the sentence below."

# Columns of the paraphrase sets of the hub: a list of sentences, perhaps beside a first one; two sentences; or one
# sentence and the group that it belongs to.
_LISTS = ("set", "sentences", "paraphrases")
_FIRSTS = ("text", "sentence", "phrase")
_PAIRS = (("text", "paraphrase"), ("sentence", "paraphrase"), ("source", "target"), ("anchor", "positive"))
_NUMBERED = re.compile(r"(?:sentence|question|text|caption|paraphrase|sent)[ _]?(\d+)")
_GROUPED = ("sentence", "text", "paraphrase", "caption")
_GROUPS = ("group", "group_id", "set_id", "paraphrase_set_id", "paraphrase_id", "cluster")
_LABELS = ("label", "is_duplicate")

NOT_PARAPHRASES = "label 0: no paraphrases"
NO_LABEL = "no label"
OTHER_LABEL = "label neither 0 nor 1"
EMPTY = "empty sentence"
DUPLICATE = "sentence repeated in its group"
SINGLE = "single sentence"
REPEATED = "pair seen before"


def records_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]], wrong: Callable[[int, UserError], None] | None = None
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Pretraining records from sentence pairs or groups: in a group of n, n - 1 times a sentence and its successor.

    Args:
        rows: line numbers and rows, all of one form: two sentences (``sentence1``, ``sentence2``; ``text``,
            ``paraphrase``; ``question1``, ``question2`` ...; or more, numbered on), perhaps with a ``label``, of which
            only 1 is kept; a list of sentences (``set``, ``sentences``, ``paraphrases``), perhaps with a first one
            beside it (``text``); or sentences with the ``group`` that they belong to, one in a row or several, the
            rows of a group in order but not necessarily together.
        wrong: takes number and fault of a row that has none of these forms, which is passed over then.

    Returns:
        The records, with ``group`` (the row's own, or else its line number) and ``position`` (of the user's sentence
        in its group, counted from 1, what was dropped not counted); and why how many sentences, pairs or groups were
        dropped.

    Raises:
        UserError: a row has none of these forms, or another one than the first row, and ``wrong`` is not given.
    """
    dropped: Counter[str] = Counter()
    groups: dict[Hashable, list[Any]] = {}
    grouped: bool | None = None
    for line, row in rows:
        columns = {str(key).strip().lower(): value for key, value in row.items()}
        group = next((columns[name] for name in _GROUPS if columns.get(name) not in (None, "")), None)
        try:
            if grouped not in (None, group is not None):
                raise UserError(f"row {line} {'has no' if grouped else 'has a'} group, the first row is different")
            key = line if group is None else _hashable(group, line)
            sentences = _sentences_of(columns, line, grouped=group is not None)
        except Unusable as reason:
            dropped[str(reason)] += 1
        except UserError as error:
            if wrong is None:
                raise
            wrong(line, error)
            continue
        else:
            groups.setdefault(key, []).extend(sentences)
        grouped = group is not None
    return _chain(groups, dropped), dropped


def _sentences_of(columns: Mapping[str, Any], line: int, *, grouped: bool) -> list[Any]:
    """The sentences of a row that may be kept."""
    _check_label(columns)
    sentences = _sentences(columns, line)
    if sentences is None and grouped:
        sentences = _sentence_of_group(columns)
    if sentences is None:
        raise _unknown(columns, line)
    return sentences


def _chain(groups: Mapping[Hashable, Sequence[Any]], dropped: Counter[str]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for group, given in groups.items():
        sentences = _distinct(given, dropped)
        if len(given) < 2:
            # Where others were dropped, they are counted already.
            dropped[SINGLE] += 1
        for position, (one, other) in enumerate(pairwise(sentences), start=1):
            if (one, other) in seen:
                dropped[REPEATED] += 1
                continue
            seen.add((one, other))
            records.append(chat_record(SYSTEM_PROMPT, one, other, group=group, position=position))
    return records


def _distinct(sentences: Sequence[Any], dropped: Counter[str]) -> list[str]:
    """Those that say something, each once; case and spacing make no paraphrase."""
    kept: dict[str, str] = {}
    for sentence in sentences:
        text = " ".join(sentence.split()) if isinstance(sentence, str) else ""
        key = text.casefold()
        if not text:
            dropped[EMPTY] += 1
        elif key in kept:
            dropped[DUPLICATE] += 1
        else:
            kept[key] = text
    return list(kept.values())


def _check_label(columns: Mapping[str, Any]) -> None:
    name = next((name for name in _LABELS if name in columns), None)
    if name is None:
        return
    label = as_label(columns[name])
    if label is None:
        raise Unusable(NO_LABEL)
    if label.lower() in ("0", "false"):
        raise Unusable(NOT_PARAPHRASES)
    if label.lower() not in ("1", "true"):
        raise Unusable(OTHER_LABEL)


def _sentence_of_group(columns: Mapping[str, Any]) -> list[Any] | None:
    return next(([columns[name]] for name in _GROUPED if name in columns), None)


def _sentences(columns: Mapping[str, Any], line: int) -> list[Any] | None:
    """Those of a row that holds several; None for any other."""
    for name in _LISTS:
        if name in columns:
            first = next(([columns[other]] for other in _FIRSTS if other in columns), [])
            listed = as_list(columns[name])
            if listed is None:
                raise UserError(f"row {line}: '{name}' is no list of sentences")
            return first + listed
    for pair in _PAIRS:
        if all(name in columns for name in pair):
            return [columns[name] for name in pair]
    numbered = {int(match[1]): columns[name] for name in columns if (match := _NUMBERED.fullmatch(name))}
    if len(numbered) > 1:
        return [numbered[number] for number in sorted(numbered)]
    return None


def _hashable(group: Any, line: int) -> str | int:
    if isinstance(group, str | int) and not isinstance(group, bool):
        return group
    if isinstance(group, float) and group.is_integer():
        return int(group)
    raise UserError(f"row {line}: the group is {type(group).__name__}, expected a string or a whole number")


def _unknown(columns: Mapping[str, Any], line: int) -> UserError:
    return UserError(
        f"row {line} has the columns {', '.join(columns) or '(none)'}; expected two sentences (sentence1 and "
        "sentence2, text and paraphrase), a list (set, sentences, paraphrases) or a sentence and its group"
    )


def within_and_between(embeddings: np.ndarray, groups: Sequence[Hashable]) -> dict[str, float | int | None]:
    """How alike embeddings are in a group and across groups: mean cosine over all pairs of different rows.

    Exact, and linear in the number of rows: the cosines of all pairs of a set add up to half of what the squared
    length of the sum of its unit vectors exceeds its size by.

    Args:
        embeddings: [N, D]
        groups: of each row, N.

    Returns:
        ``within`` and ``between``, None where there is no such pair; ``within_pairs`` and ``between_pairs``, how many
        there are; ``groups``, how many different ones.

    Raises:
        ValueError: the sizes differ, or an embedding has no direction (zero, infinite or not a number).
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(groups):
        raise ValueError(f"expected [N, D] and N groups, got shape {rows.shape} and {len(groups)} groups")
    # Two steps, so that very large and very small numbers do not overflow when squared.
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    bad = ~np.isfinite(largest[:, 0]) | (largest[:, 0] == 0)
    if bad.any():
        raise ValueError(f"expected embeddings with a direction, got zero, infinity or NaN in row {int(bad.argmax())}")
    rows = rows / largest
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    members = np.array([numbers[group] for group in groups], dtype=np.intp)
    sums = np.zeros((len(numbers), rows.shape[1]))
    np.add.at(sums, members, rows)
    sizes = np.bincount(members, minlength=len(numbers)) if numbers else np.zeros(0, dtype=np.intp)
    within_pairs = int((sizes * (sizes - 1)).sum()) // 2
    between_pairs = len(rows) * (len(rows) - 1) // 2 - within_pairs
    of_groups = float((sums**2).sum())
    within = (of_groups - float((rows**2).sum())) / 2
    between = (float((sums.sum(axis=0) ** 2).sum()) - of_groups) / 2
    return {
        "within": within / within_pairs if within_pairs else None,
        "between": between / between_pairs if between_pairs else None,
        "within_pairs": within_pairs,
        "between_pairs": between_pairs,
        "groups": len(numbers),
    }
