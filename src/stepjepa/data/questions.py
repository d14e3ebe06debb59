"""Hashes of questions: an evaluation recognises trained questions by them, and a split keeps equal ones together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from stepjepa.base.json_object import JsonObject
from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.record import Record

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


def not_in_test(records: Sequence[Record], test: Sequence[Record]) -> list[Record]:
    """Return the records whose question, but for case and white space, is in no test record."""
    tested = {question_hashes(record.messages)["normalised"] for record in test}
    return [record for record in records if question_hashes(record.messages)["normalised"] not in tested]
