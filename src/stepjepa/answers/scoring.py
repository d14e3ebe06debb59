r"""Compare a generated answer with the truth: as text, or as an answer to a mathematical problem.

A mathematical answer is read only where it is marked: in ``\boxed{...}`` or behind ``####``. Two answers are compared
as numbers, or as text if neither is a number; a number never equals an answer that is none. A model may generate any
text, so all work is bounded by a small multiple of its length.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from stepjepa.answers.plain_text import GROUPING_SPACES, before_special_token, plain_characters


def exact_match(generated: str, truth: str) -> bool:
    """Whether the texts are equal, white space at their ends ignored."""
    return generated.strip() == truth.strip()


def prefix_match(generated: str, truth: str) -> bool:
    """Whether the generated text begins with the truth: right, though the model may have run on."""
    return generated.strip().startswith(truth.strip())


def text_scores(generated: str, truth: str) -> dict[str, bool | float]:
    """The scores ``exact``, ``prefix`` and ``contains`` (the truth is anywhere in the generated text)."""
    return {
        "exact": exact_match(generated, truth),
        "prefix": prefix_match(generated, truth),
        "contains": truth.strip() in generated,
    }


# After "####" comes a space or the beginning of a number; or mark and answer are together in bold face or in backticks.
_HASHES = re.compile(
    rf"(?<!\S)####(?:[ \t{GROUPING_SPACES}]+(?=[^\s#])|(?=[-+−.\d$€£¥*`\\(]))(?P<line>[^\n]+)"
    r"|(?P<around>\*\*|`)####[ \t]*(?P<inside>[^\s*`][^*`\n]*)(?P=around)"
)
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\[{}]|\\\\(?!boxed)|(?P<open>\{)|(?P<close>\})")


class _Mark(NamedTuple):
    start: int
    end: int
    answer: str


def marked_answers(text: str) -> list[str]:
    r"""The answers that a text marks, in order: contents of ``\boxed{...}``, and the rest of a line behind ``####``.

    Braces nest; a box that is not closed or is empty marks nothing. Of nested marks, as in ``#### \boxed{18}``, the
    innermost counts. White space must precede ``####``, except in ``**#### 18**``. Digits of any script are returned as
    ASCII, invisible characters are removed, and a line ends at a special token.
    """
    text = plain_characters(text)
    marks = [
        _Mark(match.start(), match.end(), before_special_token(match["line"] or match["inside"]))
        for match in _HASHES.finditer(text)
    ]
    marks = sorted([*marks, *_boxes(text)])
    # A mark is innermost if the next one begins after its end; the last one always is.
    inner = [mark for mark, after in pairwise(marks) if mark.end <= after.start] + marks[-1:]
    return [answer for mark in inner if (answer := mark.answer.strip())]


def _boxes(text: str) -> list[_Mark]:
    r"""The closed boxes that contain no other box; braces after a backslash do not group."""
    first = text.find("\\boxed")
    found: list[_Mark] = []
    # For each open brace: its start, the start of its content (-1: no box), the number of boxes found before it.
    opened: list[tuple[int, int, int]] = []
    for match in _BRACES.finditer(text, first) if first >= 0 else ():
        if match["box"]:
            opened.append((match.start(), match.end(), len(found)))
        elif match["open"]:
            opened.append((match.start(), -1, len(found)))
        elif match["close"] and opened:
            start, content, before = opened.pop()
            if content >= 0 and len(found) == before:
                found.append(_Mark(start, match.end(), text[content : match.start()]))
    return found


class Number(NamedTuple):
    """A number with its unit.

    Attributes:
        value: the exact value; 0.1 is a tenth.
        unit: the words of the unit in the singular and lower case; empty if there is none.
    """

    value: Fraction
    unit: tuple[str, ...]


# Digits in groups of three, or, as in India, of two before the last three.
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,2}})?"
_FRACTION = (
    rf"\\frac\s*(?:\{{\s*(?P<over>[+-]?{_INTEGER})\s*\}}\s*\{{\s*(?P<under>{_INTEGER})\s*\}}"
    rf"|(?P<digit_over>[0-9])\s*(?P<digit_under>[0-9]))"
    rf"|(?P<left>{_INTEGER})\s*/\s*(?P<right>{_INTEGER})"
)
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<currency>(?:[$€£¥₹]|(?i:usd|eur|gbp|jpy|inr|rs\.?))?)\s*(?P<inner_sign>[+-]?)\s*"
    rf"(?:(?:(?P<whole>{_INTEGER})(?:\s+|(?=\\frac)))?(?:{_FRACTION})|(?P<decimal>{_DECIMAL}))"
    # The number must not continue, as in 1,2 or 1.2.3 or 1/2/3.
    r"(?![0-9]|[.,/]\s*[0-9])"
)
_ENCLOSED = re.compile(r"""\([^()\[\],]*\)|\[[^()\[\],]*\]|"[^"]*"|'[^']*'|“[^”]*”""")
_ABOUT = re.compile(r"^(?:≈|\\approx\b|(?i:about|approximately|approx\.?|roughly|around)\s)\s*")
_IN_BRACKETS = re.compile(r"^\s+\(([^()]*)\)$")
_WORD = r"[^\W\d_]+(?:\^\{?-?[0-9]\}?|[²³])?"
_UNIT = re.compile(rf"(?P<sign>[%$€£¥₹]?)\s*(?P<words>(?:{_WORD}(?:[ .·*-]+{_WORD})*)?)")

