"""Options declared as dataclass fields, from which flags, ``--help``, defaults, choices and range checks derive."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from stepjepa.errors import UserError, shown

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

Range = tuple[Callable[[Any], bool], str]
"""A test whether a value is allowed, and its description for messages. Every test is false for NaN."""

FROM_ZERO: Range = (lambda value: 0 <= value < math.inf, "0 or more")
FROM_ONE: Range = (lambda value: value >= 1, "1 or more")
FROM_TWO: Range = (lambda value: value >= 2, "2 or more")
SHARE: Range = (lambda value: 0 < value < 1, "a share between 0 and 1")

Settings = TypeVar("Settings")


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    group: str = "",
    names: Sequence[str] = (),
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    allowed: Range | None = None,
    only_with: str | None = None,
    parse: Callable[[str], Any] | None = None,
    const: Any = None,
    **more: Any,
) -> Any:
    """A dataclass field that is an option of a command.

    Args:
        default: the default value; without one the flag is required.
        help: the help text; ``--help`` shows it up to the first semicolon, ``--help_all`` and the reference show all.
        group: heading of the flag in the help, if the class has flags under several headings.
        names: other names of the flag.
        metavar: name of the value in the help.
        choices: the allowed values, if the type is not a ``Literal``.
        allowed: the range of the value.
        only_with: the other option without which this one has no effect: its name if it must be set, as in ``lora``,
            or name and value, as in ``target_grad ema``; alternatives are joined by ``or``.
        parse: converts the text of the command line, instead of the field's type.
        const: the value if the flag is given without one.
        more: further metadata, such as ``affects`` of :class:`stepjepa.config.JepaConfig`.
    """
    about = {"help": help, "group": group, "names": names, "metavar": metavar, "choices": choices, "allowed": allowed}
    return field(default=default, metadata={**about, "only_with": only_with, "parse": parse, "const": const, **more})


def whole(text: str) -> int:
    """Parse a whole number of up to 18 digits (so it fits into 64 bits); ``1_000`` is refused as a typing error."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ValueError
    return int(text)


def number(text: str) -> float:
    """Parse a number or infinity; NaN is refused, and so are underscores as in ``1_000``."""
    found = float(text)
    if math.isnan(found) or "_" in text:
        raise ValueError
    return found


READERS: Mapping[type, Callable[[str], Any]] = {int: whole, float: number}


class Kind(NamedTuple):
    """The type of an option: the type of one value, whether it takes several values, and the allowed values."""

    type: Any
    several: bool
    choices: tuple[str, ...]


def options_of(settings: Any) -> Iterator[tuple[Field[Any], Kind]]:
    """The fields of a dataclass that are options, with their types.

    Args:
        settings: the dataclass or an instance of it.
    """
    hints = get_type_hints(settings if isinstance(settings, type) else type(settings))
    for each in fields(settings):
        if "help" not in each.metadata:
            continue
        hint, several = hints[each.name], False
        if get_origin(hint) in (Union, UnionType):
            hint = next(inner for inner in get_args(hint) if inner is not NoneType)
        if get_origin(hint) in (list, tuple):
            hint, several = get_args(hint)[0], True
        literal = get_origin(hint) is Literal
        yield (
            each,
            Kind(str if literal else hint, several, get_args(hint) if literal else each.metadata["choices"] or ()),
        )


def add_options(
    parser: argparse.ArgumentParser,
    settings: type,
    group: str,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    required: Collection[str] | None = None,
) -> None:
    """Add the flags of a dataclass to a parser.

    Args:
        parser: the parser to extend.
        settings: the dataclass.
        group: heading of the flags whose fields name none.
        only: the fields that become flags; by default all.
        without: fields that do not become flags.
        required: fields whose flags are required; by default those without a default value.
    """
    for each, kind in options_of(settings):
        if each.name in without or (only is not None and each.name not in only):
            continue
        about, default = each.metadata, None if each.default is MISSING else each.default
        names = [f"--{name}" for name in (each.name, *about["names"])]
        section = _group(parser, about["group"] or group)
        if kind.type is bool:
            add_switch(section, *names, help=about["help"], default=bool(default))
            continue
        words: dict[str, Any] = {"type": _reader(kind.type, about), "default": default, "help": about["help"]}
        words["required"] = each.default is MISSING if required is None else each.name in required
        if kind.choices:
            words["choices"] = kind.choices
        words["metavar"] = about["metavar"] or (
            {int: "N", float: "X"}.get(kind.type, "TEXT") if not kind.choices else None
        )
        if kind.several:
            words |= {"nargs": "+", "action": "extend"} if default is None else {"nargs": "+"}
        elif about["const"] is not None:
            words |= {"nargs": "?", "const": about["const"]}
        _add(section, names, words)


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    return next((each for each in parser._action_groups if each.title == title), None) or parser.add_argument_group(
        title
    )


