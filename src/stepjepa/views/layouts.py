"""Layouts: functions from a record to its sequences, registered by name with their properties. Free of torch.

To add one: write ``(record, predictors, reading) -> list[TokenSequence]``, and put ``@layout("name", ...)`` above it.
Help, checks and the reference read the table.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from stepjepa.base.arguments import kind_of
from stepjepa.base.errors import UserError
from stepjepa.chat.thought import without_thought
from stepjepa.views.sequences import Ids, Kind, Readout, TokenizedRecord, TokenSequence, View, main_sequence

MODES = ("regular", "llm-jepa", "step-jepa")


class ReadoutOptions(NamedTuple):
    """Options of the readout of embeddings, in any layout; the defaults are those of the papers.

    Attributes:
        front: predictor tokens stand before the source view, not after it.
        reverse: the second view of a pair predicts the first.
        last_token: place of the readout counted from the end of the templated view (-1 is its last token); None reads
            the last predictor of a source, and the last token of a target's content.
        mean: average over several tokens instead of reading one.
    """

    front: bool = False
    reverse: bool = False
    last_token: int | None = None
    mean: bool = False


PlaceFn = Callable[[TokenizedRecord, Ids, ReadoutOptions], list[TokenSequence]]
# Maps the messages of a chat to the index of the first and of the second message of each pair.
PairMessagesFn = Callable[[tuple[Mapping[str, object], ...]], list[tuple[int, int]]]


def question_and_answer(messages: tuple[Mapping[str, object], ...]) -> list[tuple[int, int]]:
    """Pair each user message with the assistant message that answers it, behind tool calls without text."""
    return [
        (place, _answer_from(messages, place + 1))
        for place, message in enumerate(messages[:-1])
        if message["role"] == "user"
    ]


def _answer_from(messages: tuple[Mapping[str, object], ...], first: int) -> int:
    """Return the first assistant message from ``first`` on that has text or no tool call; ``first`` if none has."""
    for place in range(first, len(messages)):
        message = messages[place]
        if message["role"] == "user":
            break
        if message["role"] == "assistant" and (message_text(message) or not message.get("tool_calls")):
            return place
    return first


def message_text(message: Mapping[str, object]) -> str:
    """Return the content of a message, without the thought before an answer; empty if it is white space."""
    content = str(message["content"])
    content = without_thought(content) if message["role"] == "assistant" else content
    return content if content.strip() else ""


@dataclass(frozen=True)
class Layout:
    """A layout: its function, and the properties that settings are checked against."""

    name: str  # as on the command line
    modes: tuple[str, ...]  # that have it; the first layout of a mode is its default
    views_in_text: bool = False  # the first message of a pair is a part of the chat, not rendered alone
    changes_text: bool = False  # it inserts tokens into the main sequence, which changes the LM loss
    place: PlaceFn = field(kw_only=True)  # places the sequences of a record
    # Picks the message pairs; unused in Step-JEPA, whose pairs are steps.
    partners: PairMessagesFn = field(default=question_and_answer, kw_only=True)


LAYOUTS: dict[str, Layout] = {}
"""Layouts by name, in the order of the help text; a user's own are added where they are registered."""


_EXAMPLE = '@layout("my_layout", ("llm-jepa",))'


def layout(
    name: str,
    modes: Collection[str] = (),
    *,
    views_in_text: bool = False,
    changes_text: bool = False,
    partners: PairMessagesFn = question_and_answer,
) -> Callable[[PlaceFn], PlaceFn]:
    """Register a function as a layout; used as a decorator.

    Args:
        name: its name in ``JepaConfig(layout=...)``; an earlier layout of that name is replaced.
        modes: the modes that have it, such as ``("llm-jepa",)``.
        views_in_text: the first message of a pair is a part of the chat, not rendered alone.
        changes_text: it inserts tokens into the main sequence, which changes the LM loss.
        partners: maps the messages of a chat to the indices of the first and of the second message of each pair.

    Raises:
        ValueError: ``modes`` is no tuple of modes.
        TypeError: the decorator is written without parentheses, or above what is no function.
    """
    if not isinstance(name, str):
        raise TypeError(f"layout: expected a name and modes, {_EXAMPLE}, got {kind_of(name)}")
    if isinstance(modes, str) or not modes or (unknown := sorted({*modes} - {*MODES})):
        got = repr(modes) if isinstance(modes, str) or not modes else f"'{unknown[0]}'"
        raise ValueError(f"modes: expected some of {', '.join(MODES)}, in a tuple, got {got}")

    def register(place: PlaceFn) -> PlaceFn:
        if not callable(place):
            raise TypeError(f"layout: expected a function of record, predictors and reading, got {kind_of(place)}")
        LAYOUTS[name] = Layout(name, tuple(modes), views_in_text, changes_text, place=place, partners=partners)
        return place

    return register


def layouts_of(mode: str) -> tuple[str, ...]:
    """Return the layouts of a mode; the first one is its default."""
    return tuple(name for name, known_layout in LAYOUTS.items() if mode in known_layout.modes)


def modes_of(name: str) -> tuple[str, ...]:
    """Return the modes that have a layout; none if there is no such layout."""
    return LAYOUTS[name].modes if name in LAYOUTS else ()


def changes_text(name: str | None) -> bool:
    """Return whether a layout inserts tokens into the main sequence."""
    return name in LAYOUTS and LAYOUTS[name].changes_text