_SIGNS = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "%": "percent"}
_CURRENCIES = {"usd": "dollar", "eur": "euro", "gbp": "pound", "jpy": "yen", "inr": "rupee", "rs": "rupee"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# A single letter behind a number is algebra (5x, 2n) or a scale (3k, 2M) unless it is one of these units, or of a
# script without capitals (5元).
_LETTER_UNITS = frozenset("mglLshWVJ")
# "18 or more" and "3 to one" do not mean the number before these words.
_NOT_UNITS = frozenset(
    {"or", "and", "to", "not", "plus", "minus", "times", "by", "over", "out", "if", "but", "is", "are", "was", "were"}
)
_POWERS = frozenset({"squared", "cubed", "factorial"})
_LONGEST_UNIT = 5
# Numbers of characters above any real number, or sentence that states one; they limit the time.
_LONGEST_NUMBER = 120
_LONGEST_STATEMENT = 400
# A longer answer is compared without removing its decoration.
_LONGEST_TEXT = 2000

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\left(?![a-z])|\\right(?![a-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    # Narrow spaces group digits; an escaped space or a tie separates words.
    (re.compile(rf"\\[,!;:]|[{GROUPING_SPACES}]"), ""),
    (re.compile(r"\\ |~"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s*(?:\{\s*)?\\circ\s*\}?|°"), " degrees "),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\bUS\$"), "$"),
    # Scientific notation, 2 \times 10^3.
    (
        re.compile(
            r"(?<=[0-9])\s*(?:\\times|\\cdot|×|·)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,2})\s*\}|([+-]?[0-9]{1,2}))"
        ),
        r"e\1\2",
    ),
)
_DELIMITERS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("*", "*"),
    ("`", "`"),
    ("{", "}"),
)


def _clean(text: str) -> str:
    """Remove decoration from an answer: delimiters of formulas, bold face, LaTeX spacing, a full stop at the end."""
    text = plain_characters(text)
    if len(text) > _LONGEST_TEXT:
        return text.strip()
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
    r"""Parse an answer that is a number, perhaps with a unit; None if it is anything else.

    Understood: signs, thousands separators (``1,000``, ``1{,}000``), decimals, currency signs before or behind,
    simple fractions (``3/4``, ``\frac{3}{4}``, ``1 1/2``, ``½``), powers of ten (``2\times 10^3``), units in words,
    scale words (``3 million``), LaTeX spacing and text commands, digits of any script, ``about`` before the number,
    brackets or quotation marks around it. Percent is a unit: ``50%`` equals ``50`` and ``50 percent``, not ``0.5``.
    Refused on purpose: several numbers, calculations, letters that stand for values.
    """
    text = _clean(text)
    if len(text) > _LONGEST_NUMBER:
        return None
    if _ENCLOSED.fullmatch(text):
        text = text[1:-1].strip()
    text = _ABOUT.sub("", text, count=1)
    match = _NUMBER.match(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    unit = _parse_unit(_IN_BRACKETS.sub(r"\1", text[match.end() :]).replace("/", " per ").strip())
    value = _value(match)
    if unit is None or value is None:
        return None
    words, scale = unit
    if match["currency"]:
        sign = match["currency"].lower().rstrip(".")
        words = (_SIGNS.get(sign) or _CURRENCIES[sign], *words)
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
    """The words of a unit and the factor of its scale words; None for text that is no unit."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    words = re.split(r"[ .·*-]+", match["words"]) if match["words"] else []
    letter = words[0] if len(words) == 1 and len(words[0]) == 1 else None
    if letter and letter not in _LETTER_UNITS and unicodedata.category(letter) != "Lo":
        return None
    words = [word.lower() for word in words]
    scale = 1
    while words and words[0] in _SCALES:
        scale *= _SCALES[words.pop(0)]
    if len(words) > _LONGEST_UNIT or _NOT_UNITS.intersection(words) or _POWERS.intersection(words[:1]):
        return None
    singular = [_CURRENCIES.get(word) or (word.removesuffix("s") if len(word) > 2 else word) for word in words]
    return (*([_SIGNS[match["sign"]]] if match["sign"] else []), *singular), scale


_VERBS = r"\b(?:is|are|was|were|be|equals|equal\s+to|totals)\b"
_STATEMENT = re.compile(rf"(?P<subject>.*)(?P<copula>=|:|≈|\\approx\b|{_VERBS})(?P<rest>.*)", re.DOTALL)
# Directly before the copula: the statement is denied, only possible, or an inequality.
_DOUBT = re.compile(r"(?:\b(?:may|might|could|can|cannot|not|never)|n['’]t|[!<>])$")
_CONDITION = re.compile(r"(?:if|unless|whether|suppose|assuming|maybe|perhaps|possibly)\b[^,]*$", re.IGNORECASE)
_TERM = r"[\s($€£]*[-+−]?[0-9][0-9.,]*[)%\s]*"
_OPERATOR = r"(?:[-+−*/×÷·=x]|\\times|\\cdot)"
_CALCULATION = re.compile(
    rf"(?:[^0-9]*(?:=|:|{_VERBS}))?{_TERM}(?:{_OPERATOR}{_TERM})*"
    # Without a copula a word must come first, not the letter of an equation.
    rf"|[^0-9]*[^\W\d_]{{2}}\s{_TERM}(?:{_OPERATOR}{_TERM})+"
)
_SEVERAL = re.compile(r"[;&:]|[,.]\s|\b(?:and|or)\b")


def _parse_statement(text: str) -> tuple[Number, str] | None:
    """The one number that an answer states, and its symbol ("x" in "x = 5", else empty); None if there is none."""
    number = parse_number(text)
    if number is not None:
        return number, ""
    text = _clean(text)
    match = _STATEMENT.fullmatch(text) if len(text) <= _LONGEST_STATEMENT else None
    if match is None:
        return None
    subject, rest = match["subject"], match["rest"].strip()
    if subject.count("**") % 2:
        # Bold face that opens before the subject may close after the copula.
        subject, rest = subject.replace("**", ""), rest.removeprefix("**")
    subject, number = subject.strip(" \t\n$"), parse_number(rest)
    if number is None or _DOUBT.search(subject) or _CONDITION.match(subject):
        return None
    if re.search("[0-9]", subject):
        # "x = 5, y = 8" states two answers; "6 * 3 = 18" and "what they pay after 3 days is 18" state one.
        equation = match["copula"] in ("=", "≈", "\\approx")
        one = _CALCULATION.fullmatch(subject) if equation else not _SEVERAL.search(subject)
        if not one or match["copula"] == ":":
            return None
    return number, subject if len(subject) == 1 and subject.isalpha() else ""


def stated_number(text: str) -> Number | None:
    """The number that a marked answer states, bare or in a short sentence or equation.

    Beyond :func:`parse_number`: ``The final answer is 8.``, ``x = 8``, ``6 + 2 = 8``, ``Answer: **8**``. Refused:
    several numbers, ranges, alternatives, denials, bounds and questions.
    """
    stated = _parse_statement(text)
    return None if stated is None else stated[0]


def same_answer(answer: str, truth: str) -> bool:
    """Whether two answers are equal.

    Numbers (:func:`stated_number`) are compared exactly. Units are compared only if both answers have one; then one
    must begin with the other (``$18`` equals ``18 dollars per day``; ``5 cm`` is not ``5 m``). ``x = 5`` is not
    ``y = 5``. Other answers are compared as text without spaces and LaTeX decoration, with regard to case.
    """
    stated, true = _parse_statement(answer), _parse_statement(truth)
    if stated is None and true is None:
        return "".join(_clean(answer).split()) == "".join(_clean(truth).split())
    if stated is None or true is None:
        return False
    (number, symbol), (true_number, true_symbol) = stated, true
    if symbol and true_symbol and symbol != true_symbol:
        return False
    shared = min(len(number.unit), len(true_number.unit))
    return number.value == true_number.value and number.unit[:shared] == true_number.unit[:shared]


def canonical(answer: str) -> str:
    """The same string for equal answers, so that votes can be counted: ``$18.00`` and ``18`` give ``18``.

    Units are dropped; an answer that is no number is returned without spaces and LaTeX decoration.
    """
    number = stated_number(answer)
    return "".join(_clean(answer).split()) if number is None else str(number.value)


_DIGITS = re.compile(r"[0-9][0-9.,/]*")


def last_number(text: str) -> str | None:
    """The last number of a text, which is a guess at its answer if none is marked.

    Returns:
        The number as written, with its sign or as a fraction; None if there is none or the last one is unclear
        (``1.2.3``).
    """
    text = plain_characters(text)
    end = max(map(text.rfind, "0123456789")) + 1
    # Search only as far back as a number can reach; LaTeX spaces and braces that group digits become commas.
    near = re.sub(r"\{,\}|\\,", ",", text[max(0, end - _LONGEST_NUMBER) : end])
    runs = list(_DIGITS.finditer(near))
    if not runs or (runs[-1].start() == 0 and end > _LONGEST_NUMBER):
        return None
    before = near[: runs[-1].start()].rstrip("$€£¥")
    sign = "-" if re.search(r"(?:^|[^\w)\]])[-−]$", before) else ""
    written = sign + runs[-1][0].rstrip(".,/")
    return written if parse_number(written) is not None else None