def _add(group: argparse._ArgumentGroup, names: Sequence[str], words: dict[str, Any]) -> None:
    """Add a flag with its default appended to its help text, and the summary that ``--help`` shows."""
    default, about = _in_words(words["default"]), words["help"]
    summary = about.partition("; ")[0]
    action = group.add_argument(*names, **{**words, "help": about + default})
    action.summary = summary + default  # type: ignore[attr-defined]  # see Parser.format_help


def _in_words(default: Any) -> str:
    if default is None or default is False or default in ("", (), []):
        return ""
    if isinstance(default, tuple | list):
        return f" ({' '.join(map(str, default))})"
    return " (on)" if default is True else f" ({default:g})" if isinstance(default, float) else f" ({default})"


def _reader(kind: Any, about: Mapping[str, Any]) -> Callable[[str], Any] | None:
    """The function that converts the text of a flag and checks its range; None for a string without a range."""
    read, allowed = about["parse"] or READERS.get(kind, kind), about["allowed"]
    if read is str and allowed is None:
        return None

    def value(text: str) -> Any:
        try:
            found = read(text)
        except ValueError:
            expected = allowed[1] if about["parse"] and allowed else "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {shown(text)}") from None
        if allowed is not None and found is not None and not allowed[0](found):
            raise argparse.ArgumentTypeError(f"expected {allowed[1]}, got {found}")
        return found

    return value


def boolean(text: str) -> bool:
    """Parse the explicit value of a switch, as in ``--lora True``."""
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"expected true or false, got {shown(text)}")


def add_switch(group: argparse._ArgumentGroup, *names: str, help: str, default: bool = False) -> None:
    """Add a boolean flag: ``--flag`` sets it, ``--flag false`` unsets it again."""
    words = {"nargs": "?", "const": True, "default": default, "type": boolean, "metavar": "BOOL", "help": help}
    _add(group, names, words)


def wrong_value(settings: Any) -> str | None:
    """An error message for the first option that is out of range or not among its choices; None if all are valid."""
    for each, kind in options_of(settings):
        value, allowed = getattr(settings, each.name), each.metadata["allowed"]
        for one in value if kind.several and value is not None else (value,):
            if one is None:
                continue
            if kind.choices and one not in kind.choices:
                return f"{each.name}: expected one of {', '.join(kind.choices)}, got '{one}'"
            if allowed is not None and not allowed[0](one):
                return f"{each.name}: expected {allowed[1]}, got {one}"
    return None


def refuse_without_effect(values: Mapping[str, Any], *settings: type) -> None:
    """Refuse options without effect, because the option named by their ``only_with`` is not set.

    Args:
        values: the value of every option, by name.
        settings: the dataclasses of the options to check.

    Raises:
        UserError: an option has no effect; the error names both options.
    """
    for each in (each for kind in settings for each, _ in options_of(kind)):
        condition = each.metadata["only_with"]
        if condition is None or values[each.name] in (None, each.default):
            continue
        wanted = [other.partition(" ") for other in condition.split(" or ")]
        if not any(
            values[other] == value if value else values[other] not in (None, False, 0) for other, _, value in wanted
        ):
            raise UserError(f"--{each.name} does nothing without --{condition}; add it or leave it out")


def from_args(settings: type[Settings], args: argparse.Namespace, **more: Any) -> Settings:
    """Create an instance of a dataclass from the parsed flags of its options.

    Args:
        settings: the dataclass.
        args: the parsed flags.
        more: values of fields that are not flags, or that replace the value of a flag.
    """
    named = {each.name: getattr(args, each.name) for each, _ in options_of(settings) if each.name not in more}
    return settings(**named, **more)