def name_layout(function: object, address: str) -> None:
    """Register a custom layout under its address, too (``layout="module:function"``).

    Args:
        function: the object at the address, perhaps decorated by :func:`layout`.
        address: ``module:function``.

    Raises:
        UserError: the object is no registered layout.
    """
    registered = next((known_layout for known_layout in LAYOUTS.values() if known_layout.place is function), None)
    if registered is None:
        raise UserError(f"layout: '{address}' is no layout; put @stepjepa.layout(...) above the function")
    LAYOUTS[address] = replace(registered, name=address)


@layout("separate", ("regular", "llm-jepa"))
def separate(record: TokenizedRecord, predictors: Ids, reading: ReadoutOptions) -> list[TokenSequence]:
    """LLM-JEPA as published: the main sequence, and each view of a pair as a sequence of its own.

    Args:
        record: its tokens.
        predictors: ids of the predictor tokens ``[K]``.
        reading: where views are read.
    """
    sequences = [main_sequence(record)]
    for number, (first, second) in enumerate(record.pairs):
        source, target = (second, first) if reading.reverse else (first, second)
        views: list[tuple[Kind, View, Ids]] = [("source", source, predictors), ("target", target, predictors[:0])]
        for kind, view, added in views:
            # The first view sees the text before it if it is a part of the main text; the second one sees itself alone.
            seeing = _branch if view is first and view.in_main else _alone
            sequences.append(seeing(number, kind, view, added, reading))
    return sequences


# Same code: it calls ``_branch`` for views inside the text and ``_alone`` for the others.
layout("branched", ("step-jepa", "llm-jepa"), views_in_text=True)(separate)


@layout("inplace", ("step-jepa",), views_in_text=True, changes_text=True)
def inplace(record: TokenizedRecord, predictors: Ids, reading: ReadoutOptions) -> list[TokenSequence]:
    """Step-JEPA's architecture page: predictors inside the text behind step 1, and step 2 sees only itself.

    Later tokens see everything again. The last token of step 1 keeps its label, the first token of step 2; predictor
    tokens have none.

    Args:
        record: its tokens.
        predictors: ids of the predictor tokens ``[K]``.
        reading: where views are read.
    """
    text, count, places = main_sequence(record), len(predictors), np.arange(len(record.ids))
    ends = np.array([first.end for first, _ in record.pairs], np.int64)
    ids = np.insert(record.ids, np.repeat(ends, count), np.tile(predictors, len(ends)))
    # [N] place in the text -> place in the sequence
    moved = (places + count * ends.searchsorted(places, "right")).astype(np.int32)
    start, readouts = np.zeros(len(ids), np.int32), []
    for number, (first, second) in enumerate(record.pairs):
        source_end = int(moved[first.end - 1]) + 1 + count
        begin, end = int(moved[second.start]), int(moved[second.end - 1]) + 1
        start[begin:end] = begin
        readouts += [
            Readout(number, "source", source_end - _averaged(first, count, reading), source_end),
            Readout(number, "target", end - _averaged(second, 0, reading), end),
        ]
    labels, prompt = text.labels.copy(), text.prompt.copy()
    labels[:, 0], prompt[:, 0] = moved[labels[:, 0]], moved[prompt[:, 0]]
    return [TokenSequence(ids, labels, prompt, moved, start, tuple(readouts))]


def _averaged(view: View, predictors: int, reading: ReadoutOptions) -> int:
    """Return the number of tokens that the readout of ``view`` averages, with this many predictor tokens."""
    if not reading.mean:
        return 1
    content = view.end - view.start - view.predictors
    return content if reading.front or not predictors else predictors


def _branch(pair: int, kind: Kind, view: View, predictors: Ids, reading: ReadoutOptions) -> TokenSequence:
    """Make a sequence of the main text up to the end of the view, with predictor tokens behind (or before) the view."""
    pieces = [view.ids[: view.start], predictors, view.content] if reading.front else [view.ids[: view.end], predictors]
    return _read(pair, kind, np.concatenate(pieces), _averaged(view, len(predictors), reading), reading)


def _alone(pair: int, kind: Kind, view: View, predictors: Ids, reading: ReadoutOptions) -> TokenSequence:
    """Make a sequence of a view that sees nothing else: a message in its template, or a step without its chat."""
    before = view.ids[:0] if view.in_main else view.ids[: view.start]
    # Nothing behind the readout can change it, so the template's tail is needed only to count from its end.
    tail = view.ids[:0] if view.in_main or reading.last_token is None else view.ids[view.end :]
    added = predictors[:0] if view.predictors else predictors
    middle = [added, view.content] if reading.front else [view.content, added]
    averaged = _averaged(view, len(added) + view.predictors, reading)
    return _read(pair, kind, np.concatenate([before, *middle, tail]), averaged, reading)


def _read(pair: int, kind: Kind, ids: Ids, averaged: int, reading: ReadoutOptions) -> TokenSequence:
    """Make a sequence that ends at its readout."""
    end = len(ids) + (0 if reading.last_token is None else reading.last_token + 1)
    if end < 1:
        fault = f"`last_token {reading.last_token}` reaches before the start of a view"
        raise UserError(f"{fault}; use a number nearer to -1")
    return TokenSequence(ids[:end], readouts=(Readout(pair, kind, end - averaged, end),))
