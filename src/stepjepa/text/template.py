"""Chat templates: render messages, and know where each message's content stands in the text.

Everything a model needs to be treated specially for is derived from its template, not from its name: whether it has a
system role, whether it takes a lone assistant turn, which token ends a turn, what precedes an answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from stepjepa.errors import UserError
from stepjepa.text.frames import Frame, Rendered, Trimming
from stepjepa.text.inert_template import writes_contents_only

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]

# Some templates write today's date into the system turn; a run must not depend on the day it starts.
PINNED_DATE = datetime.date(2024, 7, 26)

# The ways in which templates come by today's date.
_DATE_WORDS = ("strftime_now", "date_string")

# The chats that show all that a template writes, the fullest first.
_CHATS = (("system", "user", "assistant"), ("user", "assistant"), ("assistant",))

_ASKED, _ANSWERED = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}

# Private-use characters: no template writes them and no ordinary text holds them.
_OPEN, _CLOSE = "\ue000", "\ue001"

# What is done to the ends of a content.
_TRIMMINGS: tuple[Trimming, ...] = (None, str.strip, str.lstrip, str.rstrip, lambda content: content.lstrip("\n"))


def _pin_date(template: str) -> str:
    """A template whose ``strftime_now`` gives the pinned date.

    Transformers hands a template plain data only, no functions, so the function is written in front as a macro.
    """
    if "strftime_now" not in template:
        return template
    codes = "".join(f"|replace('%{code}', '{PINNED_DATE.strftime('%' + code)}')" for code in "aAbBdmyYjHIMSp")
    # The empty expression keeps a line end at the template's start from being trimmed.
    return "{%- macro strftime_now(format) -%}{{ format" + codes + " }}{%- endmacro -%}{{ '' }}" + template


class ChatTemplate:
    """The chat template of a tokenizer, with what can be learnt from it.

    Args:
        tokenizer: a fast tokenizer with a chat template; it is not changed.

    Attributes:
        has_system_role: the template takes a system message; otherwise its text is put before the first user message.
        lone_assistant: the template takes an assistant message alone; otherwise a lone one is rendered as a user turn.
        end_of_turn: the special token that closes an assistant turn.
        appends_end_of_turn: the template closes no assistant turn, so the tokenizer's eos token is written after it.

    Raises:
        UserError: there is no chat template, it renders no assistant message, or nothing can end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("the tokenizer has no fast version, and token positions need one; convert it first")
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template; use an instruction-tuned model, pass --chat_template FILE, or "
                "train without one (--plain)"
            )
        self._tokenizer = tokenizer
        self._source = _pin_date(tokenizer.get_chat_template())
        self._skeletons: dict[tuple[str, ...], list[str] | None] = {}
        # Where the text around the contents is always the same, the template is run once for all chats of like roles.
        self._inert = writes_contents_only(self._source)
        self._trimmings: dict[tuple[str, ...], list[Trimming] | None] = {}
        self._frames: dict[tuple[str, ...], Frame | None] = {}
        self.has_system_role = self._renders(("system", "user", "assistant"))
        self.lone_assistant = self._renders(("assistant",))
        if not self._renders(("user", "assistant")):
            raise UserError("the chat template does not render a user and an assistant message; check the template")
        closing = self._skeleton(("user", "assistant"))
        found = self._first_special(closing[-1]) if closing else None
        self.appends_end_of_turn = found is None
        end_of_turn = found or tokenizer.eos_token
        if end_of_turn is None:
            raise UserError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        self.end_of_turn: str = end_of_turn
        self.end_of_turn_ids: tuple[int, ...] = (int(tokenizer.convert_tokens_to_ids(self.end_of_turn)),)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render a whole chat.

        Raises:
            UserError: the template rewrites a content so that it can't be found in the text.
        """
        if not self.has_system_role and messages and messages[0]["role"] == "system":
            return self._render_folded(messages)
        contents = [message["content"] for message in messages]
        roles = tuple([message["role"] for message in messages])
        framed = self._fill(roles, contents)
        if framed is not None:
            return framed
        composed = self._compose(roles, contents) if self._inert else None
        if composed is not None:
            text, spans = composed
        else:
            try:
                text = self._apply(messages)
            except TemplateError as error:
                raise UserError(
                    f"the chat template refuses these messages ({error}); change them, or name another --chat_template"
                ) from None
            spans = self._spans_by_skeleton(text, roles, contents) or self._spans_by_search(text, roles, contents)
        if self.appends_end_of_turn and roles[-1] == "assistant":
            text = text[: spans[-1][1]] + self.end_of_turn
        limits = [start for start, _ in spans[1:]] + [len(text)]
        ends = [self._turn_end(text, end, limit) for (_, end), limit in zip(spans, limits, strict=True)]
        return Rendered(text, tuple(spans), tuple(ends))

    def render_alone(self, role: str, content: str) -> Rendered:
        """Render one message by itself, as a view that sees nothing else.

        An assistant message is rendered as a user turn where the template refuses it alone.
        """
        if role == "assistant" and not self.lone_assistant:
            role = "user"
        return self._fill((role,), (content,)) or self.render([{"role": role, "content": content}])

    def render_prompt(self, messages: Sequence[Message]) -> Rendered:
        """What precedes the answer in training, hence what the model must be shown to generate one.

        Args:
            messages: the chat without its last assistant message.
        """
        whole = self.render([*messages, {"role": "assistant", "content": _OPEN}])
        # A blank before the answer is part of the answer's first token in most vocabularies.
        text = whole.text[: whole.spans[-1][0]].rstrip(" ")
        return Rendered(text, whole.spans[:-1], whole.turn_ends[:-1])

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of :meth:`render_prompt`."""
        return self.render_prompt(messages).text

    def _apply(self, messages: Sequence[Message]) -> str:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            chat_template=self._source,
            date_string=PINNED_DATE.strftime("%d %b %Y"),
        )
        return str(text)

    def _renders(self, roles: tuple[str, ...]) -> bool:
        return self._skeleton(roles) is not None

    def _skeleton(self, roles: tuple[str, ...]) -> list[str] | None:
        """The template's own text around the contents, one piece more than there are roles; None if it refuses."""
        if roles not in self._skeletons:
            marks = [f"{_OPEN}{index}{_CLOSE}" for index in range(len(roles))]
            chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            pieces: list[str] | None = []
            try:
                rest = self._apply(chat)
            except TemplateError:
                pieces = None
            else:
                for mark in marks:
                    before, found, rest = rest.partition(mark)
                    if not found:
                        pieces = None
                        break
                    assert pieces is not None
                    pieces.append(before)
                if pieces is not None:
                    pieces.append(rest)
            self._skeletons[roles] = pieces
        return self._skeletons[roles]

    def _fill(self, roles: tuple[str, ...], contents: Sequence[str]) -> Rendered | None:
        """A chat written without running the template, where that is sure to be the same."""
        if not self._inert:
            return None
        if roles not in self._frames:
            self._frames[roles] = self._make_frame(roles)
        frame = self._frames[roles]
        return None if frame is None else frame.fill(contents)

    def _make_frame(self, roles: tuple[str, ...]) -> Frame | None:
        trimmings, pieces = self._find_trimmings(roles), self._skeleton(roles)
        if trimmings is None or pieces is None:
            return None
        first, *behind = pieces
        if self.appends_end_of_turn and roles[-1] == "assistant":
            behind[-1] = self.end_of_turn
        turns = (self._turn_end(piece, 0, len(piece)) for piece in behind)
        return Frame(first, tuple(zip(trimmings, behind, map(len, behind), turns, strict=True)))

    def _compose(self, roles: tuple[str, ...], contents: Sequence[str]) -> tuple[str, list[tuple[int, int]]] | None:
        """Text and spans put together from the skeleton and the contents; None where the template must be run.

        Only for a template that does nothing else with contents that are not blank (``writes_contents_only``).
        """
        trimmings = self._find_trimmings(roles)
        if trimmings is None:
            return None
        pieces = self._skeletons[roles]
        assert pieces is not None
        parts, spans, position = [pieces[0]], [], len(pieces[0])
        same = True
        for content, trim, piece in zip(contents, trimmings, pieces[1:], strict=True):
            written = content if trim is None else trim(content)
            if not content or content.isspace():
                return None
            same = same and len(written) == len(content)
            end = position + len(written)
            spans.append((position, end))
            parts.append(written)
            parts.append(piece)
            position = end + len(piece)
        text = "".join(parts)
        if same:
            return text, spans
        # Blanks that were trimmed may look like those of the template: then the spans are read as always.
        read = self._spans_by_skeleton(text, roles, contents)
        return None if read is None else (text, read)

    def _find_trimmings(self, roles: tuple[str, ...]) -> list[Trimming] | None:
        """How the template trims the content of each message; None if it refuses or does something else."""
        if roles not in self._trimmings:
            self._trimmings[roles] = self._probe_trimmings(roles)
        return self._trimmings[roles]

    def _probe_trimmings(self, roles: tuple[str, ...]) -> list[Trimming] | None:
        pieces = self._skeleton(roles)
        if pieces is None or any(_OPEN in piece for piece in pieces):
            return None
        marks = [f"\n \t{_OPEN}{index}{_CLOSE}\t \n" for index in range(len(roles))]
        text = self._apply([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        found: list[Trimming] = []
        position = 0
        for mark, before, after in zip(marks, pieces, pieces[1:], strict=False):
            position += len(before)
            for trim in _TRIMMINGS:
                written = mark if trim is None else trim(mark)
                if text.startswith(written, position) and text.startswith(after, position + len(written)):
                    found.append(trim)
                    position += len(written)
                    break
        written = "".join(
            part
            for mark, trim, piece in zip(marks, found, pieces, strict=False)
            for part in (piece, mark if trim is None else trim(mark))
        )
        return found if len(found) == len(roles) and written + pieces[-1] == text else None

    def _spans_by_skeleton(
        self, text: str, roles: tuple[str, ...], contents: Sequence[str]
    ) -> list[tuple[int, int]] | None:
        """Follow the text through the template's pieces and the contents, trimmed or not; None where it differs."""
        pieces = self._skeleton(roles)
        if pieces is None or not text.startswith(pieces[0]):
            return None
        spans, position = [], len(pieces[0])
        for content, piece in zip(contents, pieces[1:], strict=True):
            # A template may trim one role and not another, both ends or one.
            for part in (content, content.strip(), content.lstrip(), content.lstrip("\n"), content.rstrip()):
                end = position + len(part)
                if text.startswith(part, position) and text.startswith(piece, end):
                    break
            else:
                return None
            spans.append((position, end))
            position = end + len(piece)
        return spans if position == len(text) else None

    def _spans_by_search(self, text: str, roles: tuple[str, ...], contents: Sequence[str]) -> list[tuple[int, int]]:
        """Look for each content, the last from the right: for templates whose own text depends on the contents."""
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

    def _render_folded(self, messages: Sequence[Message]) -> Rendered:
        """For templates without a system role: the system text goes before the first user content."""
        system, user = messages[0]["content"].strip(), messages[1]["content"].strip()
        if not system:
            inner = self.render(messages[1:])
            return Rendered(inner.text, ((0, 0), *inner.spans), (0, *inner.turn_ends))
        folded = {"role": "user", "content": f"{system}\n\n{user}"}
        inner = self.render([folded, *messages[2:]])
        start, end = inner.spans[0]
        spans = ((start, start + len(system)), (end - len(user), end), *inner.spans[1:])
        return Rendered(inner.text, spans, (spans[0][1], *inner.turn_ends))

    def special_tokens(self) -> list[str]:
        """The special tokens that the template writes, in order."""
        found: list[tuple[int, str]] = []
        text = "".join(piece for roles in _CHATS for piece in self._skeleton(roles) or [])
        position = 0
        while (token := self._first_special(text[position:])) is not None:
            position = text.index(token, position) + len(token)
            found.append((position, token))
        return list(dict.fromkeys(token for _, token in found))

    def own_words(self) -> tuple[str, ...]:
        """What the template writes between special tokens and contents, such as ``user`` and a line end."""
        pieces = next(skeleton for roles in _CHATS if (skeleton := self._skeleton(roles)) is not None)
        words = pieces
        for token in sorted(self.special_tokens(), key=len, reverse=True):
            words = [part for word in words for part in word.split(token)]
        return tuple(dict.fromkeys(word for word in words if word))

    def _first_special(self, text: str) -> str | None:
        added = self._tokenizer.added_tokens_decoder.values()
        specials = {str(token) for token in added if token.special} | set(self._tokenizer.all_special_tokens)
        # The longest wins where one special token begins another.
        found = [(text.find(token), -len(token), token) for token in specials if token in text]
        return min(found)[2] if found else None

    def _turn_end(self, text: str, content_end: int, limit: int) -> int:
        position = text.find(self.end_of_turn, content_end, limit)
        return content_end if position < 0 else position + len(self.end_of_turn)

    def describe(self) -> dict[str, str]:
        """What was derived from the template, for reports."""
        back = {role: self._last_content_token(role) for role in ("user", "assistant")}
        return {
            "system role": "yes" if self.has_system_role else "no: put before the first user message",
            "lone assistant turn": "yes" if self.lone_assistant else "no: rendered as a user turn",
            "end of turn": repr(self.end_of_turn) + (" (appended)" if self.appends_end_of_turn else ""),
            "begin of text": self._describe_begin(),
            "date": f"pinned to {PINNED_DATE}" if any(word in self._source for word in _DATE_WORDS) else "none",
            "last content token": ", ".join(f"{role} {number}" for role, number in back.items()),
        }

    def _describe_begin(self) -> str:
        bos = self._tokenizer.bos_token
        adds = bos is not None and self._tokenizer("a")["input_ids"][:1] == [self._tokenizer.bos_token_id]
        if bos is None or not self.render([_ASKED, _ANSWERED]).text.startswith(bos):
            return "none (the tokenizer would add one)" if adds else "none"
        return f"{bos!r}, once (the tokenizer would add another)" if adds else repr(bos)

    def _last_content_token(self, role: str) -> int:
        """Where a view's content ends, counted from the end of the message alone in the template."""
        rendered = self.render_alone(role, _ASKED["content"])
        found = self._tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
        return -1 - sum(start >= rendered.spans[0][1] for start, _ in found["offset_mapping"])
