"""Options declared as dataclass fields, from which flags, ``--help``, defaults, choices and range checks derive."""

import argparse
import difflib
import importlib
import json
import math
import numbers
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from stepjepa.base.errors import UserError, shown

Range = tuple[Callable[[Any], bool], str]
"""A test whether a value is allowed, and its description for messages. Every test is false for NaN."""

FROM_ZERO: Range = (lambda value: 0 <= value < math.inf, "0 or more")
FROM_ONE: Range = (lambda value: value >= 1, "1 or more")
FROM_TWO: Range = (lambda value: value >= 2, "2 or more")
POSITIVE: Range = (lambda value: 0 < value < math.inf, "a number above 0")
SHARE: Range = (lambda value: 0 < value < 1, "a share between 0 and 1")
BELOW_ONE: Range = (lambda value: 0 <= value < 1, "0 or more and less than 1")
PART: Range = (lambda value: 0 < value <= 1, "a share above 0 and up to 1")

T = TypeVar("T")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A dataclass field that is an option of a command.

    Args:
        default: the default value; without one the flag is required.
        help: the help text; ``--help`` shows it up to the first semicolon, ``--help_all`` and the reference show all.
        more: ``group``: heading in the help, instead of the class's; ``names``: other names of the flag; ``metavar``;
            ``choices``, if the type is no ``Literal``; ``allowed``: a :data:`Range`; ``parse``: converts the text,
            instead of the type, and ``expected`` describes it; ``const``: the value of a flag given without one;
            ``positional``: an argument without a flag; ``only_with``: the options without which this one has no effect,
            ``lora`` or ``target_grad ema``, joined by ``or``; ``default_of_flag``: what it means where the flag is not
            given, if that is not ``default``; what the owner needs, as ``affects`` of ``JepaConfig``.
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

    @property
    def flag(self) -> str:
        """The name in a flat mapping: of a flag without its dashes, and of a line in a YAML file."""
        return str(self.about.get("flag", self.name))

    @property
    def spellings(self) -> tuple[str, ...]:
        """The flag and its other names."""
        return (self.flag, *self.about.get("names", ()))

    def fault(self, value: Any) -> str | None:
        """Describe what is wrong with one value; None if it is allowed."""
        if value is None:
            return None
        if self.type in _KINDS:
            kind, words = _KINDS[self.type]
            if not isinstance(value, kind) or (isinstance(value, bool) and self.type is not bool):
                return f"expected {words}, got {shown(value)}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(self.choices)}, got '{value}'"
        allowed, expected = self.about.get("allowed", (None, None))
        return None if allowed is None or allowed(value) else f"expected {expected}, got {value}"

    def read(self, text: str) -> Any:
        """Convert the text of a flag to one value; ``ValueError`` says what is wrong with it."""
        read = READERS.get(self.type, str)
        if parse := self.about.get("parse"):
            read = _reader(self.about.get("expected") or self.about.get("allowed", (None, "a number"))[1], parse)
        value = read(text)
        if fault := self.fault(value):
            raise ValueError(fault)
        return value

    def convert(self, value: Any) -> Any:
        """Convert a value of a YAML file, which may be a text where a number is meant (``1e-5``), to the field's type.

        Raises:
            UserError: the value is of another type or not allowed.
        """
        if self.several:
            return [self._convert_one(each) for each in (value if isinstance(value, list | tuple) else [value])]
        return self._convert_one(value)

    def _convert_one(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise UserError(f"{self.flag}: expected one value, got the list {shown(str(value))}")
        try:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            # As a shell does.
            return self.read(str(Path(text).expanduser()) if text.startswith("~/") else text)
        except (ValueError, TypeError) as error:  # json's own for a date or for what holds itself
            raise UserError(f"{self.flag}: {error}") from None


def options_of(*settings: Any) -> Iterator[Option]:
    """The options of dataclasses, or of instances of them."""
    for owner in settings:
        hints = get_type_hints(owner if isinstance(owner, type) else type(owner))
        for each in fields(owner):
            if "help" not in each.metadata:
                continue
            hint, several = hints[each.name], False
            if get_origin(hint) in (Union, UnionType):
                hint = next(inner for inner in get_args(hint) if inner is not NoneType)
            if get_origin(hint) in (list, tuple):
                hint, several = get_args(hint)[0], True
            choices = get_args(hint) if get_origin(hint) is Literal else tuple(each.metadata.get("choices", ()))
            yield Option(each.name, hint, several, choices, each.default, each.metadata)


def _reader(expected: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that converts a text, or says what is ``expected`` if ``convert`` raises an error."""

    def read(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"expected {expected}, got {shown(text)}") from None

    return read


def _number(text: str) -> float:
    if math.isnan(value := float(text)):
        raise ValueError
    return value


_SWITCH = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}

_KINDS: Mapping[Any, tuple[type, str]] = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    bool: (bool, "true or false"),
}
"""Type -> the type of its values in Python, and the words for it."""

READERS: Mapping[Any, Callable[[str], Any]] = {
    int: _reader("a whole number", int),
    float: _reader("a number", _number),
    bool: _reader("true or false", lambda text: _SWITCH[text.lower()]),
}
"""Type -> function that converts the text of a flag."""


def check_values(settings: Any, sign: str = "--") -> None:
    """Raise ``UserError`` for the first option that is out of range or not among its choices."""
    for each in options_of(settings):
        value = getattr(settings, each.name)
        if each.several and not isinstance(value, list | tuple | None):
            raise UserError(f"{sign}{each.name}: expected a list, got {shown(value)}")
        for one in value if each.several and value is not None else (value,):
            if fault := each.fault(one):
                raise UserError(f"{sign}{each.name}: {fault}")


def refuse_without_effect(values: Mapping[str, Any], *settings: type) -> None:
    """Raise ``UserError`` for an option of these dataclasses without effect; see ``only_with`` of :func:`option`.

    ``values`` holds the value of every option, by name.
    """
    for each in options_of(*settings):
        condition = each.about.get("only_with")
        if condition is None or values[each.flag] in (None, each.default):
            continue
        if not has_effect(each, values):
            words = " or ".join(f"`{other}`" for other in condition.split(" or "))
            raise UserError(f"`{each.flag}` does nothing without {words}; add it or leave it out")


def has_effect(each: Option, values: Mapping[str, Any]) -> bool:
    """Return whether one of the options is set without which this one has no effect."""
    wanted = [other.partition(" ") for other in each.about.get("only_with", "").split(" or ")]
    return wanted == [("", "", "")] or any(
        values[name] == value if value else values[name] not in (None, False) for name, _, value in wanted
    )


def refuse_both(args: argparse.Namespace, *pairs: tuple[str, str]) -> None:
    """Raise ``UserError`` if both flags of a pair are set."""
    for pair in pairs:
        if all(getattr(args, name) not in (None, False) for name in pair):
            raise UserError(f"--{pair[0]} and --{pair[1]} exclude each other; leave one out")


def from_args(settings: type[T], args: argparse.Namespace, **more: Any) -> T:
    """Create an instance of a dataclass from the parsed flags of its options; ``more`` sets or replaces fields."""
    named = {each.name: getattr(args, each.name) for each in options_of(settings) if each.name not in more}
    return settings(**named, **more)


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Convert a mapping of flags to command line arguments; flags whose value is None are omitted."""

    def word(value: Any) -> str:
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        # As a shell does.
        return str(Path(text).expanduser()) if text.startswith("~/") else text

    result: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            result.extend([f"--{name}", *map(word, value)])
        elif value is not None:
            # One argument, so that a value that begins with a dash is not read as a flag.
            result.append(f"--{name}={word(value)}")
    return result


def without_flags(arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """Remove flags, and their values if they have one, from a command line without positional arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", nargs="*")
    return parser.parse_known_args(list(arguments))[1]


class Parser(argparse.ArgumentParser):
    """A parser of dataclass options with a short help, which raises ``UserError`` where a command line is wrong.

    Attributes:
        common: names of the options that ``--help`` shows, in short form; with none it shows all, in full.
        more_help: returns text for the end of ``--help_all``.
        takes_others: return unknown flags and don't ask for missing ones; otherwise both are errors.
        required: names of the flags without a default.
    """

    def __init__(self, *, common: Collection[str] = (), **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **more)
        self.common, self.required = common, list[str]()
        self.more_help: Callable[[Parser], str] = lambda _: ""
        self.takes_others = False
        self.add_argument("--offline", action="store_true", help="use the libraries' offline mode: ask no hub")
        if common:
            self.add_argument("--help_all", action="help", help="show every flag")

    def add(self, settings: type, group: str, without: Collection[str] = ()) -> None:
        """Add the flags of a dataclass ``without`` some fields; ``group`` is the heading of those that name none."""
        for each in options_of(settings):
            if each.name not in without:
                title = each.about.get("group", group)
                section = next((known for known in self._action_groups if known.title == title), None)
                _add(section or self.add_argument_group(title), each)
                if each.default is MISSING and not each.about.get("positional"):
                    self.required.append(each.name)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse unknown and missing flags unless the parser takes others."""
        if self.common and "--help_all" in (args or ()):
            self.common = ()
            print(self.format_help() + self.more_help(self))
            self.exit()
        found, unknown = super().parse_known_args(args, namespace)
        if not self.takes_others:
            if unknown:
                self.refuse(unknown)
            self.refuse_missing(found, *self.required)
        return found, unknown

    def refuse_missing(self, args: argparse.Namespace, *names: str) -> None:
        """Raise an error if one of the flags has no value."""
        if missing := [f"--{name}" for name in names if getattr(args, name) is None]:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def refuse(self, unknown: Sequence[str], known: Iterable[str] = ()) -> NoReturn:
        """Raise an error that names the first unknown argument, and a flag of the parser or in ``known`` like it."""
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, [*self._option_string_actions, *known], n=1)
        remedy = f"did you mean {near[0]}?" if near else f"{self.prog} --help{'_all' if self.common else ''} names all"
        self.error(f"unknown argument {shown(unknown[0])}; {remedy}")

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError``; it names a flag by its first name only."""
        raise UserError(re.sub(r"^argument (--\w+)(?:/--[\w-]+)+:", r"argument \1:", message))

    def format_help(self) -> str:
        """The help text: all options in full, or the common ones in short form."""
        positional = [str(each.metavar or each.dest) for each in self._actions if not each.option_strings]
        needed = [f"--{name} {self._option_string_actions[f'--{name}'].metavar}" for name in self.required]
        self.usage = " ".join([self.prog, *positional, *needed, "[flags below]"])
        if self.common:
            hidden = [each for each in self._actions if each.dest not in self.common]
            for each in self._actions:
                # One name, and the help text up to its first semicolon.
                each.option_strings, each.help = each.option_strings[:1], getattr(each, "summary", each.help)
                if each.metavar == "BOOL":
                    each.metavar, each.nargs = None, 0
            for each in hidden:
                each.help = argparse.SUPPRESS
            self.epilog = f"{self.epilog or ''}\n{self.prog} --help_all: {len(hidden)} more flags.".strip()
        return super().format_help()


def argument_type(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of a flag's text with errors that argparse shows as they are."""

    def read(text: str) -> Any:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _add(group: argparse._ArgumentGroup, each: Option) -> None:
    """Add the flag of an option, with its default at the end of its help text."""
    about, default = each.about, None if each.default is MISSING else each.default
    metavar = about.get("metavar") or (None if each.choices else {int: "N", float: "X"}.get(each.type, "TEXT"))
    words: dict[str, Any] = {"type": argument_type(each.read), "default": default, "metavar": metavar}
    words |= {"choices": each.choices} if each.choices else {}
    if each.type is bool:
        words |= {"nargs": "?", "const": True, "metavar": "BOOL"}
    elif each.several:
        words |= {"nargs": "+"} if default or about.get("positional") else {"nargs": "+", "action": "extend"}
    elif "const" in about:
        words |= {"nargs": "?", "const": about["const"]}
    said = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    said = about.get("default_of_flag") or (f"{said:g}" if isinstance(said, float) else said)
    told = "" if said in (None, False, "") else " (on)" if said is True else f" ({said})"
    names = [each.name] if about.get("positional") else [f"--{name}" for name in (each.name, *about.get("names", ()))]
    action = group.add_argument(*names, help=about["help"] + told, **words)
    action.summary = about["help"].partition("; ")[0] + told  # type: ignore[attr-defined]  # for the short help


def load(flag: str, address: str) -> Any:
    """Load the user's own ``module:name``, which runs code of that module; it may be in the working folder."""
    # Unlike 'python -m', an installed command does not search the working folder. Added last, it hides no module.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{flag}: can't load '{address}' ({cause}); expected an importable module:name") from None


def load_class(flag: str, address: str, base: type[T]) -> type[T]:
    """Load a class of the user with :func:`load`, and check that it is a complete class derived from ``base``."""
    found = load(flag, address)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag}: '{address}' is no class derived from {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"{flag}: '{address}' lacks the method '{missing[0]}'; see docs/design.md")
    return found
