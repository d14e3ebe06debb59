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
from stepjepa.tasks.raw_values import Unusable, as_label, as_list, chat_record

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

EMPTY = "empty sentence"
DUPLICATE = "sentence repeated in its group"
SINGLE = "single sentence"
REPEATED = "pair seen before"


def records_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]], wrong: Callable[[int, UserError], None]
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Pretraining records from sentence pairs or groups: in a group of n, n - 1 times a sentence and its successor.

    Args:
        rows: line numbers and rows: two sentences or more (``sentence1``, ``sentence2``; ``text``, ``paraphrase``),
            perhaps with a ``label``, of which only 1 is kept; a list of sentences (``set``, ``sentences``,
            ``paraphrases``), perhaps with a first one beside it (``text``); or sentences and their ``group``, whose
            rows stand in order but not necessarily together.
        wrong: takes number and fault of a row that has none of these forms; the row is skipped.

    Returns:
        The records, with ``group`` (the row's own, or its line number) and ``position`` (of the user's sentence in its
        group, from 1); and how much was dropped, by reason.
    """
    dropped: Counter[str] = Counter()
    groups: dict[tuple[bool, Hashable], list[Any]] = {}
    for line, row in rows:
        columns = {str(key).strip().lower(): value for key, value in row.items()}
        try:
            group = _group(columns)
            sentences = _sentences(columns, grouped=group is not None)
        except Unusable as reason:
            dropped[str(reason)] += 1
        except UserError as error:
            wrong(line, error)
        else:
            groups.setdefault((group is None, line if group is None else group), []).extend(sentences)
    records: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for (_, key), given in groups.items():
        sentences = _distinct(given, dropped)
        if len(given) < 2:
            # Where others were dropped, they are counted already.
            dropped[SINGLE] += 1
        for position, pair in enumerate(pairwise(sentences), start=1):
            if pair in seen:
                dropped[REPEATED] += 1
                continue
            seen.add(pair)
            records.append(chat_record(SYSTEM_PROMPT, *pair, group=key, position=position))
    return records, dropped


def _group(columns: Mapping[str, Any]) -> str | int | None:
    group = next((columns[name] for name in _GROUPS if columns.get(name) not in (None, "")), None)
    if isinstance(group, float) and group.is_integer():
        return int(group)
    if group is None or (isinstance(group, str | int) and not isinstance(group, bool)):
        return group
    raise UserError(f"the group is {type(group).__name__}, expected a string or a whole number")


def _sentences(columns: Mapping[str, Any], *, grouped: bool) -> list[Any]:
    """The sentences of a row; :class:`Unusable` by its label, UserError for an unknown form."""
    named = next((name for name in _LABELS if name in columns), None)
    label = "1" if named is None else as_label(columns[named])
    if label is None:
        raise Unusable("no label")
    if label.lower() not in ("1", "true"):
        raise Unusable("label 0: no paraphrases" if label.lower() in ("0", "false") else "label neither 0 nor 1")
    for name in _LISTS:
        if name in columns:
            listed = as_list(columns[name])
            if listed is None:
                raise UserError(f"'{name}' is no list of sentences")
            return next(([columns[other]] for other in _FIRSTS if other in columns), []) + listed
    for pair in _PAIRS:
        if all(name in columns for name in pair):
            return [columns[name] for name in pair]
    numbered = {int(match[1]): columns[name] for name in columns if (match := _NUMBERED.fullmatch(name))}
    if len(numbered) > 1:
        return [numbered[number] for number in sorted(numbered)]
    single = next((name for name in _GROUPED if name in columns), None)
    if grouped and single is not None:
        return [columns[single]]
    raise UserError(
        f"the columns are {', '.join(columns) or '(none)'}; expected two sentences (sentence1 and sentence2, text and "
        "paraphrase), a list (set, sentences, paraphrases) or a sentence and its group"
    )


def _distinct(sentences: Sequence[Any], dropped: Counter[str]) -> list[str]:
    """Each sentence once, whatever its case and spacing."""
    kept: dict[str, str] = {}
    for sentence in sentences:
        text = " ".join(sentence.split()) if isinstance(sentence, str) else ""
        if not text:
            dropped[EMPTY] += 1
        elif text.casefold() in kept:
            dropped[DUPLICATE] += 1
        else:
            kept[text.casefold()] = text
    return list(kept.values())


def within_and_between(embeddings: np.ndarray, groups: Sequence[Hashable]) -> dict[str, float | int | None]:
    """How alike embeddings are in a group and across groups: mean cosine over all pairs of different rows.

    Linear in the number of rows: the cosines of all pairs of n unit vectors add up to (|their sum|^2 - n) / 2.

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
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = ~np.isfinite(lengths[:, 0]) | (lengths[:, 0] == 0)
    if bad.any():
        raise ValueError(f"expected embeddings with a direction, got zero, infinity or NaN in row {int(bad.argmax())}")
    rows = rows / lengths
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    members = [numbers[group] for group in groups]
    sums = np.zeros((len(numbers), rows.shape[1]))  # [groups, D]
    np.add.at(sums, members, rows)
    sizes = np.bincount(members, minlength=len(numbers))
    within_pairs = int((sizes * (sizes - 1)).sum()) // 2
    between_pairs = len(rows) * (len(rows) - 1) // 2 - within_pairs
    squared = float((sums**2).sum())
    within = (squared - len(rows)) / 2
    between = (float((sums.sum(axis=0) ** 2).sum()) - squared) / 2
    return {
        "within": within / within_pairs if within_pairs else None,
        "between": between / between_pairs if between_pairs else None,
        "within_pairs": within_pairs,
        "between_pairs": between_pairs,
        "groups": len(numbers),
    }
