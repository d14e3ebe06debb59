"""A text that counts how much of it is looked at, for tests that work grows as the text does."""

from __future__ import annotations

from typing import Any


class CountingText(str):
    """Counts the characters that are cut out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        self.copied += len(found)
        return found
