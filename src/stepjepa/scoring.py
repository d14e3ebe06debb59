r"""Is a generated answer right? Pure functions on strings: text against text, and the answers of mathematics.

An answer of mathematics is read where it is marked and nowhere else: in ``\boxed{...}`` or on a line ``#### ...``.
Two answers are equal as numbers, or, where neither is a number, as text. One that is a number never equals one that
is not.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple


def exact_match(generated: str, truth: str) -> bool:
    """The answer and nothing else; white space around either does not count."""
    return generated.strip() == truth.strip()


def prefix_match(generated: str, truth: str) -> bool:
    """The answer comes first, whatever follows: right, but the model perhaps ran on."""
    return generated.strip().startswith(truth.strip())


def contains(generated: str, truth: str) -> bool:
    """The answer is somewhere in what was generated."""
    return truth.strip() in generated


def text_scores(generated: str, truth: str) -> dict[str, bool | float]:
    """``exact``, ``prefix`` and ``contains`` side by side: what is right, and what is right but for the stopping."""
    return {
        "exact": exact_match(generated, truth),
        "prefix": prefix_match(generated, truth),
        "contains": contains(generated, truth),
    }


_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"^[ \t]*####[ \t]+(\S.*)$", re.MULTILINE)


def marked_answers(text: str) -> list[str]:
    r"""The answers that a text marks, in order: contents of ``\boxed{...}`` and of lines that begin with ``####``.

    Braces nest; a box that is not closed or is empty marks nothing. Of a box inside a box or on a ``####`` line, the
    innermost comes last.
    """
    found = [(match.start(), match.group(1).strip()) for match in _HASHES.finditer(text)]
    for match in _BOXED.finditer(text):
        content = _up_to_closing_brace(text, match.end())
        if content is not None and content.strip():
            found.append((match.start(), content.strip()))
    return [answer for _, answer in sorted(found)]


def _up_to_closing_brace(text: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            # What a backslash precedes is no brace of the grouping: \{ and \} are set literally.
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


class Number(NamedTuple):
    """A number as an answer states it.

    Attributes:
        value: exact, so that 0.1 is a tenth.
        unit: the words of its unit in the singular, lower case; empty where none is given.
    """

    value: Fraction
    unit: tuple[str, ...]


_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+"
_FRACTION = (
    rf"\\frac\s*(?:\{{\s*(?P<over>[+-]?{_INTEGER})\s*\}}\s*\{{\s*(?P<under>{_INTEGER})\s*\}}"
    rf"|(?P<digit_over>[0-9])\s*(?P<digit_under>[0-9]))"
    rf"|(?P<left>{_INTEGER})\s*/\s*(?P<right>{_INTEGER})"
)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<currency>[$€£¥]?)\s*(?P<inner_sign>[+-]?)\s*"
    rf"(?:(?:(?P<whole>{_INTEGER})(?:\s+|(?=\\frac)))?(?:{_FRACTION})|(?P<decimal>{_DECIMAL}))"
    # A number must not be the beginning of a longer one: 1,2 or 1.2.3 or 1/2/3.
    r"(?![0-9]|[.,/]\s*[0-9])"
)
_WORD = r"[^\W\d_]+(?:\^\{?-?[0-9]\}?|[²³])?"
_UNIT = re.compile(rf"(?P<sign>[%$€£¥]?)\s*(?P<words>(?:{_WORD}(?:[ .·*-]+{_WORD})*)?)")

_SIGNS = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "%": "percent"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# A single letter behind a number is algebra (5x, 2n) or a scale (3k, 2M) unless it is one of these units.
_LETTER_UNITS = frozenset("mglLshWVJ")
# "18 or more", "3 to one": not the number that stands in front.
_NOT_UNITS = frozenset({"or", "and", "to", "not", "plus", "minus", "times", "by", "over", "out", "if", "but"})
_LONGEST_UNIT = 5
# Longer than any answer that is a number; keeps the arithmetic bounded.
_LONGEST_NUMBER = 120

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    # Narrow spaces group digits; an escaped or tied space parts words.
    (re.compile(r"\\[,!;:]|[\u2009\u202f\u00a0]"), ""),
    (re.compile(r"\\ |~"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°"), " degrees "),
    (re.compile(r"[−–]"), "-"),
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("{", "}"))


def _clean(text: str) -> str:
    """An answer without what only sets it: delimiters of formulas, bold face, spacing, a full stop at the end."""
    previous = None
    while text != previous:
        previous = text
        text = _WRAPPER.sub(r" \1 ", text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    previous = None
    while text != previous:
        previous = text
        text = text.strip().removesuffix(".").strip()
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner
                break
    return text


def parse_number(text: str) -> Number | None:
    r"""The number that an answer is, or None where it is something else.

    Understood: signs, thousands separators (``1,000``, ``1{,}000``), decimals, currency signs before or behind,
    simple fractions (``3/4``, ``\frac{3}{4}``, ``1 1/2``), units in words, scale words (``3 million``), LaTeX spacing
    and text commands. Percent is a unit: ``50%`` equals ``50`` and ``50 percent``, not ``0.5``. Not understood, on
    purpose: several numbers, calculations, letters that stand for values.
    """
    text = _clean(text)
    match = _NUMBER.match(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    unit = _parse_unit(text[match.end() :].replace("/", " per ").strip())
    value = _value(match)
    if unit is None or value is None:
        return None
    words, scale = unit
    if match["currency"]:
        words = (_SIGNS[match["currency"]], *words)
    negative = "-" in (match["sign"], match["inner_sign"])
    return Number((-value if negative else value) * scale, words)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["decimal"] is not None:
        return Fraction(Decimal(match["decimal"].replace(",", "")))
    over = match["over"] or match["digit_over"] or match["left"]
    under = match["under"] or match["digit_under"] or match["right"]
    numerator, denominator = (int(part.replace(",", "")) for part in (over, under))
    if denominator == 0 or (match["whole"] and numerator < 0):
        return None
    whole = int(match["whole"].replace(",", "")) if match["whole"] else 0
    return whole + Fraction(numerator, denominator)


def _parse_unit(text: str) -> tuple[tuple[str, ...], int] | None:
    """The words of a unit and what its scale words multiply by; None for text that is no unit."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    words = re.split(r"[ .·*-]+", match["words"]) if match["words"] else []
    if len(words) == 1 and len(words[0]) == 1 and words[0] not in _LETTER_UNITS:
        return None
    words = [word.lower() for word in words]
    scale = 1
    while words and words[0] in _SCALES:
        scale *= _SCALES[words.pop(0)]
    if len(words) > _LONGEST_UNIT or _NOT_UNITS.intersection(words):
        return None
    singular = [word.removesuffix("s") if len(word) > 2 else word for word in words]
    return (*([_SIGNS[match["sign"]]] if match["sign"] else []), *singular), scale


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers say the same.

    Numbers are compared exactly; a unit counts only where both give one, and then one must begin the other
    (``$18`` equals ``18 dollars per day``; ``5 cm`` is not ``5 m``). Other answers are compared as text without
    spaces and LaTeX decoration, upper and lower case told apart.
    """
    number, true_number = parse_number(answer), parse_number(truth)
    if number is not None and true_number is not None:
        shared = min(len(number.unit), len(true_number.unit))
        return number.value == true_number.value and number.unit[:shared] == true_number.unit[:shared]
    if number is not None or true_number is not None:
        return False
    return "".join(_clean(answer).split()) == "".join(_clean(truth).split())
