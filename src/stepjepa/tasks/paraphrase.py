"""Paraphrases for pretraining: sentences that say the same, each of which predicts the next one of its row.

There is no task of this name: a model pretrained so is looked at (``stepjepa analyze --t_sne_type paraphrase``) or
fine-tuned on something else. Comparing what it generates with one of many right paraphrases would measure nothing.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from stepjepa.errors import UserError
from stepjepa.tasks.raw_values import Unusable, as_label, as_list, chat_record

if TYPE_CHECKING:
    import numpy as np

SYSTEM_PROMPT = "Paraphrase the sentence below."

# Columns of the paraphrase sets of the hub: a list of sentences, perhaps beside a first one; or two sentences.
_LISTS = ("set", "sentences", "paraphrases")
_FIRSTS = ("text", "sentence", "phrase")
_PAIRS = (("text", "paraphrase"), ("sentence", "paraphrase"), ("source", "target"), ("anchor", "positive"))
_NUMBERED = re.compile(r"(?:sentence|question|text|caption|paraphrase|sent)[ _]?(\d+)")
_LABELS = ("label", "is_duplicate")


def convert(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Pretraining records of a row of n sentences that say the same: n - 1 times a sentence and its successor.

    Args:
        row: two sentences or more (``sentence1``, ``sentence2``; ``text``, ``paraphrase``), perhaps with a ``label``,
            of which only 1 is kept; or a list of sentences (``set``, ``sentences``, ``paraphrases``), perhaps with a
            first one beside it (``text``).

    Returns:
        The records, with ``position``, that of the user's sentence, from 1.

    Raises:
        Unusable: the row is labelled as no paraphrases, or has fewer than two different sentences.
        UserError: it has none of these forms.
    """
    columns = {str(key).strip().lower(): value for key, value in row.items()}
    named = next((name for name in _LABELS if name in columns), None)
    label = "1" if named is None else as_label(columns[named])
    if label is None:
        raise Unusable("no label")
    if label.lower() not in ("1", "true"):
        raise Unusable("label 0: no paraphrases" if label.lower() in ("0", "false") else "label neither 0 nor 1")
    # Each sentence once, whatever its case and spacing.
    different: dict[str, str] = {}
    for sentence in _sentences(columns):
        text = " ".join(sentence.split()) if isinstance(sentence, str) else ""
        if text:
            different.setdefault(text.casefold(), text)
    if len(different) < 2:
        raise Unusable("fewer than two different sentences")
    return [
        chat_record(SYSTEM_PROMPT, *pair, position=position)
        for position, pair in enumerate(pairwise(different.values()), start=1)
    ]


def _sentences(columns: Mapping[str, Any]) -> list[Any]:
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
    raise UserError(
        f"the columns are {', '.join(columns) or '(none)'}; expected two sentences (sentence1 and sentence2, text and "
        "paraphrase) or a list (set, sentences, paraphrases)"
    )


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
        ValueError: an embedding has no direction (zero, infinite or not a number).
    """
    import numpy as np

    rows = np.asarray(embeddings, dtype=np.float64)
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
