r"""Extract answers from generated text and compare them: as text, or as answers to a mathematical problem.

A mathematical answer is read only where it is marked: in ``\boxed{...}`` or behind ``####``. Two answers are compared
as numbers, or as text if neither is a number; a number never equals a non-number. A model may generate any text, so
the time is linear in its length.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from stepjepa.chat.content import content_part

# Narrow and non-breaking spaces, which group the digits of a number.
_GROUPING_SPACES = "\u2009\u202f\u00a0"
_MOST_MARKS = 100
# Other programs leave </s> or <|im_end|> in their output.
_SPECIAL_TOKEN = re.compile(r"</s>|<\|")
_LAST_TOKENS = re.compile(r"(?:</s>|<\|\w{1,40}\|>)\Z")
_CODE = re.compile(
    r"(?P<fence>```|~~~)(?:\w*[^\S\n]*\n)?(?P<block>(?:(?!(?P=fence)).)+)(?P=fence)|`(?P<inline>[^`\n]+)`", re.DOTALL
)


@cache
def _plain_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Nd":
        return str(unicodedata.decimal(character))
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFF01 + ord("!"))
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if kind == "Zs" and character not in _GROUPING_SPACES:
        return " "
    return "" if kind == "Cf" else character


def plain_characters(text: str) -> str:
    """Convert digits of all scripts and full-width forms to ASCII, ``½`` to `` 1/2``, spaces to plain ones; return NFC.

    Invisible characters are removed; the narrow spaces that group digits stay.
    """
    return text if text.isascii() else composed("".join(map(_plain_character, text)))


def before_special_token(text: str) -> str:
    """Return a text up to its first ``</s>`` or ``<|``, which begins a special token."""
    return _SPECIAL_TOKEN.split(text, maxsplit=1)[0]


def answer_start(text: str) -> str:
    """Return the first line of an answer in plain characters, without enclosing code fence, up to a special token."""
    start = before_special_token(plain_characters(text.strip()[:_LONGEST]))
    return strip_code_fence(start).partition("\n")[0]


def strip_code_fence(text: str) -> str:
    """Remove a code fence or backticks that enclose the whole answer, and a special token at its end."""
    text = _LAST_TOKENS.sub("", text.strip()).strip()
    code = _CODE.fullmatch(text)
    return (code["block"] or code["inline"]).strip() if code else text


def text_scores(generated: str, truth: str) -> dict[str, bool | float]:
    """Return whether the generated text equals the truth (``exact``), begins with it (``prefix``) or ``contains`` it.

    Both are compared in Unicode's form NFC, to which most tokenizers normalise. Thoughts in the truth are ignored.
    """
    answer, full_truth = composed(generated).strip(), composed(truth).strip()
    truth = content_part(full_truth).strip() or full_truth
    return {"exact": answer == truth, "prefix": answer.startswith(truth), "contains": truth in answer}


def composed(text: str) -> str:
    """Return a text in Unicode's form NFC; unchanged if a long run of combining marks would make sorting slow."""
    if text.isascii():
        return text
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks > _MOST_MARKS:
            return text
    return unicodedata.normalize("NFC", text)


# Braces nest twelve deep at most; those behind a backslash do not group.
_CONTENT = r"(?:[^{}\\]|\\.)*+"
for _ in range(12):
    _CONTENT = rf"(?:[^{{}}\\]|\\.|\{{{_CONTENT}\}})*+"
# After "####" comes a space or the beginning of a number; or mark and answer are together in bold face or in backticks.
# Without possessive lookaheads, which Python 3.11.2 gets wrong.
_MARKED = re.compile(
    rf"\\boxed\s*+\{{(?P<box>(?s:{_CONTENT}))\}}"
    rf"|(?<!\S)####(?:[ \t{_GROUPING_SPACES}]+(?=[^\s#])|(?=[-+−.\d$€£¥*`\\(]))(?P<line>(?:(?!\\boxed\b)[^\n])+)"
    r"|(?P<around>\*\*|`)####[ \t]*(?P<inside>[^\s*`][^*`\n]*)(?P=around)"
)


def marked_answers(text: str) -> list[str]:
    r"""Return the marked answers of a text, in order: contents of ``\boxed{...}``, the rest of a line after ``####``.

    A box that is not closed or is empty marks nothing. Of nested boxes the innermost counts, and a box in the line
    instead of the line. White space must precede ``####``, except in ``**#### 18**``. Digits of any script are returned
    as ASCII, invisible characters are removed, and a line ends at a special token.
    """
    text, answers = plain_characters(text), list[str]()
    for match in _MARKED.finditer(text):
        if match["box"] is not None:
            answers += marked_answers(match["box"]) if "\\boxed" in match["box"] else [match["box"].strip()]
        elif not text.startswith("\\boxed", match.end()):
            answers.append(before_special_token(match["line"] or match["inside"]).strip())
    return [answer for answer in answers if answer]


