"""Options declared as dataclass fields, from which flags, ``--help``, defaults, choices and range checks derive."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from stepjepa.errors import UserError, shown

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

Range = tuple[Callable[[Any], bool], str]
"""A test whether a value is allowed, and its description for messages. Every test is false for NaN."""

FROM_ZERO: Range = (lambda value: 0 <= value < math.inf, "0 or more")
FROM_ONE: Range = (lambda value: value >= 1, "1 or more")
FROM_TWO: Range = (lambda value: value >= 2, "2 or more")
SHARE: Range = (lambda value: 0 < value < 1, "a share between 0 and 1")

Settings = TypeVar("Settings")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A dataclass field that is an option of a command.

    Args:
        default: the default value; without one the flag is required.
        help: the help text; ``--help`` shows it up to the first semicolon, ``--help_all`` and the reference show all.
        more: ``group``: heading in the help, if the class has flags under several; ``names``: other names of the flag;
            ``metavar``: name of the value in the help; ``choices``: allowed values, if the type is no ``Literal``;
            ``allowed``: a :data:`Range`; ``parse``: converts the text of the command line, instead of the type;
            ``const``: the value of a flag given without one; ``positional``: an argument without a flag; ``only_with``:
            the option without which this one has no effect, as ``lora`` or ``target_grad ema``, alternatives joined by
            ``or``; and what the owner of the class needs, such as ``affects`` of :class:`stepjepa.config.JepaConfig`.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Option:
    """One option: its name, the type of one value, whether it takes several, its choices and its metadata."""

    name: str
    type: Any
    several: bool
    choices: tuple[str, ...]
    default: Any
    about: Mapping[str, Any]

    def fault(self, value: Any) -> str | None:
        """What is wrong with one value; None if it is allowed."""
        allowed = self.about.get("allowed")
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(self.choices)}, got '{value}'"
        return None if allowed is None or allowed[0](value) else f"expected {allowed[1]}, got {value}"

    def read(self, text: str) -> Any:
        """Convert the text of a flag, with all checks."""
        convert = self.about.get("parse") or READERS.get(self.type, self.type)
        try:
            value = convert(text)
        except ValueError:
            expected = self.about["allowed"][1] if self.about.get("allowed") else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {shown(text)}") from None
        if fault := self.fault(value):
            raise argparse.ArgumentTypeError(fault)
        return value


def options_of(settings: Any) -> Iterator[Option]:
    """The options of a dataclass, or of an instance of one."""
    hints = get_type_hints(settings if isinstance(settings, type) else type(settings))
    for each in fields(settings):
        if "help" not in each.metadata:
            continue
        hint, several = hints[each.name], False
        if get_origin(hint) in (Union, UnionType):
            hint = next(inner for inner in get_args(hint) if inner is not NoneType)
        if get_origin(hint) in (list, tuple):
            hint, several = get_args(hint)[0], True
        choices = get_args(hint) if get_origin(hint) is Literal else tuple(each.metadata.get("choices", ()))
        kind = hint if hint in (int, float, bool) else str
        yield Option(each.name, kind, several, choices, each.default, each.metadata)


def whole(text: str) -> int:
    """Parse a whole number of up to 18 digits (so it fits into 64 bits); ``1_000`` is refused as a typing error."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {shown(text)}")
    return int(text)


def number(text: str) -> float:
    """Parse a number or infinity; NaN is refused, and so are underscores as in ``1_000``."""
    try:
        found = math.nan if "_" in text else float(text)
    except ValueError:
        found = math.nan
    if math.isnan(found):
        raise argparse.ArgumentTypeError(f"expected a number, got {shown(text)}")
    return found


def boolean(text: str) -> bool:
    """Parse the explicit value of a switch, as in ``--lora True``."""
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"expected true or false, got {shown(text)}")


READERS: Mapping[Any, Callable[[str], Any]] = {int: whole, float: number, bool: boolean}


def wrong_value(settings: Any) -> str | None:
    """An error message for the first option that is out of range or not among its choices; None if all are valid."""
    for each in options_of(settings):
        value = getattr(settings, each.name)
        for one in value if each.several and value is not None else (value,):
            if fault := each.fault(one):
                return f"{each.name}: {fault}"
    return None


