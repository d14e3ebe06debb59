"""Chats as text: a rendered chat, and a trained turn of the assistant, which ``chat.turns`` and ``chat.forms`` make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stepjepa.base.json_object import JsonObject

Tools = Sequence[JsonObject] | None
"""Descriptions of functions, as templates read them."""

Variables = Mapping[str, object] | None
"""Values of variables of a template (``chat_template_kwargs``)."""


class Render(Protocol):
    """Renders a normalised chat, perhaps with a generation prompt, or with ``growth.MARK`` around each message."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], /, *, prompt: bool = False, marked: bool = False
    ) -> str: ...


class Rendered(NamedTuple):
    """A chat as text."""

    text: str
    # The start and end (exclusive) of each message's content; (0, 0) if the template leaves it out.
    spans: tuple[tuple[int, int], ...]


class Turn(NamedTuple):
    """A trained turn as text; its spans are ``[start, end)``, in characters."""

    message: int  # index of its message in the chat
    text: str  # prompt and answer, which ends with the stop token
    answer: int  # the character at which the answer begins: ``text[:answer]`` is the served prompt
    # The span of the content of each message up to this one, without thoughts; (0, 0) if it is missing.
    spans: tuple[tuple[int, int], ...]
    reasoning: tuple[int, int]  # the span of this message's thought; (0, 0) without one
    own: tuple[tuple[int, int], ...]  # the spans of this message's texts, in which special tokens are plain text
    stop: str  # the token that ends the turn
    # The same as ``own`` for the prompt; empty if a server reads special tokens in it as such.
    prompt_own: tuple[tuple[int, int], ...] = ()
    untrained: str = ""  # the text that the template writes between the stop token and the next turn
