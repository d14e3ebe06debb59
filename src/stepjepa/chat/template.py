"""Chat templates: render messages, and find each message's content in the text.

What differs between models is derived from the template, not from the model's name: whether it has a system role,
whether it accepts a lone assistant turn, which token ends a turn, what precedes an answer.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.chat.tokens import END_OF_TURN, PERCEPTION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Span = tuple[int, int]

# Some templates write today's date into the system turn; a run must not depend on the day it starts.
PINNED_DATE = datetime.date(2024, 7, 26)

_ASKED, _ANSWERED = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}

# Ways in which templates trim contents; a template may trim one role and not another.
_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, lambda text: text.lstrip("\n"), str.rstrip)

# Private-use characters: no template writes them and no ordinary text holds them.
_OPEN, _CLOSE = "\ue000", "\ue001"


class Rendered(NamedTuple):
    """A chat as text."""

    text: str
    # For each message the start and end (exclusive) of its content; (0, 0) if the template leaves it out.
    spans: tuple[Span, ...]
    # For each message the end (exclusive) of the special token that closes its turn, or of its content if none does.
    turn_ends: tuple[int, ...]


class ChatTemplate:
    """The chat template of a fast tokenizer, with properties derived from it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        _refuse_slow(tokenizer)
        if not tokenizer.chat_template:
            remedy = "use an instruction-tuned model, pass --chat_template FILE, or train without one (--plain)"
            raise UserError(f"the tokenizer has no chat template; {remedy}")
        self._tokenizer = tokenizer
        named = tokenizer.chat_template
        if isinstance(named, dict) and "default" not in named:
            names = ", ".join(sorted(named))
            remedy = "write one of them to a file and pass it as --chat_template FILE"
            raise UserError(f"the tokenizer has several chat templates ({names}) and none is the default; {remedy}")
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
        try:
            self._compiled = _compile_jinja_template(self._source)
        except Exception as error:  # from Jinja's parser, or from constants evaluated while compiling
            raise UserError(f"the chat template can't be read: {_told(error)}") from None
        self._skeletons: dict[tuple[str, ...], list[str] | None] = {}
        # Without a system role its text is put before the first user message; an assistant message that is refused
        # alone is rendered as a user turn.
        self.has_system_role = self._skeleton(("system", "user", "assistant")) is not None
        self.lone_assistant = self._skeleton(("assistant",)) is not None
        skeleton = self._skeleton(("user", "assistant"))
        if skeleton is None:
            self._apply([_ASKED, _ANSWERED])  # tells why, if it is refused
            raise UserError("the chat template does not render a user and an assistant message; check it")
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # The longest token wins where one begins another. Without special tokens, (?!) matches nothing.
        longest_first = sorted({*specials, *tokenizer.all_special_tokens}, key=len, reverse=True)
        found = re.search("|".join(map(re.escape, longest_first)) or "(?!)", skeleton[-1])
        # Where the template closes no assistant turn, the tokenizer's eos token is appended.
        self.appends_end_of_turn = found is None
        end_of_turn = found[0] if found else tokenizer.eos_token
        if end_of_turn is None:
            raise UserError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        self.end_of_turn = str(end_of_turn)
        self.end_of_turn_ids = [int(tokenizer.convert_tokens_to_ids(self.end_of_turn))]

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render a whole chat; UserError if the template refuses it, or a content can't be found in its text."""
        if not self.has_system_role and messages and messages[0]["role"] == "system":
            return self._render_folded(messages)
        text = self._apply(messages)
        spans = self._spans(text, messages)
        if self.appends_end_of_turn and messages[-1]["role"] == "assistant":
            text = text[: spans[-1][1]] + self.end_of_turn
        limits = [start for start, _ in spans[1:]] + [len(text)]
        ends = []
        for (_, end), limit in zip(spans, limits, strict=True):
            closing = text.find(self.end_of_turn, end, limit)
            ends.append(end if closing < 0 else closing + len(self.end_of_turn))
        return Rendered(text, tuple(spans), tuple(ends))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message by itself, as a view that sees nothing else."""
        role = "user" if role == "assistant" and not self.lone_assistant else role
        return self.render([{"role": role, "content": content}])

    def render_prompt(self, messages: Sequence[Message]) -> Rendered:
        """Render what precedes the answer in training: the chat up to where its last assistant message will begin."""
        whole = self.render([*messages, {"role": "assistant", "content": _OPEN}])
        # A blank before the answer is part of the answer's first token in most vocabularies.
        text = whole.text[: whole.spans[-1][0]].rstrip(" ")
        return Rendered(text, whole.spans[:-1], whole.turn_ends[:-1])

    def describe(self) -> dict[str, str]:
        """Properties derived from the template, for reports."""
        bos, dated = self._tokenizer.bos_token, "strftime_now" in self._source or "date_string" in self._source
        begins = bos is not None and self.render([_ASKED, _ANSWERED]).text.startswith(bos)
        return {
            "system role": "yes" if self.has_system_role else "no: put before the first user message",
            "lone assistant turn": "yes" if self.lone_assistant else "no: rendered as a user turn",
            "end of turn": repr(self.end_of_turn) + (" (appended)" if self.appends_end_of_turn else ""),
            "begin of text": repr(bos) if begins else "none",
            "date": f"pinned to {PINNED_DATE}" if dated else "none",
        }

    def _apply(self, messages: Sequence[Message]) -> str:
        try:
            return str(self._compiled.render(self._variables, messages=messages))
        except Exception as error:  # a template is a program and can raise any error
            told = f"the chat template refuses these messages ({_told(error)})"
            raise UserError(f"{told}; change them, or name another --chat_template") from None

    def _skeleton(self, roles: tuple[str, ...]) -> list[str] | None:
        """The template's own text before, between and after the contents; None if it refuses such a chat."""
        if roles not in self._skeletons:
            marks = [f"{_OPEN}{index}{_CLOSE}" for index in range(len(roles))]
            chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            pattern = "".join(f"(.*?){mark}" for mark in marks) + "(.*)"
            try:
                found = re.fullmatch(pattern, self._apply(chat), re.DOTALL)
            except UserError:
                found = None
            self._skeletons[roles] = None if found is None else list(found.groups())
        return self._skeletons[roles]

    def _spans(self, text: str, messages: Sequence[Message]) -> list[Span]:
        """Match a text with the skeleton and the contents, trimmed or not.

        Contents are not searched for: one may stand earlier in the template's own text, or in another message.
        """
        skeleton = self._skeleton(tuple([message["role"] for message in messages])) or []
        spans, position = [], len(skeleton[0]) if skeleton and text.startswith(skeleton[0]) else -1
        for message, behind in zip(messages, skeleton[1:], strict=False):
            parts = (trim(message["content"]) for trim in _TRIMS)
            found = next((part for part in parts if text.startswith(part + behind, position)), None)
            if position < 0 or found is None:
                break
            spans.append((position, position + len(found)))
            position += len(found) + len(behind)
        if len(spans) < len(messages) or position != len(text):
            told = "the chat template rewrites a message, so that its content can't be found"
            raise UserError(f"{told}; remove what it treats specially, such as think tags, from the content")
        return spans

    def _render_folded(self, messages: Sequence[Message]) -> Rendered:
        """For templates without a system role: put the system text before the first user content."""
        system, user = messages[0]["content"].strip(), messages[1]["content"].strip()
        if not system:
            inner = self.render(messages[1:])
            return Rendered(inner.text, ((0, 0), *inner.spans), (0, *inner.turn_ends))
        inner = self.render([{"role": "user", "content": f"{system}\n\n{user}"}, *messages[2:]])
        start, end = inner.spans[0]
        spans = ((start, start + len(system)), (end - len(user), end), *inner.spans[1:])
        return Rendered(inner.text, spans, (spans[0][1], *inner.turn_ends))