def refuse_without_effect(values: Mapping[str, Any], *settings: type) -> None:
    """Refuse options without effect, because the option named by their ``only_with`` is not set.

    Args:
        values: the value of every option, by name.
        settings: the dataclasses of the options to check.

    Raises:
        UserError: an option has no effect; the error names both options.
    """
    for each in (each for kind in settings for each in options_of(kind)):
        condition = each.about.get("only_with")
        if condition is None or values[each.name] in (None, each.default):
            continue
        wanted = [other.partition(" ") for other in condition.split(" or ")]
        if not any(
            values[name] == value if value else values[name] not in (None, False, 0) for name, _, value in wanted
        ):
            raise UserError(f"--{each.name} does nothing without --{condition}; add it or leave it out")


def refuse_both(args: argparse.Namespace, *pairs: tuple[str, str]) -> None:
    """Refuse flags that exclude each other.

    Raises:
        UserError: both flags of a pair are set.
    """
    for pair in pairs:
        if all(getattr(args, name) not in (None, False) for name in pair):
            raise UserError(f"--{pair[0]} and --{pair[1]} exclude each other; leave one out")


def from_args(settings: type[Settings], args: argparse.Namespace, **more: Any) -> Settings:
    """Create an instance of a dataclass from the parsed flags of its options; ``more`` sets or replaces fields."""
    named = {each.name: getattr(args, each.name) for each in options_of(settings) if each.name not in more}
    return settings(**named, **more)


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Convert a mapping of flags to command line arguments; flags whose value is None are left out."""
    result: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            result.extend([f"--{name}", *map(_word, value)])
        elif value is not None:
            # One argument, so that a value that begins with a dash is not read as a flag.
            result.append(f"--{name}={_word(value)}")
    return result


def _word(value: Any) -> str:
    """A value as one argument; a leading ``~/`` is expanded to the home folder, as a shell does."""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return str(Path(text).expanduser()) if text.startswith("~/") else text


def without_flags(arguments: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Remove some flags from a command line.

    Args:
        arguments: the command line, with flags as ``cli.normalise`` writes them.
        flags: names of the flags to remove, without dashes, and whether each takes a value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, has_value in flags.items():
        parser.add_argument(f"--{name}", nargs="?" if has_value else 0, action="store" if has_value else _Nothing)
    return parser.parse_known_args(list(arguments))[1]


class _Nothing(argparse.Action):
    def __call__(self, *_: Any) -> None:
        """Read a flag without a value, and store nothing."""


class Parser(argparse.ArgumentParser):
    """A parser of dataclass options with a short help, which raises ``UserError`` where a command line is wrong.

    Args:
        common: names of the options that ``--help`` shows, in short form; with none it shows all, in full.
        more_help: returns text for the end of ``--help_all``.
        takes_others: unknown flags are returned; otherwise they are errors.
    """

    def __init__(
        self,
        *args: Any,
        common: Collection[str] = (),
        more_help: Callable[[], str] = str,
        takes_others: bool = False,
        **more: Any,
    ) -> None:
        more |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*args, **more)
        self.common, self.takes_others = common, takes_others
        self.required: list[argparse.Action] = []
        self.add_argument("--offline", action="store_true", help="connect to no other machine")
        if common:

            class HelpAll(argparse.Action):
                def __call__(self, parser: Any, *_: Any) -> None:
                    parser.common = ()
                    print(parser.format_help() + more_help())
                    parser.exit()

            self.add_argument("--help_all", action=HelpAll, nargs=0, help="show every flag")

    def add(
        self,
        settings: type,
        group: str,
        *,
        only: Collection[str] | None = None,
        without: Collection[str] = (),
        required: Collection[str] | None = None,
    ) -> None:
        """Add the flags of a dataclass.

        Args:
            settings: the dataclass.
            group: heading of the flags whose fields name none.
            only: the fields that become flags; by default all.
            without: fields that do not become flags.
            required: fields whose flags are required; by default those without a default value.
        """
        for each in options_of(settings):
            if each.name in without or (only is not None and each.name not in only):
                continue
            title = each.about.get("group") or group
            section = next((known for known in self._action_groups if known.title == title), None)
            action = _add(section or self.add_argument_group(title), each)
            needed = each.default is MISSING if required is None else each.name in required
            if needed and action.option_strings:
                self.required.append(action)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; unknown flags are errors unless the parser takes others, and so are missing ones."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self.takes_others:
            self.refuse(unknown)
        missing = [each.option_strings[0] for each in self.required if getattr(found, each.dest) is None]
        if missing and not self.takes_others:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return found, unknown

    def refuse(self, unknown: Sequence[str], known: Sequence[str] = ()) -> NoReturn:
        """Raise an error that names the first unknown argument and the flag that was probably meant.

        Args:
            unknown: the unknown arguments.
            known: known flags besides those of the parser.
        """
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(
                f"unknown argument {shown(unknown[0])}, which belongs to no flag; leave it out or quote the text"
            )
        near = difflib.get_close_matches(name, [*self._option_string_actions, *known], n=1)
        remedy = f"did you mean {near[0]}?" if near else f"{self.prog} --help{'_all' if self.common else ''} names all"
        self.error(f"unknown argument {shown(unknown[0])}; {remedy}")

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError`` with the message, which names a flag by its first name only."""
        message = re.sub(r"^argument (--\w+)(?:/--[\w-]+)+:", r"argument \1:", message)
        if message.startswith("the following arguments are required"):
            message += f"; {self.prog} --help says more"
        raise UserError(message)

    def format_usage(self) -> str:
        """The usage: required flags, then the rest."""
        if self.usage is None:
            names = [f"{each.option_strings[0]} {each.metavar}" for each in self.required]
            names += [str(each.metavar or each.dest) for each in self._actions if not each.option_strings]
            self.usage = " ".join([self.prog, *names, "[flags below]"])
        return super().format_usage()

    def format_help(self) -> str:
        """The help text: all options in full, or the common ones in short form."""
        self.format_usage()
        if not self.common:
            return super().format_help()
        formatter = argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=27)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([_short(each) for each in group._group_actions if each.dest in self.common])
            formatter.end_section()
        count = sum(each.dest not in self.common for each in self._actions)
        formatter.add_text(f"{self.epilog or ''}\n{self.prog} --help_all: {count} more flags.".strip())
        return formatter.format_help()


