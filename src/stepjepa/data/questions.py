"""Hashes of questions, by which an evaluation knows those that were trained on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.json_object import JsonObject
from stepjepa.data.messages import SYSTEM_ROLES

FORMS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "normalised": lambda text: " ".join(text.casefold().split()),
}
"""Ways to compare questions: exactly, or without case and white space."""


def question_hashes(messages: Sequence[JsonObject]) -> dict[str, int]:
    """Hash the question of a record, all messages before the last answer but the system prompt, in each of ``FORMS``.

    A hash has 64 bits.
    """
    contents = [message["content"] for message in messages[:-1] if message["role"] not in SYSTEM_ROLES]
    hashes = {}
    for form, change in FORMS.items():
        # Changed before it is JSON, which escapes line ends and letters such as "Ü".
        question = json.dumps([change(content) for content in contents])
        digest = hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8)
        hashes[form] = int.from_bytes(digest.digest(), "big")
    return hashes


def draw_held_out(keys: Sequence[int], size: int, seed: int) -> NDArray[np.bool_]:
    """Draw records at random so that no question is on both sides.

    If no two keys are equal, these are the first ``size`` records of a shuffled list.

    Args:
        keys: of each record the hash of its question.
        size: wanted number of records.
        seed: the same seed draws the same records.

    Returns:
        bool ``[N]``: whether a record is held out. They are at most ``size``; fewer where the records of one question
        are more than are still wanted.
    """
    _, question, repeats = np.unique(np.asarray(keys, np.uint64), return_inverse=True, return_counts=True)
    drawn, left = np.zeros(len(repeats), np.bool_), size
    for index in random.Random(seed).sample(range(len(keys)), len(keys)):
        if not drawn[question[index]] and repeats[question[index]] <= left:
            drawn[question[index]] = True
            left -= int(repeats[question[index]])
    return drawn[question]