class Number(NamedTuple):
    """A number as an answer states it."""

    value: Fraction  # exact: 0.1 is a tenth
    unit: tuple[str, ...]  # its words, in the singular and lower case


_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    r"(?:(?:≈|\\approx\b|(?i:about|approximately|approx\.?|roughly|around)\s)\s*)?"
    r"(?P<sign>[+-]?)\s*+(?P<currency>[$€£¥₹]?)\s*+(?P<inner_sign>[+-]?)\s*+"
    rf"(?:(?:(?P<whole>{_INTEGER})\s+)?(?P<over>{_INTEGER})\s*/\s*(?P<under>{_INTEGER})"
    rf"|(?P<decimal>(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,2}})?))"
    # The number must not continue, as in 1,2 or 1.2.3 or 1/2/3.
    r"(?![0-9]|[.,/]\s*[0-9])"
)
_FRACTION = re.compile(r"\\frac\s*(?:\{\s*([+-]?[0-9,]+)\s*\}\s*\{\s*([0-9,]+)\s*\}|([0-9])\s*([0-9]))")
_PARTS = ("whole", "over", "under", "decimal")
_WORD = r"[^\W\d_]+(?:\^\{?-?[0-9]\}?|[²³])?"
_UNIT = re.compile(rf"(?P<sign>[%$€£¥₹]?)\s*(?P<words>(?:{_WORD}(?:[ .·*-]+{_WORD}){{0,4}})?)")
_SIGNS = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "%": "percent"}
_SIGNS |= {"usd": "dollar", "eur": "euro"}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Any other letter after a number is algebra (5x, 2n) or a scale (3k, 2M), except in a script without case (5元).
_LETTER_UNITS = frozenset("mglLshWVJ")
# "18 or more" and "3 to one" do not mean the number before these words.
_NOT_UNITS = re.compile(
    r"\b(?:or|and|to|not|plus|minus|times|by|over|out|if|but|is|are|was|were)\b|^(?:squared|cubed|factorial|pi|sqrt|log|ln|sin|cos|tan|mod)\b",
    re.IGNORECASE,
)
# Maximum length of an answer that is parsed as a number. Longer answers are compared as text, with their decoration.
_LONGEST = 1000

_DOLLAR = "\ue000"
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")
_REPLACEMENTS = (
    (r"\\[dt]frac", r"\\frac"),
    (r"\\left(?![a-z])|\\right(?![a-z])", ""),
    (r"\{,\}", ","),
    # Narrow spaces group digits; an escaped space or a tie separates words.
    (rf"\\[,!;:]|[{_GROUPING_SPACES}]", ""),
    (r"\\ |~", " "),
    (r"\\%", "%"),
    # Restored after delimiters are removed: an escaped dollar sign is no delimiter.
    (r"\\\$", _DOLLAR),
    (r"\^\s*(?:\{\s*)?\\circ\s*\}?|°", " degrees "),
    (r"[−–]", "-"),
    # An exponent behind \text{cm}; bold face and formulas inside a sentence, but not the power 2**3.
    (r"(?<=[^\W\d_])\s+\^", "^"),
    (r"(?<![\w)])\*\*([^*\s][^*]*)\*\*(?![\w(])", r"\1"),
    (r"\\[()]", ""),
    # Scientific notation, 2 \times 10^3.
    (r"(?<=[0-9])\s*(?:\\times|\\cdot|×|·)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,2})\s*\}|([+-]?[0-9]{1,2}))", r"e\1\2"),
)
_DELIMITERS = {"$$": "$$", "$": "$", r"\(": r"\)", r"\[": r"\]", "**": "**", "*": "*", "`": "`", "{": "}"}


def _clean(text: str) -> str:
    """Remove decoration from an answer: delimiters of formulas, bold face, LaTeX spacing, a full stop at the end."""
    text = plain_characters(text)
    if len(text) > _LONGEST:
        return text.strip()
    while (unwrapped := _WRAPPER.sub(r" \1 ", text)) != text:
        text = unwrapped
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    previous = None
    while text != previous:
        previous = text
        text = text.strip().removesuffix(".").strip()
        for opening, closing in _DELIMITERS.items():
            inner = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and closing not in inner:
                text = inner
                break
    return text.replace(_DOLLAR, "$")


