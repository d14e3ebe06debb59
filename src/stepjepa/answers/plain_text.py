"""The text of an answer as a reader sees it: characters that look alike made equal, and its wrapping removed."""

from __future__ import annotations

import re
import unicodedata

GROUPING_SPACES = "\u2009\u202f\u00a0"
"""Narrow spaces, which stand between the digits of a number."""

# What other programs leave in their output: </s>, <|im_end|>.
_SPECIAL_TOKEN = re.compile(r"</s>|<\|")
_FENCE = re.compile(r"^[^\S\n]*(?:```|~~~)\w*[^\S\n]*\n")
_LAST_TOKENS = re.compile(r"(?:</s>|<\|\w{1,40}\|>)\Z")
_CODE = re.compile(
    r"(?P<fence>```|~~~)(?:\w*[^\S\n]*\n)?(?P<block>(?:(?!(?P=fence)).)+)(?P=fence)|`(?P<inline>[^`\n]+)`", re.DOTALL
)
_BOX = re.compile(r"\$*\\(?:boxed|text)\s*\{([^{}]*)\}\$*")
# A short answer begins in so many characters, which also keep searches in it short.
_LONGEST_START = 2000


class _LookAlikes(dict[int, str]):
    """For ``str.translate``, filled as characters come up."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)
        if kind == "Nd":
            seen = str(unicodedata.decimal(character))
        elif kind == "Cf":
            seen = ""
        elif 0xFF01 <= code <= 0xFF5E:
            seen = chr(code - 0xFF01 + ord("!"))
        elif unicodedata.decomposition(character).startswith("<fraction>"):
            seen = " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
        elif kind == "Zs" and character not in GROUPING_SPACES:
            seen = " "
        else:
            seen = character
        self[code] = seen
        return seen


_LOOK_ALIKES = _LookAlikes()


def plain_characters(text: str) -> str:
    """The same text in ASCII where nobody would see a difference.

    Digits of all scripts and full-width forms become ASCII, ``½`` becomes `` 1/2``, spaces other than
    :data:`GROUPING_SPACES` become spaces, and invisible characters (zero-width spaces, marks of direction) are removed.
    """
    return text if text.isascii() else text.translate(_LOOK_ALIKES)


def before_special_token(text: str) -> str:
    """A text up to the first ``</s>`` or ``<|...|>`` that another program left in it."""
    return _SPECIAL_TOKEN.split(text, maxsplit=1)[0]


def answer_start(text: str) -> str:
    """The beginning of an answer in plain characters, without a code fence or box, up to a special token."""
    start = before_special_token(plain_characters(text.strip()[:_LONGEST_START])).strip()
    return _BOX.sub(r"\1", _FENCE.sub("", start)).strip()


def strip_code_fence(text: str) -> str:
    """An answer that is code, without the fence or the backticks around it and a special token behind it."""
    text = _LAST_TOKENS.sub("", text.strip()).strip()
    code = _CODE.fullmatch(text)
    return (code["block"] or code["inline"]).strip() if code else text
