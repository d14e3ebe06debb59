"""The words of the generated problems: who, what, and how a story and its solution tell an operation."""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """A noun in both numbers."""

    singular: str
    plural: str


class Phrase(NamedTuple):
    """How one operation is told.

    Fields in braces: ``who`` has the amount before, ``other`` is somebody new; ``a_things`` is that amount (openings
    only, a later one is never told); ``n`` is the number by which it changes, ``n_things`` and ``n_boxes`` with the
    noun; ``equation`` is "4 * 3 = 12 pens".

    Attributes:
        story: a sentence or two of the question.
        solution: the step of the solution.
        passes_on: whether the result is what ``other`` has, not ``who``.
    """

    story: str
    solution: str
    passes_on: bool = False


def counted(number: int, noun: Noun) -> str:
    """A number with its noun: 1 pen, 2 pens."""
    return f"{number} {noun.singular if number == 1 else noun.plural}"


NAMES = (
    *("Mia", "Tom", "Ben", "Anna", "Leo", "Sara", "Max", "Zoe"),
    *("Nina", "Paul", "Emma", "Jack", "Lily", "Omar", "Ruth", "Sam"),
)

_PLURALS = {"box": "boxes", "peach": "peaches"}


def _nouns(text: str) -> tuple[Noun, ...]:
    return tuple(Noun(word, _PLURALS.get(word, f"{word}s")) for word in text.split())


THINGS = _nouns("apple badge ball bead book button card coin cookie marble nut peach pen shell stamp sticker")
BOXES = _nouns("bag basket box jar")

# How a problem begins; both numbers are told.
OPENINGS = {
    "add": (
        Phrase("{who} has {a_things} and buys {n} more.", "{who} buys {n} more: {equation}."),
        Phrase(
            "{who} finds {a_things} in the morning and {n} more in the evening.", "{who} finds both lots: {equation}."
        ),
        Phrase("{who} has {a_things}. Then {other} brings {n} more.", "With what {other} brings: {equation}."),
    ),
    "subtract": (
        Phrase("{who} has {a_things} and gives {n} to {other}.", "{who} gives {n} away: {equation}."),
        Phrase("{who} buys {a_things} but loses {n} of them on the way.", "{who} loses {n}: {equation}."),
        Phrase("{who} takes {a_things} to the market and sells {n} of them.", "{who} sells {n}: {equation}."),
    ),
    "multiply": (
        Phrase("{who} fills {n_boxes} with {a_things} each.", "{who} fills {n_boxes}: {equation}."),
        Phrase("{who} collects {a_things} every day for {n} days.", "{who} collects for {n} days: {equation}."),
        Phrase("{other} has {a_things}. {who} has {n} times as many.", "{who} has {n} times as many: {equation}."),
    ),
    "share": (
        Phrase(
            "{other} shares {a_things} equally among {n} children, and {who} is one of them.",
            "{who} gets one share: {equation}.",
        ),
        Phrase(
            "{other} packs {a_things} equally into {n_boxes} and gives one {box} to {who}.",
            "{who} gets one {box}: {equation}.",
        ),
    ),
    "double": (
        Phrase("{other} has {a_things}. {who} has twice as many.", "{who} has twice as many: {equation}."),
        Phrase("{who} has {a_things} and then wins as many again.", "{who} wins as many again: {equation}."),
    ),
    "halve": (
        Phrase("{other} has {a_things}. {who} has half as many.", "{who} has half as many: {equation}."),
        Phrase("{who} has {a_things} and gives half of them to {other}.", "{who} keeps half: {equation}."),
    ),
}

# How it goes on; only the number by which the amount changes is told.
TURNS = {
    "add": (
        Phrase("Then {who} buys {n_things}.", "{who} buys {n} more: {equation}."),
        Phrase("After that {other} gives {who} {n_things}.", "With what {other} gives: {equation}."),
        Phrase("{other} has {n_things} more than {who}.", "{other} has {n} more: {equation}.", passes_on=True),
    ),
    "subtract": (
        Phrase("Then {who} gives {n_things} to {other}.", "{who} gives {n} away: {equation}."),
        Phrase("Later {who} loses {n} of them.", "{who} loses {n}: {equation}."),
        Phrase("{other} has {n_things} fewer than {who}.", "{other} has {n} fewer: {equation}.", passes_on=True),
    ),
    "multiply": (
        Phrase(
            "{other} has {n} times as many {things} as {who}.",
            "{other} has {n} times as many: {equation}.",
            passes_on=True,
        ),
        Phrase(
            "{other} needs {n} times as many {things} as {who} and buys them all.",
            "{other} buys {n} times as many: {equation}.",
            passes_on=True,
        ),
    ),
    "share": (
        Phrase(
            "{who} shares them all equally among {n} friends, and {other} is one of them.",
            "{other} gets one share: {equation}.",
            passes_on=True,
        ),
        Phrase(
            "{who} packs them all equally into {n_boxes} and gives one {box} to {other}.",
            "{other} gets one {box}: {equation}.",
            passes_on=True,
        ),
    ),
    "double": (
        Phrase(
            "{other} has twice as many {things} as {who}.", "{other} has twice as many: {equation}.", passes_on=True
        ),
        Phrase("Then {who} wins as many again.", "{who} wins as many again: {equation}."),
    ),
    "halve": (
        Phrase("{other} has half as many {things} as {who}.", "{other} has half as many: {equation}.", passes_on=True),
        Phrase("Then {who} gives half of them to {other}.", "{who} keeps half: {equation}."),
        Phrase("Later {who} sells half of them.", "{who} sells half: {equation}."),
    ),
}

QUESTIONS = (
    "How many {things} does {who} have now?",
    "How many {things} does {who} have in the end?",
    "How many {things} does {who} end up with?",
)
