"""Normalise the text of an answer: characters that look alike become equal, and fences and boxes are removed."""

from __future__ import annotations

import re
import unicodedata

GROUPING_SPACES = "\u2009\u202f\u00a0"
"""Narrow and non-breaking spaces, which group the digits of a number."""

# Other programs leave </s> or <|im_end|> in their output.
_SPECIAL_TOKEN = re.compile(r"</s>|<\|")
_FENCE = re.compile(r"^[^\S\n]*(?:```|~~~)\w*[^\S\n]*\n")
_LAST_TOKENS = re.compile(r"(?:</s>|<\|\w{1,40}\|>)\Z")
_CODE = re.compile(
    r"(?P<fence>```|~~~)(?:\w*[^\S\n]*\n)?(?P<block>(?:(?!(?P=fence)).)+)(?P=fence)|`(?P<inline>[^`\n]+)`", re.DOTALL
)
_BOX = re.compile(r"\$*\\(?:boxed|text)\s*\{([^{}]*)\}\$*")
# Number of characters that answer_start reads; the limit keeps its searches short.
_LONGEST_START = 2000


class _Translation(dict[int, str]):
    """A table for ``str.translate`` that computes each entry when it is first needed."""

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


_TO_PLAIN = _Translation()


def plain_characters(text: str) -> str:
    """Replace characters by the ASCII characters that look the same.

    Digits of all scripts and full-width forms become ASCII, ``½`` becomes `` 1/2``, spaces other than
    :data:`GROUPING_SPACES` become spaces, and invisible characters (zero-width spaces, direction marks) are removed.
    """
    return text if text.isascii() else text.translate(_TO_PLAIN)


def before_special_token(text: str) -> str:
    """A text up to its first ``</s>`` or ``<|``, which begins a special token."""
    return _SPECIAL_TOKEN.split(text, maxsplit=1)[0]


def answer_start(text: str) -> str:
    """The beginning of an answer in plain characters, without a code fence or box, up to a special token."""
    start = before_special_token(plain_characters(text.strip()[:_LONGEST_START])).strip()
    return _BOX.sub(r"\1", _FENCE.sub("", start)).strip()


def strip_code_fence(text: str) -> str:
    """An answer without the fence or backticks that enclose all of it, and without a special token at its end."""
    text = _LAST_TOKENS.sub("", text.strip()).strip()
    code = _CODE.fullmatch(text)
    return (code["block"] or code["inline"]).strip() if code else text
