"""The parser of all commands, filled from typed settings; settings in messages are written as flags."""

import argparse
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from stepjepa.base.errors import UserError, shown
from stepjepa.base.settings_in_text import respelled, respelled_error
from stepjepa.base.similar_names import question, similar_names
from stepjepa.config.option import EMPTY_ITEM, Option, options_of, similar_settings, typed_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
V = TypeVar("V")


def check_exclusive(args: argparse.Namespace, *pairs: tuple[str, str]) -> None:
    """Raise ``UserError`` if both flags of a pair are set."""
    for pair in pairs:
        if all(getattr(args, name) not in (None, False) for name in pair):
            raise UserError(f"--{pair[0]} and --{pair[1]} exclude each other; leave one out")


def from_args(settings: type[T], args: argparse.Namespace, **more: Any) -> T:
    """Create an instance of a dataclass of options from parsed flags.

    Args:
        settings: the dataclass.
        args: has the values of its options.
        more: fields that are no options, or that replace a flag's value.
    """
    values = {setting.name: getattr(args, setting.name) for setting in options_of(settings) if setting.name not in more}
    return settings(**values, **more)


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """Convert a mapping of flags to command line arguments; flags whose value is None are omitted."""
    result: list[str] = []
    for name, value in flags.items():
        if isinstance(value, list):
            if None in value:
                raise UserError(f"--{name}: {EMPTY_ITEM}")
            result.extend([f"--{name}", *map(typed_text, value)])
        elif value is not None:
            # One argument, so that a value that begins with a dash is not read as a flag.
            result.append(f"--{name}={typed_text(value)}")
    return result


WIDEST = 100
"""Maximum number of columns of a help text, where the terminal has as many."""


