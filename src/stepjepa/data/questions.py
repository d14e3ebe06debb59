"""Hashes of questions, by which an evaluation knows those that were trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

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
    before = messages[:-1]
    question = json.dumps([message["content"] for message in before if message["role"] not in SYSTEM_ROLES])
    hashes = {}
    for form, change in FORMS.items():
        digest = hashlib.blake2b(change(question).encode("utf-8", "surrogatepass"), digest_size=8)
        hashes[form] = int.from_bytes(digest.digest(), "big")
    return hashes
