"""Where tokenizers cut a text into words: for those that are known well, without asking them.

A byte-level tokenizer first cuts its text into words by a regular expression, then looks at each word by itself. So a
word has the same tokens wherever it stands, and needs to be tokenised once. Which words there are is found here, for
ASCII text, by the same expression. Text of other characters is parted at spaces, where all of these expressions cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

WordFinder = Callable[[str], list[str]]
"""Parts a text, without gaps, into pieces that have the same tokens wherever they stand."""

# The expressions of byte-level tokenizers: GPT-2's, and that of nearly all later ones, with groups of digits.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN = (_NEWER % "", _NEWER % "{1,3}", _NEWER % "+")

# Digits parted one by one beforehand: the text in front of one ends there, so that blanks stay together.
_GPT2_DIGITS = r"[0-9]|'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+"

# None of the expressions looks back, none lets a word go on behind a character with a space after it, unless that
# character is a blank itself. Only visible ASCII counts, for what else is a blank not all agree on.
_BEFORE_SPACES = re.compile(r"(?<=[!-~])(?= )")

_UNCHANGING = {"NFC", "NFD", "NFKC", "NFKD"}


def word_finder(description: dict[str, Any]) -> WordFinder | None:
    """What parts texts as a tokenizer does, for texts without added tokens; None where that is not known.

    Args:
        description: of a fast tokenizer that gives pieces between added tokens the same tokens wherever they stand
            (``tokenisation.cuts_at_added_tokens``), see ``tokenisation.describe``.
    """
    normalizer = description["normalizer"]
    if normalizer is not None and not all(part["type"] in _UNCHANGING for part in _parts(normalizer, "normalizers")):
        return None
    found = description["pre_tokenizer"]
    expression = None if found is None else _expression(_parts(found, "pretokenizers"))
    if expression is None:
        return None
    ascii_words = re.compile(expression, re.ASCII).findall

    def find(text: str) -> list[str]:
        if text.isascii():
            return ascii_words(text)
        words: list[str] = []
        for part in _BEFORE_SPACES.split(text):
            if part.isascii():
                words += ascii_words(part)
            else:
                words.append(part)
        return words

    return find


def _parts(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The parts of a sequence, one level of which is understood; otherwise the part itself."""
    parts: list[dict[str, Any]] = part[name] if part["type"] == "Sequence" else [part]
    return parts


def _expression(parts: list[dict[str, Any]]) -> str | None:
    """The expression of pre-tokenizers for ASCII."""
    *before, last = parts
    if last["type"] != "ByteLevel" or len(before) > 1:
        return None
    if not before:
        return _for_ascii(_GPT2) if last["use_regex"] else None
    (first,) = before
    if first["type"] == "Digits" and last["use_regex"]:
        return _GPT2_DIGITS if first["individual_digits"] else None
    # The expressions leave no gaps: to keep what they find and to remove what they don't is the same.
    if first["type"] == "Split" and (first["behavior"], first["invert"]) in (("Isolated", False), ("Removed", True)):
        found = first["pattern"].get("Regex")
        return _for_ascii(found) if found in _KNOWN and not last["use_regex"] else None
    return None


def _for_ascii(expression: str) -> str:
    within = expression.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
    return within.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