class PlainTemplate:
    """The plain format, for records without a chat format: the user's text, ``<|perception|>``, the answer.

    Only the last question and its answer are rendered; any other message has the span ``(0, 0)``. The interface is that
    of :class:`ChatTemplate`. Without ``answers`` the answer is not rendered, where the loss is on all tokens, as in
    pretraining on paraphrases: it is the other view of the same content, and has a record of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, answers: bool = True) -> None:
        _refuse_slow(tokenizer)
        known = tokenizer.get_vocab()
        if lacking := {PERCEPTION, END_OF_TURN} - known.keys():
            told = f"--plain is for models without a chat format, and this tokenizer has no token '{min(lacking)}'"
            raise UserError(f"{told}; leave --plain out")
        self.answers = answers
        self.end_of_turn = END_OF_TURN
        self.end_of_turn_ids = [int(known[END_OF_TURN])]
        # Where the tokenizer itself puts its begin-of-text token before every text, so does the format.
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.begin = str(tokenizer.bos_token) if begins else ""

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render the last question and its answer."""
        prompt, answer = self.render_prompt(messages[:-1]), messages[-1]["content"]
        if not self.answers:
            text = prompt.text.removesuffix(PERCEPTION) + self.end_of_turn
            return Rendered(text, (*prompt.spans, (0, 0)), (*prompt.turn_ends[:-1], len(text), 0))
        start, text = len(prompt.text), prompt.text + answer + self.end_of_turn
        return Rendered(text, (*prompt.spans, (start, start + len(answer))), (*prompt.turn_ends, len(text)))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message by itself, as a view that sees nothing else: its bare content, whatever the role."""
        text = self.begin + content
        return Rendered(text, ((len(self.begin), len(text)),), (len(text),))

    def render_prompt(self, messages: Sequence[Message]) -> Rendered:
        """Render what precedes the answer: the last question and ``<|perception|>``."""
        alone, earlier = self.render_alone("user", messages[-1]["content"]), len(messages) - 1
        spans = (*[(0, 0)] * earlier, *alone.spans)
        return Rendered(alone.text + PERCEPTION, spans, (*[0] * earlier, *alone.turn_ends))

    def describe(self) -> dict[str, str]:
        """Properties of the format, for reports."""
        parts = f"{PERCEPTION} answer {END_OF_TURN}" if self.answers else END_OF_TURN
        return {
            "form": f"plain: user {parts}",
            "end of turn": repr(self.end_of_turn),
            "begin of text": repr(self.begin) if self.begin else "none",
        }


def _refuse_slow(tokenizer: PreTrainedTokenizerBase) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("the tokenizer has no fast version, and token positions need one; convert it first")


def _told(error: Exception) -> str:
    """The message of an error of Jinja; those of its parser know the line."""
    told, line = str(error).strip() or type(error).__name__, getattr(error, "lineno", None)
    return told if line is None else f"line {line}: {told}"
