"""Chat templates: render messages, and find each message's content in the text.

What differs between models is derived from the template, not from the model's name: whether it has a system role,
whether it accepts a lone assistant turn, which token ends a turn, what precedes an answer.
"""

from __future__ import annotations

import datetime
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.chat.limits import refuse_runaway
from stepjepa.data.tools import uses_tools
from stepjepa.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Span = tuple[int, int]

# Some templates write today's date into the system turn; a run must not depend on the day it starts.
PINNED_DATE = datetime.date(2024, 7, 26)

# Chats that exercise everything that a template writes.
_CHATS = (("system", "user", "assistant"), ("user", "assistant"), ("assistant",))

_ASKED, _ANSWERED = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}

# Ways in which templates trim contents; a template may trim one role and not another.
_TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    lambda content: content.lstrip("\n"),
    str.rstrip,
)

# Private-use characters: no template writes them and no ordinary text holds them.
_OPEN, _CLOSE = "\ue000", "\ue001"


class Rendered(NamedTuple):
    """A chat as text."""

    text: str
    # For each message the start and end (exclusive) of its content; (0, 0) if the template leaves it out.
    spans: tuple[Span, ...]
    # For each message the end (exclusive) of the special token that closes its turn, or of its content if none does.
    turn_ends: tuple[int, ...]


_WITHIN_LIMITS: set[str] = set()
"""Templates that passed ``refuse_runaway``."""


