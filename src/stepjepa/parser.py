"""An argument parser whose errors are one line, with the nearest known flag."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from stepjepa.errors import one_line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and exit code 2, unknown flags answered with the nearest known.

    Attributes:
        origins: for each flag that a configuration file names, file and line, for errors.
    """

    origins: Mapping[str, str] = MappingProxyType({})
    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As always; what was given is remembered for :meth:`error`."""
        self._given = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        told = self._mistyped(message) or message
        # The command line stands behind the file and wins, so what it names too is wrong there.
        for flag in re.findall(r"--\w+", told.partition(":")[0]) or re.findall(r"--\w+", told)[:1]:
            last = next((each for each in reversed(self._given) if each.partition("=")[0] == flag), "")
            if flag in self.origins and "=" in last:
                told = f"{self.origins[flag]}: {told}"
                break
        self.exit(2, f"{self.prog}: error: {one_line(told)}\n")

    def _mistyped(self, message: str) -> str | None:
        """What to say instead where a required flag, or one of several choices, was only mistyped."""
        if match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), n=1)
            return f"{message[: match.start()]}invalid choice '{match[1]}'; did you mean '{near[0]}'?" if near else None
        _, required, names = message.partition("the following arguments are required: ")
        for name in (argument.partition("=")[0] for argument in self._given if required):
            near = difflib.get_close_matches(name, names.split(", "), n=1)
            if near and name.startswith("--") and name not in self._option_string_actions:
                return f"unknown argument '{name}'; did you mean {near[0]}?"
        return None


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str], known: Sequence[str] = ()) -> NoReturn:
    """End with an error that names the first unknown argument and the flag nearest to it."""
    name = unknown[0].partition("=")[0]
    flags = [flag for action in parser._actions for flag in action.option_strings] + list(known)
    near = difflib.get_close_matches(name, flags, n=1)
    parser.error(f"unknown argument '{unknown[0]}'" + (f"; did you mean {near[0]}?" if near else "; see --help"))
