"""Trained turns of the assistant, each behind the prompt that a server will send for it.

For turn i, P is the chat before it with a generation prompt, and F the chat up to and including it. P is the prompt;
the answer is taken from F, see :func:`make_turn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from stepjepa.base.common_beginning import common_length
from stepjepa.base.errors import UserError, shown
from stepjepa.chat.marks import REASONING_KEYS, Kind, Message, Place
from stepjepa.chat.thought import Tag, closing_tag, last_tag, opening_tag, thought_in
from stepjepa.chat.turn_text import Turn

_AROUND = 40  # characters that an error shows around the first difference of two texts


class Texts(Protocol):
    """The renderings of a chat and of its beginnings; see ``beginnings.Beginnings``."""

    def prompt(self, index: int) -> str: ...
    def full(self, index: int) -> str: ...
    def places(self, index: int, begin: int, opened: str | None) -> list[Place]: ...
    def places_in_prompt(self, index: int, opened: str | None) -> list[Place]: ...


class Ends(Protocol):
    """The tokens that end a turn; see ``turn_ends.TurnEnds``."""

    def split(self, text: str, own_end: int, following: str | None) -> tuple[str, str]: ...


class Rules(Protocol):
    """Properties of a chat template."""

    closing: str | None  # the text between reasoning and content; None if it does not write both

    @property
    def ends(self) -> Ends: ...

    @property
    def writes_calls(self) -> bool: ...

    @property
    def writes_thoughts(self) -> bool: ...

    def leaves_thought(self, *, opened: bool = False) -> str | None:
        """Return the variables by which a prompt leaves the thought to the model; see ``ChatTemplate``."""
        ...


class TurnError(UserError):
    """A turn of a chat can't be trained.

    Attributes:
        message: index of its message in the chat.
    """

    def __init__(self, error: str, message: int) -> None:
        super().__init__(error)
        self.message = message


class _Answer(NamedTuple):
    """The text behind the prompt."""

    text: str
    behind: int  # the first character of F that is part of it
    thought: str | None = None  # a thought that F lacks, put in front


def make_turn(template: Rules, chat: Sequence[Message], index: int, texts: Texts) -> Turn:
    """Make the turn of message ``index`` of a normalised chat, whose renderings are in ``texts``.

    1. If F begins with P, and the content does not stand in a thought that P opens, the answer is the rest of F.
    2. Else, if P and F have the same text from the last content of the prompt to the end of P, it is the rest of F.
    3. Else, if P ends in an open thought, it is the thought, the text that closes it, and F from the content on; if F
       has the thought without its opening tag, F from there on.
    4. Else, if P ends in an empty thought that F leaves out, it is F behind their common part.

    Raises:
        UserError: none of these holds, or the answer lacks a text of the message.
    """
    message, prompt, full = chat[index], texts.prompt(index), texts.full(index)
    is_continued, opened = full.startswith(prompt), opening_tag(prompt)
    places = texts.places(index, common_length(prompt, full), opened)
    own_places = [place for place in places if place.part.message == index]
    if is_continued:
        earlier = [place for place in places if place.part.message < index]
        renderings = _Renderings(prompt, full, earlier, places, None)
        answer = _continued(template, message, renderings, own_places, opened)
    else:
        earlier = texts.places_in_prompt(index, opened)
        renderings = _Renderings(prompt, full, earlier, places, _misplaced(chat, index, places))
        answer = _rewritten(template, message, renderings, own_places)
    shift = len(prompt) + len(answer.text) - len(full)  # from positions in F to positions in prompt and answer
    reasoning = (0, 0) if answer.thought is None else (len(prompt), len(prompt) + len(answer.thought))
    content, own = (0, 0), [] if answer.thought is None else [reasoning]
    for part, span, repeats in own_places:
        if span is None or span[1] <= answer.behind:
            if part.kind == "thought" and answer.thought is not None:
                continue
            raise UserError(
                (span and _misplaced(chat, index, places)) or _lost(template, message, part.kind, opened=opened)
            )
        if part.kind != "call" and (written := full[slice(*span)].strip()) != part.text:
            own_text, text_written = _around_difference(part.text, written)
            raise UserError(_lost(template, message, part.kind, opened=opened, own=own_text, written=text_written))
        if part.kind == "content" and repeats:
            fault = "the chat template writes 'content' more than once, so that a served answer would repeat it"
            raise UserError(f"{fault}; use a `chat_template` that writes it once")
        moved = (max(span[0], answer.behind) + shift, span[1] + shift)
        own.append(moved)
        if part.kind == "content":
            content = moved
        elif part.kind == "thought":
            reasoning = moved
    following = chat[index + 1]["role"] if index + 1 < len(chat) else None
    text, stop = template.ends.split(prompt + answer.text, max([len(prompt), *(end for _, end in own)]), following)
    spans = [(0, 0)] * index + [content]
    for part, span, _ in earlier:
        if part.kind == "content" and span is not None:
            spans[part.message] = span
    written = prompt + answer.text
    # A stop token that was appended is not part of the template's text.
    untrained = written[len(text) if written.startswith(text) else len(text) - len(stop) :]
    return Turn(index, text, len(prompt), tuple(spans), reasoning, tuple(own), stop, untrained=untrained)


class _Renderings(NamedTuple):
    """The prompt, the chat with the answer, and the places of texts in each."""

    prompt: str
    full: str
    in_prompt: Sequence[Place]
    in_full: Sequence[Place]
    misplaced: str | None  # the message for a chat whose order the template changes; None if it keeps it


def _continued(
    template: Rules, message: Message, renderings: _Renderings, own_places: Sequence[Place], opened: str | None
) -> _Answer:
    """Return the answer for a chat that begins with the prompt: case 1, or case 3 where nothing ends the thought."""
    prompt, full = renderings.prompt, renderings.full
    tag = last_tag(prompt) if opened else None
    if tag is not None and own_places:
        spans = [place.span for place in own_places if place.part.kind == "content" and place.span is not None]
        if spans:
            between = full[len(prompt) : spans[0][0]].strip()
            in_thought = spans[0][0] >= len(prompt) and not (between or thought_in(message["content"], opened=opened))
        else:
            is_written = any(place.part.kind == "thought" and place.span is not None for place in own_places)
            in_thought = not is_written and tag.closing not in full[len(prompt) :]
        if in_thought:
            return _opened(template, message, renderings, own_places, tag)
    return _Answer(full[len(prompt) :], len(prompt))


def _rewritten(template: Rules, message: Message, renderings: _Renderings, own_places: Sequence[Place]) -> _Answer:
    """Return the answer for a template that renders the earlier chat differently behind it: cases 2 to 4."""
    prompt, full = renderings.prompt, renderings.full
    end, last = max(((span[1], part) for part, span, _ in renderings.in_prompt if span is not None), default=(0, None))
    in_full = next((span[1] for part, span, _ in renderings.in_full if part == last and span is not None), None)
    behind = prompt[end:]
    if in_full is not None and full.startswith(behind, in_full):  # case 2
        start = in_full + len(behind)
        return _Answer(full[start:], start)
    tag = last_tag(prompt, end)
    if tag is not None and tag.is_open:  # case 3
        return _opened(template, message, renderings, own_places, tag)
    has_thought = any(place.part.kind == "thought" for place in own_places)
    if tag is not None and in_full is not None and not has_thought:  # case 4
        start = in_full + tag.start - end
        is_last = not prompt.rpartition(tag.closing)[2].strip()
        if is_last and full.startswith(prompt[end : tag.start], in_full) and not full.startswith(tag.text, start):
            # F may have its closing tag alone, which P has already.
            closings = (prompt[prompt.rindex(tag.closing) :], tag.closing)
            start += next((len(closing) for closing in closings if full.startswith(closing, start)), 0)
            return _Answer(full[start:], start)
    closed = prompt[tag.start :] if tag is not None else closing_tag(prompt)
    if closed and has_thought:
        fault = f"the prompt closes the thought already ({shown(closed)}), and the message has one"
        variables = template.leaves_thought()
        remedy = f"leave the thought to the model with `chat_template_kwargs '{variables}'`"
        remedy = remedy if variables else "use a `chat_template` whose prompt leaves the thought to the model"
        raise UserError(f"{fault} ('reasoning_content', or think tags in 'content'); remove it, or {remedy}")
    continuation = full[in_full or 0 :]
    if renderings.misplaced is not None:
        raise UserError(renderings.misplaced)
    ends, continues = _around_difference(behind, continuation)
    raise UserError(
        f"the prompt that a server will send ends in {ends}, the chat continues with {continues}; "
        "use a `chat_template` whose generation prompt begins the answer"
    )


def _misplaced(chat: Sequence[Message], index: int, places: Sequence[Place]) -> str | None:
    """Return the message for a template that writes an earlier message behind the answer; None if it writes none."""
    starts = [place.span[0] for place in places if place.part.message == index and place.span is not None]
    for part, span, _ in places:
        if starts and part.message < index and span is not None and span[0] > min(starts):
            role = chat[part.message]["role"]
            fault = f"the chat template writes the {role} message behind the answer, so that no prompt ends there"
            return f"{fault}; use a `chat_template` that writes messages in their order"
    return None


def _around_difference(first: str, second: str) -> tuple[str, str]:
    """Return what two texts have around their first difference, each for a message."""
    difference = common_length(first, second)
    begin, end = max(difference - _AROUND, 0), difference + _AROUND
    return shown(first[begin:end]), shown(second[begin:end])


def _opened(
    template: Rules, message: Message, renderings: _Renderings, own_places: Sequence[Place], tag: Tag
) -> _Answer:
    """Return the answer behind a thought that the prompt opens, and that the template omits from the chat: case 3."""
    prompt, full = renderings.prompt, renderings.full
    thoughts = [place.part.text for place in own_places if place.part.kind == "thought"]
    if len(set(thoughts)) > 1:  # one of them would be lost
        raise UserError("'reasoning_content' and the thought in 'content' differ, and the prompt opens one; keep one")
    thought = thoughts[0] if thoughts else ""
    written = next((span[0] for part, span, _ in own_places if part.kind == "thought" and span is not None), None)
    if written is not None and full.startswith(prompt[: tag.start]) and not full[tag.start : written].strip():
        return _Answer(full[tag.start :], tag.start)
    start = next((span[0] for part, span, _ in own_places if part.kind == "content" and span is not None), None)
    closing = template.closing
    if start is None and closing is not None:
        # In front of calls there is no text that begins a content.
        before, end, begin = closing.partition(tag.closing)
        closing = before + end + begin[: len(begin) - len(begin.lstrip())]
    # The chat has an empty thought, or only its closing tag, instead of the prompt's open thought.
    has_tag = full.startswith(prompt[: tag.start]) and full.startswith((tag.text, tag.closing), tag.start)
    closing_start = full.find(tag.closing, tag.start, start) if has_tag else -1
    if start is None:
        if not full.startswith(prompt[: tag.start]):
            fault = f"the prompt opens a thought ({shown(prompt[tag.start :])}), and the chat continues without it"
            raise UserError(f"{fault}; use another `chat_template`")
        behind = len(prompt) if full.startswith(prompt) else tag.start
        start = behind if closing_start < 0 else closing_start + len(tag.closing)
    elif thought_in(message["content"], opened=tag.text):
        # The white space behind the thought is part of the text that closes it.
        start += len(full[start:]) - len(full[start:].lstrip())
    if closing is None:
        closing = full[closing_start:start] if closing_start >= 0 else f"\n{tag.closing}\n\n"
    return _Answer(thought + closing + full[start:], start, thought)


def _lost(
    template: Rules, message: Message, kind: Kind, *, opened: str | None, own: str = "", written: str = ""
) -> str:
    """Return the message for a text that the template leaves out; it also names the other kind that it leaves out.

    Args:
        template: renders the message.
        message: the assistant's.
        kind: of the text.
        opened: the think tag that the prompt ends in.
        own: what the message has, as it is shown, if the template writes something else instead.
        written: what the template writes there.
    """
    other = 'use a `chat_template FILE` that does ("Tools and thoughts" in docs/how-to/own-data.md has one)'
    if kind == "call" and template.writes_calls:
        fault = "the chat template leaves out a part of 'tool_calls' (some write one call a message)"
        return f"{fault}; write one call a message, each with its result, or {other}"
    if kind == "call":
        beside = "" if template.writes_thoughts else " (nor does it write 'reasoning_content')"
        fault = f"the chat template writes no 'tool_calls', so that they can't be trained{beside}"
        return f"{fault}; remove them, or {other}"
    if kind == "content":
        beside = " beside tool calls" if message.get("tool_calls") else ""
        fault = f"leaves out, cuts or rewrites 'content'{beside}"
        fault = f"rewrites 'content'{beside} (it writes {written} for {own})" if written else fault
        remedy = "use a `chat_template` that writes contents as they are, or change this one"
        return f"the chat template {fault}, so that it can't be trained; {remedy}"
    in_field = any(message.get(key) for key in REASONING_KEYS)
    source = "'reasoning_content' (or 'thinking')" if in_field else "the thought in 'content'"
    nor = "" if template.writes_calls else " (nor does it write 'tool_calls')"
    if opened is None and (variables := template.leaves_thought(opened=True)):
        return f"the chat template does not write {source} beside this prompt; set `chat_template_kwargs '{variables}'`"
    return f"the chat template does not write {source}, so that it can't be trained{nor}; remove it, or {other}"
