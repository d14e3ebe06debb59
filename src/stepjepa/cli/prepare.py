"""``stepjepa prepare``: make training files from raw data sets, or generate them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from stepjepa.base.user_code import load
from stepjepa.cli.commands import Command
from stepjepa.cli.parser import Parser, check_exclusive, from_args
from stepjepa.config.option import option
from stepjepa.data.columns import ASSISTANT, USER
from stepjepa.preparing.conversion import CONVERSIONS, Convert, StepOptions, convert_chat, convert_response
from stepjepa.preparing.files import (
    NlRxSettings,
    SourceSettings,
    StepmathSettings,
    prepare_nl_rx,
    prepare_rows,
    prepare_stepmath,
)
from stepjepa.tasks import stepmath


@dataclass
class ChatFlags:
    """Columns of a table; without them 'messages', 'conversations', or the usual ones, with 'system' and 'history'."""

    columns: list[str] | None = option(
        None,
        f"columns of question and answer (the first of {', '.join(USER)}, and of {', '.join(ASSISTANT)})",
        metavar="NAME",
    )
    system: str | None = option(None, "column of a system prompt (none)", metavar="NAME")
    system_prompt: str | None = option(None, "one system prompt for all rows (none)")


@dataclass
class SplitFlags:
    """A custom splitter of responses, called after text in ``<think>`` is removed."""

    custom: str | None = option(None, "custom splitter: response in, list of steps out", metavar="MODULE:FUNCTION")


@dataclass
class Gsm8kFlags:
    """The form of solutions."""

    format: Literal["plain", "steps"] = option("plain", "steps: a blank line between lines, so that each is a step")
    socratic: Literal["keep", "strip"] = option("keep", "the question in front of each line of the socratic variant")
    calculator: Literal["keep", "strip"] = option("keep", "annotations such as <<48/2=24>>")


def _converter(args: argparse.Namespace) -> tuple[Convert, str]:
    """Return the function that converts a row to a record, and the fields that it expects."""
    kind = args.preparation
    if kind == "chat":
        check_exclusive(args, ("system", "system_prompt"))
        columns = {name: getattr(args, name) for name in ("columns", "system", "system_prompt")}
        return partial(convert_chat, **columns), "--columns"
    if kind == "steps":
        splitter = {} if args.custom is None else {"splitter": load("custom", args.custom)}
        options = from_args(StepOptions, args, **splitter)
        expected = "--question_field, and --response_field with steps (of a thought: train --steps_from reasoning)"
        return partial(convert_response, options=options), expected
    convert = CONVERSIONS[kind].convert
    if kind == "gsm8k":
        keep = {name: getattr(args, name) == "keep" for name in ("socratic", "calculator")}
        convert = partial(convert, **keep, steps=args.format == "steps")
    return convert, CONVERSIONS[kind].rows


def _run_rows(args: argparse.Namespace) -> int:
    """Convert the rows of a source."""
    prepare_rows(from_args(SourceSettings, args), *_converter(args))
    return 0


def _run_stepmath(args: argparse.Namespace) -> int:
    prepare_stepmath(from_args(StepmathSettings, args), from_args(stepmath.Difficulty, args))
    return 0


def _run_nl_rx(args: argparse.Namespace) -> int:
    prepare_nl_rx(from_args(NlRxSettings, args))
    return 0


SOURCE = (SourceSettings, "source")
STEPMATH = ((StepmathSettings, "options"), (stepmath.Difficulty, "difficulty"))


class Kind(NamedTuple):
    """A kind of preparation, which is a sub-command."""

    summary: str  # what it reads or makes, with the short help in front of the first semicolon
    flags: tuple[tuple[type, str], ...]  # dataclasses of options, with their headings
    run: Callable[[argparse.Namespace], int]


KINDS = {
    "chat": Kind("any table of questions and answers, or of whole chats", (SOURCE, (ChatFlags, "columns")), _run_rows),
    "steps": Kind("responses of a reasoning model", (SOURCE, (StepOptions, "steps"), (SplitFlags, "steps")), _run_rows),
    **{
        name: Kind(
            f"{conversion.summary}; rows with {conversion.rows}",
            (SOURCE, (Gsm8kFlags, "solution")) if name == "gsm8k" else (SOURCE,),
            _run_rows,
        )
        for name, conversion in CONVERSIONS.items()
    },
    "stepmath": Kind("generated word problems, each step in need of the one before", STEPMATH, _run_stepmath),
    "nl-rx": Kind("generated sentences and regular expressions, as in NL-RX", ((NlRxSettings, "options"),), _run_nl_rx),
}


def add_kinds(parser: Parser) -> None:
    """Add a sub-command for each of :data:`KINDS`."""
    kinds = parser.add_subparsers(dest="preparation", required=True, metavar="KIND", title="kinds")
    for name, kind in KINDS.items():
        inner = kinds.add_parser(name, help=kind.summary.partition(";")[0], description=kind.summary)
        for settings, group in kind.flags:
            inner.add(settings, group)


PREPARE = Command(lambda args: KINDS[args.preparation].run(args), add=add_kinds)