def suggestion(name: str, names: Collection[str]) -> str:
    """Return the remedy for an unknown name: the known names like it, or all of them."""
    return question(similar_names(name, names)) or f"choose one of {', '.join(names)}"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """The text of a help: as wide as the terminal, up to :data:`WIDEST` columns."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, width=width, max_help_position=32 if width == WIDEST else 24)


class Parser(argparse.ArgumentParser):
    """A parser of typed settings with a short help, which raises ``UserError`` where a command line is wrong.

    Attributes:
        common: names of the settings that ``--help`` shows, in short form; with none it shows all, in full.
        more_help: returns text for the end of ``--help_all``.
        not_flags: names that are no flags, but are often typed -> the remedy.
        takes_others: return unknown flags and accept missing ones; otherwise both are errors.
        required: names of the flags without a default.
    """

    def __init__(self, *, common: Collection[str] = (), **more: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **more)
        self.common, self.required = common, list[str]()
        self.more_help: Callable[[Parser], str] = lambda _: ""
        self.not_flags: dict[str, str] = {}
        self.takes_others = False
        if self.add_help:  # else it is a part of another parser, which has the flags of every command
            self.add_argument("--offline", action="store_true", help="use the libraries' offline mode: ask no hub")
        if common:
            self.add_argument("--help_all", action="help", help="show every flag")

    def add(self, settings: type, group: str) -> None:
        """Add the flags of a dataclass; ``group`` is the heading of those that name none."""
        self.add_options(options_of(settings), group)

    def add_options(self, options: Iterable[Option], group: str, *, named_only: bool = False) -> None:
        """Add the flags of some settings.

        Args:
            options: the settings.
            group: the heading of those that name none.
            named_only: parsed arguments then hold only the flags that are named, no defaults.
        """
        for setting in options:
            title = setting.about.get("group", group)
            section = next((existing for existing in self._action_groups if existing.title == title), None)
            _add(section or self.add_argument_group(title), setting, named_only)
            if setting.default is MISSING and not setting.about.get("positional"):
                self.required.append(setting.flag)

    def add_switch_off(self, name: str) -> None:
        """Add ``--no_NAME``, which sets a switch to false."""
        self.add_argument(f"--no_{name}", dest=name, action="store_false", default=argparse.SUPPRESS)

    def flags(self) -> list[str]:
        """Return every flag, with its dashes; those of its sub-commands, too."""
        inner = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser for action in inner for parser in action.choices.values()]
        return [*self._option_string_actions, *(flag for parser in parsers for flag in parser._option_string_actions)]

    def destination(self, flag: str) -> str | None:
        """Return the name of the setting of a flag with dashes; None if there is no such flag."""
        action = self._option_string_actions.get(flag)
        return None if action is None else action.dest

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and refuse unknown and missing flags unless the parser takes others."""
        if self.common and "--help_all" in (args or ()):
            self.common = ()
            print(self.format_help() + self.more_help(self))
            self.exit()
        parsed, unknown = super().parse_known_args(args, namespace)
        if not self.takes_others:
            if unknown:
                self.refuse(unknown)
            self.check_required(parsed, *self.required)
        return parsed, unknown

    def check_required(self, args: argparse.Namespace, *names: str) -> None:
        """Raise an error if one of the flags has no value."""
        if missing := [f"--{name}" for name in names if getattr(args, name, None) is None]:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def refuse(self, unknown: Sequence[str], known: Iterable[str] = ()) -> NoReturn:
        """Raise an error that names the first unknown argument, and a flag of the parser or in ``known`` like it."""
        name = unknown[0].partition("=")[0]
        # Without the dashes, which would make any two flags alike.
        flags = {flag.lstrip("-").lower(): flag for flag in (*self._option_string_actions, *known)}
        near = [flags[similar] for similar in similar_settings(name.lstrip("-").lower(), flags)]
        every = f"{self.prog} --help{'_all' if self.common else ''} names all"
        remedy = self.not_flags.get(name) or question(near) or every
        self.error(f"unknown argument {shown(unknown[0])}; {remedy}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for an unknown sub-command that names the one like it."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown {action.metavar} {shown(value)}; {suggestion(value, action.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError``; it names a flag by its first name only."""
        raise UserError(re.sub(r"^argument (--\w+)(?:/--[\w-]+)+:", r"argument \1:", message))

    def format_help(self) -> str:
        """Return the help text: all options in full, or the common ones in short form."""
        positional = [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]
        needed = [f"--{name} {self._option_string_actions[f'--{name}'].metavar}" for name in self.required]
        self.usage = self.usage or " ".join([self.prog, *positional, *needed, "[flags below]"])
        if self.common:
            hidden = [action for action in self._actions if action.dest not in self.common]
            for action in self._actions:
                # One name, and the help text up to its first semicolon.
                action.option_strings, action.help = action.option_strings[:1], getattr(action, "summary", action.help)
                if action.metavar == "BOOL":
                    action.metavar, action.nargs = None, 0
            for action in hidden:
                action.help = argparse.SUPPRESS
            self.epilog = f"{self.epilog or ''}\n{self.prog} --help_all: {len(hidden)} more flags.".strip()
        return super().format_help()


def argument_type(reader: Callable[[str], V]) -> Callable[[str], V]:
    """Wrap a reader of a flag's text so that argparse shows its errors unchanged."""

    def read(text: str) -> V:
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def with_dashes(text: str, flags: Collection[str]) -> str:
    """Return a text that names settings in backticks with flags in their place.

    Args:
        text: a help text, a note or a message of the library.
        flags: the flags of a command, with their dashes; other words in backticks stay as they are.
    """
    return respelled(text, partial(_flag, flags), mark="")


def error_with_dashes(text: str, flags: Collection[str]) -> str:
    """Return an error as :func:`with_dashes`; a setting may be the word before its first colon."""
    return respelled_error(text, partial(_flag, flags), mark="")


def _flag(flags: Collection[str], name: str) -> str | None:
    return f"--{name}" if f"--{name}" in flags else None


def _add(group: argparse._ArgumentGroup, setting: Option, named_only: bool) -> None:
    """Add the flag of a setting, with its default at the end of its help text."""
    about, default = setting.about, None if setting.default is MISSING else setting.default
    metavar = about.get("metavar") or (None if setting.choices else {int: "N", float: "X"}.get(setting.type, "TEXT"))
    words: dict[str, Any] = {"type": argument_type(setting.read), "default": default, "metavar": metavar}
    words |= {"choices": setting.choices} if setting.choices else {}
    if named_only:
        words["default"] = argparse.SUPPRESS
    if setting.type is bool:
        words |= {"nargs": "?", "const": True, "metavar": "BOOL"}
    elif setting.several:
        replaced = default or about.get("positional")
        words |= {"nargs": "+"} if replaced else {"nargs": "+", "action": "extend"}
    elif "const" in about:
        words |= {"nargs": "?", "const": about["const"]}
    text = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    text = f"{text:g}" if isinstance(text, float) else text
    shown_default = "" if text in (None, False, "") else " (on)" if text is True else f" ({text})"
    names = [setting.flag] if about.get("positional") else [f"--{name}" for name in setting.spellings]
    summary = respelled(about["help"], "--{}".format, mark="")
    action = group.add_argument(*names, help=summary.replace("%", "%%") + shown_default, **words)
    action.summary = summary.partition("; ")[0] + shown_default  # type: ignore[attr-defined]  # for the short help
