"""Render a chat and its beginnings by a chat template, each of them once.

Each turn of a chat needs a prompt and a text, so that rendering all of them takes time quadratic in the chat's length.
If the template only adds text (``chat.growth``), the full chat is rendered once and cut. The places of texts in the
full chat are also their places in a beginning, if the full text begins with that of the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.chat.growth import MARK
from stepjepa.chat.marks import Located, Message, Place, locate, locate_all
from stepjepa.chat.turn_text import Render


class _Cut(NamedTuple):
    """A chat rendered by a template that only adds text."""

    text: str
    starts: list[int]  # where the text of each message begins, and where that of the last one ends
    prompt: str  # the text behind the last message with a generation prompt
    end: str  # the text behind the last message without one


class Beginnings:
    """The texts of a chat's beginnings.

    Args:
        chat: normalised messages.
        render: renders some of them.
        turns: number of turns that are made of the chat.
        only_adds_text: the text of every chat begins with that of the chat's beginning.
    """

    def __init__(self, chat: Sequence[Message], render: Render, turns: int, *, only_adds_text: bool) -> None:
        self._chat, self._render, self._turns = chat, render, turns
        self._texts: dict[tuple[int, bool], str] = {}
        self._located: dict[str | None, Located | None] = {}
        self._cut = self._cut_up() if only_adds_text and turns > 1 else None

    def prompt(self, index: int) -> str:
        """Return the prompt of turn ``index``: the chat up to it with a generation prompt."""
        cut = self._cut
        return self._rendered(index, prompt=True) if cut is None else cut.text[: cut.starts[index]] + cut.prompt

    def full(self, index: int) -> str:
        """Return the chat up to and with message ``index``."""
        cut = self._cut
        return self._rendered(index + 1, prompt=False) if cut is None else cut.text[: cut.starts[index + 1]] + cut.end

    def places(self, index: int, begin: int, opened: str | None) -> list[Place]:
        """Find the texts of the messages up to ``index`` in :meth:`full`.

        Args:
            index: of the last message.
            begin: the place behind which texts of the last message are searched for that can't be marked.
            opened: the tag of a thought inside which a content may begin, see ``marks.locate``.
        """
        text = self.full(index)
        if self._turns > 1 and (located := self._located_in_full(opened)) is not None:
            places = located.beginning(text, index + 1)
            if places is not None:
                return places
        return locate(self._render, self._chat[: index + 1], text, range(index + 1), begin=begin, opened=opened)

    def places_in_prompt(self, index: int, opened: str | None) -> list[Place]:
        """Find the texts of the messages in front of ``index`` in :meth:`prompt`."""

        def render(messages: Sequence[Message]) -> str:
            return self._render(messages, prompt=True)

        return locate(render, self._chat[:index], self.prompt(index), range(index), opened=opened)

    def _rendered(self, count: int, *, prompt: bool) -> str:
        if (count, prompt) not in self._texts:
            self._texts[count, prompt] = self._render(self._chat[:count], prompt=prompt)
        return self._texts[count, prompt]

    def _located_in_full(self, opened: str | None) -> Located | None:
        """Return the places of all texts in the whole chat; None if they can't be marked at once."""
        if opened not in self._located:
            try:
                text = self.full(len(self._chat) - 1)
            except UserError:
                return None  # raised again for the turn that can't be rendered
            self._located[opened] = locate_all(self._render, self._chat, text, opened=opened)
        return self._located[opened]

    def _cut_up(self) -> _Cut | None:
        """Render the full chat and cut it at the marks; None if the marks are not in their places."""
        try:
            text, marked = self._rendered(len(self._chat), prompt=False), self._render(self._chat, marked=True)
            head, _, prompt = self._render(self._chat, prompt=True, marked=True).rpartition(MARK)
        except UserError:
            return None  # raised again for the turn that can't be rendered
        before, *messages, end = marked.split(MARK)
        skipped = len(self._chat) - len(messages)  # a system message in front, which the template adds
        roles = [message["role"] for message in self._chat]
        if (
            marked.replace(MARK, "") != text
            or head != marked.rpartition(MARK)[0]  # a text that add_generation_prompt decides
            or MARK in text
            or skipped not in (0, 1)
            or "assistant" in roles[: skipped + 1]
        ):
            return None
        starts = [len(before)] * skipped + list(accumulate(map(len, messages), initial=len(before)))
        return _Cut(text, starts, prompt, end)
