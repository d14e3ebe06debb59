"""Views of a record as texts, before they are tokenised, and their places among the tokens."""

from __future__ import annotations

from typing import NamedTuple

from stepjepa.chat.tokens import Tokens
from stepjepa.chat.turn_text import Rendered, Turn
from stepjepa.data.steps import find_steps
from stepjepa.views.sequences import Ids, View


class ViewText(NamedTuple):
    """A view as characters ``start`` to ``end`` of a rendered text, a step's separator included."""

    text: Turn | Rendered  # the turn that contains it, or a message alone
    start: int
    end: int
    predictors: int = 0  # number of predictor tokens in it

    @property
    def in_main(self) -> bool:
        """Whether the view is a part of a turn, behind its prompt."""
        return isinstance(self.text, Turn)

    def place(self, tokens: Tokens) -> tuple[int, int]:
        """Return the range ``[start, end)`` of the view in the tokens of its text.

        A token belongs to the step in which it begins, so that a full stop fused with a blank line closes its step; the
        first step takes the token that reaches into the content from outside.
        """
        begins = any(self.start == start for start, _ in self.text.spans)
        if isinstance(self.text, Turn):
            begins |= self.start == self.text.reasoning[0]
        first = tokens.first_overlapping(self.start) if begins else tokens.first_from(self.start)
        return first, tokens.first_from(self.end)

    def located(self, tokens: Tokens, main: Ids) -> View:
        """Return the view as a range of tokens: of ``main`` if it is a part of a turn, else of its own text."""
        return View(main if self.in_main else tokens.ids, *self.place(tokens), self.in_main, self.predictors)


class PairText(NamedTuple):
    """A pair of views as texts, and the turn that they belong to."""

    turn: int  # its number among the trained turns of a record
    first: ViewText
    second: ViewText

    @property
    def views(self) -> tuple[ViewText, ViewText]:
        """Both views, in their order in the record."""
        return self.first, self.second


def step_views(turn: Turn, separator: str, part: str = "content") -> list[ViewText]:
    """Return the reasoning steps of a turn's ``content`` or of its ``reasoning``.

    Args:
        turn: the turn of the assistant.
        separator: a key of the ways to split, such as ``blank`` or ``line``; see ``find_steps``.
        part: ``content`` or ``reasoning``.
    """
    start, end = turn.reasoning if part == "reasoning" else turn.spans[turn.message]
    steps = find_steps(turn.text[start:end], separator)
    return [ViewText(turn, start + first, start + last) for first, last in steps]