def parse_number(text: str) -> Number | None:
    r"""Parse an answer that is a number, perhaps with a unit; None if it is anything else.

    Understood: ``1,000``, ``1{,}000``, ``$18``, ``3/4``, ``\frac{3}{4}``, ``1 1/2``, ``½``, ``2\times 10^3``, units in
    words, ``3 million``, LaTeX spacing and text commands, digits of any script. Percent is a unit: ``50%`` equals
    ``50``, not ``0.5``. Refused are several numbers, calculations, letters that stand for values.
    """
    text = _FRACTION.sub(r" \1\3/\2\4 ", _clean(text)).strip()
    match = _NUMBER.match(text) if len(text) <= _LONGEST else None
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    unit = _UNIT.fullmatch(text[match.end() :].replace("/", " per ").strip())
    if unit is None or _NOT_UNITS.search(unit["words"]):
        return None
    words = re.split(r"[ .·*-]+", unit["words"]) if unit["words"] else []
    letter = re.sub(r"(?<=.)(?:\^.*|[²³])$", "", words[0]) if words else ""
    # "18 a day" and "6 p.m."
    is_word = len(words) > 1 and letter in {"a", "p"}
    if len(letter) == 1 and not is_word and letter not in _LETTER_UNITS and unicodedata.category(letter) != "Lo":
        return None
    parts = {name: Fraction(Decimal((match[name] or "0").replace(",", ""))) for name in _PARTS}
    if match["under"] and parts["under"] == 0:
        return None
    value = parts["whole"] + parts["over"] / parts["under"] if match["under"] else parts["decimal"]
    words = [word.lower().removesuffix("s") if len(word) > 2 else word.lower() for word in words]
    while words and words[0] in _SCALES:
        value *= _SCALES[words.pop(0)]
    signs = [_SIGNS[sign] for sign in (match["currency"], unit["sign"]) if sign]
    negative = "-" in (match["sign"], match["inner_sign"])
    return Number(-value if negative else value, (*signs, *(_SIGNS.get(word, word) for word in words)))


_VERBS = r"\b(?:is|are|was|were|equals)\b"
_STATEMENT = re.compile(rf"(?P<subject>.*)(?P<copula>=|:|≈|\\approx\b|{_VERBS})(?P<rest>.*)", re.DOTALL)
_TERM = r"[\s($€£]*[-+−]?[0-9][0-9.,]*[)%\s]*"
_CALCULATION = re.compile(rf"(?:[^0-9]*(?:=|:|{_VERBS}))?{_TERM}(?:(?:[-+−*/×÷·=x]|\\times|\\cdot){_TERM})*")


def stated_number(text: str) -> Number | None:
    """Return the number that an answer states: ``The final answer is 8.``, ``x = 8``, ``6 + 2 = 8``; else None."""
    number = parse_number(text)
    if number is not None:
        return number
    text = _clean(text).replace("**", "")
    match = _STATEMENT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    subject, number = match["subject"].strip(" \t\n$"), parse_number(match["rest"])
    if number is None or subject.endswith(("!", "<", ">", "\\not")):
        return None
    # "x = 5, y = 8" states two answers, "6 * 3 = 18" one.
    calculated = match["copula"] != ":" and _CALCULATION.fullmatch(subject)
    return number if calculated or not re.search("[0-9]", subject) else None


_FIRST_NUMBER = re.compile(
    r"(?:(?<![\w)])(?P<sign>[-−–]))?\s?[$€£¥₹]?(?P<inner>-)?(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)"
)


def first_number(text: str) -> str | None:
    """Return a text unchanged if it states a number, else the first number in it; None if there is none.

    Digits that commas join are one number, as in the official evaluation of GSM8K: ``1,00,000`` is not 1.
    """
    if stated_number(text) is not None:
        return text
    match = _FIRST_NUMBER.search(plain_characters(text))
    if match is None:
        return None
    number = ("-" if match["sign"] or match["inner"] else "") + match["digits"]
    return number if parse_number(number) is not None else number.replace(",", "")


def same_answer(answer: str, truth: str) -> bool:
    """Return whether two answers are equal: as exact numbers, or else as text without spaces and LaTeX decoration.

    Units are compared only if both answers have one; then one must begin with the other (``$18`` equals ``18 dollars
    per day``; ``5 cm`` is not ``5 m``).
    """
    number, true_number = stated_number(answer), stated_number(truth)
    if number is None and true_number is None:
        return "".join(_clean(answer).split()) == "".join(_clean(truth).split())
    if number is None or true_number is None:
        return False
    shared = min(len(number.unit), len(true_number.unit))
    return number.value == true_number.value and number.unit[:shared] == true_number.unit[:shared]


def canonical(answer: str) -> str:
    """Return the same string for equal answers, to count votes: ``$18.00`` and ``18`` give ``18``."""
    number = stated_number(answer)
    return "".join(_clean(answer).split()) if number is None else str(number.value)
