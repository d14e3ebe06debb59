"""The tokens that end a turn of the assistant in a chat template, derived from what it renders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from stepjepa.base.common_beginning import common_length
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.probes import ANSWER, ASKED, OTHER, QUESTION, REPLY, TOOL, make_message
from stepjepa.chat.special_tokens import matched_tokens
from stepjepa.chat.turn_text import Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Attempt(Protocol):
    """Renders messages; returns None if the template refuses them."""

    def __call__(self, messages: Sequence[JsonObject], /, *, tools: Tools = None) -> str | None: ...


class TurnEnds:
    """The stop tokens of a chat template: behind a text, behind a tool call, or the marker of the next role.

    Args:
        tokenizer: of the template.
        attempt: renders messages as they are served; it writes ``QUESTION`` and ``REPLY``.
        call: a message with a tool call; None if the template writes no calls.

    Attributes:
        added_token: matches an added token of the tokenizer.
        appended: no template text ends a turn, so the tokenizer's end-of-text token is appended.
        tokens: every token that may end a turn.
        ids: their ids.
        closer: the text that the template writes between a content and the stop token.

    Raises:
        UserError: neither the template nor the tokenizer has such a token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, attempt: Attempt, call: JsonObject | None) -> None:
        self._eos_token, self._bos_token = tokenizer.eos_token, tokenizer.bos_token
        # Without added tokens, (?!) matches nothing.
        self.added_token = re.compile("|".join(map(re.escape, matched_tokens(tokenizer))) or "(?!)")
        pair = attempt([QUESTION, REPLY]) or ""
        content_end = pair.index(ANSWER) + len(ANSWER)
        self._closing = self._find_closing(attempt, pair, content_end)
        self._followers = self._find_followers(attempt) if self._closing is None else {}
        self.appended = self._closing is None and "user" not in self._followers
        ends = [self._closing or self._follower("user"), *self._followers.values()]
        if call is not None:
            text = attempt([QUESTION, call], tools=[TOOL]) or ""
            ends.append(self.split(text, text.rindex(OTHER) + len(OTHER), "tool")[1])
        self.tokens = list(dict.fromkeys(ends))
        self.ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in self.tokens]
        text, stop = self.split(pair, content_end, "user")
        self.closer = text[content_end:].removesuffix(stop)

    def _find_closing(self, attempt: Attempt, pair: str, content_end: int) -> str | None:
        """Return the token that closes a turn; None if the template closes none.

        Several tokens may stand behind a content (``<|END_RESPONSE|><|END_OF_TURN_TOKEN|>``). Of those that stand there
        in earlier turns, too, the eos token ends the turn, or else the last one in front of a token that begins a turn.

        Args:
            attempt: renders messages.
            pair: a question and its answer.
            content_end: the end of the answer's content in it.
        """
        tokens = list(self.added_token.finditer(pair, content_end))
        followed = attempt([QUESTION, REPLY, make_message("user", OTHER)]) or ""
        place = followed.find(ANSWER) + len(ANSWER)
        common = content_end + common_length(pair[content_end:], followed[place:])
        always = [token[0] for token in tokens if token.end() <= common]
        if self._eos_token in always:
            return str(self._eos_token)
        start = (attempt([QUESTION]) or "").partition(ASKED)[0]
        first = next((token[0] for token in self.added_token.finditer(start) if token[0] != self._bos_token), None)
        closing = list(takewhile(lambda token: token not in (first, self._bos_token), always))
        return closing[-1] if closing else tokens[0][0] if tokens else None

    def _find_followers(self, attempt: Attempt) -> dict[str, str]:
        """Return role of the next message -> token that follows an answer, for a template that closes no turn."""
        followers = {}
        for role in ("user", "tool"):
            text = attempt([QUESTION, REPLY, make_message(role, OTHER)]) or ""
            start, end = text.find(ANSWER) + len(ANSWER), text.find(OTHER)
            marker = self.added_token.match(text[start:end].lstrip()) if start < end else None
            if marker is not None:
                followers[role] = marker[0]
        return followers

    def _follower(self, role: str | None) -> str:
        """Return the token that ends a turn that the template does not close; arguments as for :meth:`split`."""
        marker = self._followers.get(role or "user", self._eos_token)
        if marker is None:
            raise UserError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        return str(marker)

    def split(self, text: str, own_end: int, following: str | None) -> tuple[str, str]:
        """Return the text of a chat up to the stop token of its last turn, and this token.

        Args:
            text: the chat up to the turn.
            own_end: the end of the message's texts in it.
            following: the role of the next message; None behind the last one.

        Raises:
            UserError: neither the template nor the tokenizer has such a token.
        """
        behind = list(self.added_token.finditer(text, own_end)) if self._closing else []
        if behind:
            closing = next((token for token in behind if token[0] == self._closing), behind[-1])
            return text[: closing.end()], closing[0]
        stop = self._follower(following)
        if stop == self._eos_token and stop not in self._followers.values():
            text = text[: max(own_end, len(text.rstrip()))]
        return text + stop, stop