def _add(group: argparse._ArgumentGroup, each: Option) -> argparse.Action:
    """Add the flag of an option, with its default at the end of its help text."""
    about = each.about
    default = None if each.default is MISSING else each.default
    words: dict[str, Any] = {"type": each.read, "default": default, "metavar": about.get("metavar")}
    if each.type is bool:
        words |= {"nargs": "?", "const": True, "metavar": "BOOL"}
    elif each.choices:
        words["choices"] = each.choices
    elif words["metavar"] is None:
        words["metavar"] = {int: "N", float: "X"}.get(each.type, "TEXT")
    if each.several:
        words["nargs"] = "+"
        if default is None and not about.get("positional"):
            words["action"] = "extend"
    elif "const" in about:
        words |= {"nargs": "?", "const": about["const"]}
    said = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    said = f"{said:g}" if isinstance(said, float) else said
    told = "" if said in (None, False, "") else " (on)" if said is True else f" ({said})"
    names = [each.name] if about.get("positional") else [f"--{name}" for name in (each.name, *about.get("names", ()))]
    action = group.add_argument(*names, help=about["help"] + told, **words)
    action.summary = about["help"].partition("; ")[0] + told  # type: ignore[attr-defined]  # see Parser.format_help
    return action


def _short(action: argparse.Action) -> argparse.Action:
    """A copy of an option for the short help: one name, and the help text up to its first semicolon."""
    short = copy.copy(action)
    short.option_strings = list(action.option_strings[:1])
    short.help = getattr(action, "summary", action.help)
    if action.metavar == "BOOL":
        short.metavar, short.nargs = None, 0
    return short