def _reason(error: Exception) -> str:
    """The message of an error raised by a template, with the template's line number if known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    told = str(error).strip() or type(error).__name__
    return told if line is None else f"line {line}: {told}"


def refuse_slow(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a slow tokenizer, which can't give the positions of its tokens in a text.

    Raises:
        UserError: the tokenizer has no fast version.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("the tokenizer has no fast version, and token positions need one; convert it first")


class ChatTemplate:
    """The chat template of a tokenizer, with properties derived from it.

    Args:
        tokenizer: a fast tokenizer with a chat template; it is not changed.

    Attributes:
        has_system_role: the template accepts a system message; otherwise its text is put before the first user message.
        lone_assistant: the template accepts an assistant message alone; otherwise it is rendered as a user turn.
        end_of_turn: the special token that closes an assistant turn.
        appends_end_of_turn: the template closes no assistant turn, so the tokenizer's eos token is appended.

    Raises:
        UserError: the tokenizer is slow, there is no chat template, it can't render a chat, or no token can end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        refuse_slow(tokenizer)
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; use an instruction-tuned model, pass --chat_template FILE, or "
                "train without one (--plain)"
            )
        self._tokenizer = tokenizer
        self._source = tokenizer.get_chat_template()
        # Rendered without the tokenizer's method, which takes longer than the template and passes no functions.
        self._variables: dict[str, Any] = {
            **tokenizer.special_tokens_map,
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            "date_string": PINNED_DATE.strftime("%d %b %Y"),
            "strftime_now": PINNED_DATE.strftime,
        }
        self._skeletons: dict[tuple[str, ...], list[str] | None] = {}
        if self._source not in _WITHIN_LIMITS:
            refuse_runaway(self._try)
            _WITHIN_LIMITS.add(self._source)
        self._compile()
        self.has_system_role = self._skeleton(("system", "user", "assistant")) is not None
        self.lone_assistant = self._skeleton(("assistant",)) is not None
        skeleton = self._skeleton(("user", "assistant"))
        if skeleton is None:
            reason = self._why_refused([_ASKED, _ANSWERED]) or "a content is not in its text"
            raise UserError(f"the chat template does not render a user and an assistant message ({reason}); check it")
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials |= set(tokenizer.all_special_tokens)
        # The longest token wins where one begins another. Without special tokens, (?!) matches nothing.
        longest_first = sorted(specials, key=len, reverse=True)
        found = re.search("|".join(map(re.escape, longest_first)) or "(?!)", skeleton[-1])
        self.appends_end_of_turn = found is None
        end_of_turn = found[0] if found else tokenizer.eos_token
        if end_of_turn is None:
            raise UserError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        self.end_of_turn: str = end_of_turn
        self.end_of_turn_ids: tuple[int, ...] = (int(tokenizer.convert_tokens_to_ids(self.end_of_turn)),)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Render a whole chat.

        Args:
            messages: of the chat.
            tools: schemas of functions that can be called.

        Raises:
            UserError: the template refuses the messages, or rewrites a content so that it can't be found in the text.
        """
        if not self.has_system_role and messages and messages[0]["role"] == "system":
            return self._render_folded(messages, tools)
        if tools or uses_tools(messages):
            return self._render_with_tools(messages, tools)
        contents = [message["content"] for message in messages]
        roles = tuple([message["role"] for message in messages])
        try:
            text = self._apply(messages)
        except Exception as error:  # a template is a program and can raise any error
            raise UserError(
                f"the chat template refuses these messages ({_reason(error)}); change them, or name another "
                "--chat_template"
            ) from None
        spans = self._spans_by_skeleton(text, roles, contents) or self._spans_by_search(text, roles, contents)
        if self.appends_end_of_turn and roles[-1] == "assistant":
            text = text[: spans[-1][1]] + self.end_of_turn
        limits = [start for start, _ in spans[1:]] + [len(text)]
        ends = [self._turn_end(text, end, limit) for (_, end), limit in zip(spans, limits, strict=True)]
        return Rendered(text, tuple(spans), tuple(ends))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message by itself, as a view that sees nothing else.

        An assistant message is rendered as a user turn if the template refuses it alone.
        """
        if role == "assistant" and not self.lone_assistant:
            role = "user"
        return self.render([{"role": role, "content": content}])

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Rendered:
        """Render what precedes the answer in training, which is the prompt for generation.

        Args:
            messages: the chat without its last assistant message.
            tools: schemas of functions that can be called.
        """
        whole = self.render([*messages, {"role": "assistant", "content": _OPEN}], tools)
        # A blank before the answer is part of the answer's first token in most vocabularies.
        text = whole.text[: whole.spans[-1][0]].rstrip(" ")
        return Rendered(text, whole.spans[:-1], whole.turn_ends[:-1])

    def _apply(self, messages: Sequence[Message], **more: Any) -> str:
        return str(self._compiled.render(self._variables | more, messages=messages))

    def _compile(self) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            self._compiled = _compile_jinja_template(self._source)
        except MemoryError:  # see refuse_runaway
            raise
        except Exception as error:  # from Jinja's parser, or from constants evaluated while compiling
            raise UserError(f"the chat template can't be read: {_reason(error)}") from None

    def _try(self) -> None:
        """Compile the template, which evaluates its constants, and render the short chats."""
        self._compile()
        for roles in _CHATS:
            self._make_skeleton(roles)

    def _why_refused(self, messages: Sequence[Message]) -> str | None:
        try:
            self._apply(messages)
        except Exception as error:  # as in render
            return _reason(error)
        return None

    def _skeleton(self, roles: tuple[str, ...]) -> list[str] | None:
        """The template's own text before, between and after the contents; None if it refuses such a chat."""
        if roles not in self._skeletons:
            self._skeletons[roles] = self._make_skeleton(roles)
        return self._skeletons[roles]

    def _make_skeleton(self, roles: tuple[str, ...]) -> list[str] | None:
        marks = [f"{_OPEN}{index}{_CLOSE}" for index in range(len(roles))]
        try:
            rest = self._apply([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        except MemoryError:  # see refuse_runaway
            raise
        except Exception:  # any other error means that the template does not accept this chat
            return None
        parts = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            parts.append(before)
        return [*parts, rest]

    def _spans_by_skeleton(self, text: str, roles: tuple[str, ...], contents: Sequence[str]) -> list[Span] | None:
        """Match the text with the skeleton and the contents, trimmed or not; None where they differ."""
        skeleton = self._skeleton(roles)
        if skeleton is None or not text.startswith(skeleton[0]):
            return None
        spans, position = [], len(skeleton[0])
        for content, behind in zip(contents, skeleton[1:], strict=True):
            found = next((part for trim in _TRIMS if text.startswith((part := trim(content)) + behind, position)), None)
            if found is None:
                return None
            spans.append((position, position + len(found)))
            position += len(found) + len(behind)
        return spans if position == len(text) else None

    def _spans_by_search(self, text: str, roles: tuple[str, ...], contents: Sequence[str]) -> list[Span]:
        """Search for each content, the last from the right: for templates whose own text depends on the contents."""
        spans, position = [], 0
        for index, (role, content) in enumerate(zip(roles, contents, strict=True)):
            part = content.strip()
            start = text.rfind(part) if index == len(roles) - 1 else text.find(part, position)
            if start < position:
                raise UserError(
                    f"the chat template rewrites the content of message {index} ({role}), so it can't be found; "
                    "remove what the template treats specially (such as think tags) from the content"
                )
            position = start + len(part)
            spans.append((start, position))
        return spans

    def _render_with_tools(self, messages: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """Render a chat with tools; an assistant's span, calls included, goes from its prompt to its end of turn."""
        if self.appends_end_of_turn:
            raise UserError(
                "the chat template has no end of turn to find a tool call's end; pass another with --chat_template"
            )
        more = {"tools": list(tools) or None}
        try:
            text = self._apply(messages, **more)
            prompts = [
                self._apply(messages[:index], add_generation_prompt=True, **more) if each["role"] == "assistant" else ""
                for index, each in enumerate(messages)
            ]
        except Exception as error:  # as in render
            raise UserError(
                f"the chat template refuses this chat with tools ({_reason(error)}); pass another with --chat_template"
            ) from None
        spans: list[Span] = []
        position = 0
        for index, (message, prompt) in enumerate(zip(messages, prompts, strict=True)):
            content = message["content"].strip()
            start, end = text.find(content, position), -1
            if message["role"] == "assistant":
                start = len(prompt) if text.startswith(prompt) and len(prompt) >= position else -1
                end = text.find(self.end_of_turn, start)
                said = [content, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
                if end < 0 or not all(each in text[start:end] for each in said):
                    start = -1
            elif start >= 0:
                end = start + len(content)
            elif message["role"] == "tool":
                # Some templates write a tool's answer as JSON, where it is not found; no view is made of it.
                start = end = 0
            if start < 0:
                raise UserError(
                    f"the chat template leaves out or rewrites message {index} ({message['role']}) of a chat with "
                    "tools; name another --chat_template"
                )
            spans.append((start, end))
            position = max(position, end)
        ends = [
            end + len(self.end_of_turn) if message["role"] == "assistant" else end
            for message, (_, end) in zip(messages, spans, strict=True)
        ]
        return Rendered(text, tuple(spans), tuple(ends))

    def _render_folded(self, messages: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        """For templates without a system role: put the system text before the first user content."""
        system, user = messages[0]["content"].strip(), messages[1]["content"].strip()
        if not system:
            inner = self.render(messages[1:], tools)
            return Rendered(inner.text, ((0, 0), *inner.spans), (0, *inner.turn_ends))
        folded = {"role": "user", "content": f"{system}\n\n{user}"}
        inner = self.render([folded, *messages[2:]], tools)
        start, end = inner.spans[0]
        spans = ((start, start + len(system)), (end - len(user), end), *inner.spans[1:])
        return Rendered(inner.text, spans, (spans[0][1], *inner.turn_ends))

    def _turn_end(self, text: str, content_end: int, limit: int) -> int:
        position = text.find(self.end_of_turn, content_end, limit)
        return content_end if position < 0 else position + len(self.end_of_turn)

    def describe(self) -> dict[str, str]:
        """Properties derived from the template, for reports."""
        dated = "strftime_now" in self._source or "date_string" in self._source
        back = {role: self._last_content_token(role) for role in ("user", "assistant")}
        return {
            "system role": "yes" if self.has_system_role else "no: put before the first user message",
            "lone assistant turn": "yes" if self.lone_assistant else "no: rendered as a user turn",
            "end of turn": repr(self.end_of_turn) + (" (appended)" if self.appends_end_of_turn else ""),
            "begin of text": self._describe_begin(),
            "date": f"pinned to {PINNED_DATE}" if dated else "none",
            "last content token": ", ".join(f"{role} {number}" for role, number in back.items()),
        }

    def _describe_begin(self) -> str:
        bos = self._tokenizer.bos_token
        adds = bos is not None and self._tokenizer("a")["input_ids"][:1] == [self._tokenizer.bos_token_id]
        if bos is None or not self.render([_ASKED, _ANSWERED]).text.startswith(bos):
            return "none (the tokenizer would add one)" if adds else "none"
        return f"{bos!r}, once (the tokenizer would add another)" if adds else repr(bos)

    def _last_content_token(self, role: str) -> int:
        """Index of a content's last token, counted from the end of its message rendered alone."""
        rendered = self.render_alone(role, _ASKED["content"])
        found = self._tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        return -1 - sum(start >= rendered.spans[0][1] for start, _ in found["offset_mapping"])
