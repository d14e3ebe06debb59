"""Convert flags from a ``--config`` YAML file or a mapping into command line arguments."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError, shown
from stepjepa.files import existing_file, read_text, read_yaml

_MOST_VALUES = 10_000
"""Most values in a dict: with YAML aliases a few lines can expand to billions of values."""


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
        if has_value:
            parser.add_argument(f"--{name}", nargs="?")
        else:
            parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_known_args(list(arguments))[1]


def arguments_of_file(path: str, flags: Mapping[str, bool]) -> tuple[list[str], dict[str, str]]:
    """Read a YAML file of flags as arguments, to be put before those of the command line, which override them.

    Args:
        path: the file: a mapping from flag names, with ``_`` or ``-``, to values.
        flags: names of all known flags, without dashes, and whether each takes several values.

    Returns:
        The arguments; and for each flag, with its dashes, its file and line as ``file:line``.

    Raises:
        UserError: the file is missing, not YAML, or not a mapping; a key is unknown (the error names the nearest known
            one) or repeated; or a value can't be the value of a flag.
    """
    found = existing_file(path, "configuration file")
    values: Any = read_yaml(found)
    if values is None:
        return [], {}
    if not isinstance(values, dict):
        raise UserError(f"holds a {type(values).__name__}; expected 'flag: value' lines", path=found)
    lines = [line.lstrip(" \t{,'\"?") for line in read_text(found).splitlines()]
    flags_of_file: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        line = next((number for number, text in enumerate(lines, start=1) if text.startswith(str(key))), None)
        if name not in flags:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; see 'stepjepa train --help_all'"
            raise UserError(f"unknown key {shown(str(key))}{hint}", path=found, line=line)
        if name in flags_of_file:
            raise UserError(f"the key {shown(str(key))} stands twice; leave one", path=found, line=line)
        wrong = _not_a_value(value)
        if wrong is None and isinstance(value, list) and not flags[name]:
            wrong = "holds a list; expected one value"
        if wrong:
            raise UserError(f"{name}: {wrong}", path=found, line=line)
        flags_of_file[name] = value
        origins[f"--{name}"] = f"{found}:{line}" if line else str(found)
    return as_arguments(flags_of_file), origins


def _not_a_value(value: Any) -> str | None:
    """Why a value from YAML can't be the value of a flag; None if it can."""
    if isinstance(value, list):
        odd = [type(each).__name__ for each in value if each is None or isinstance(each, list | dict)]
        return f"holds a {odd[0]} in a list; expected words or numbers" if odd else None
    waiting, count = [value] if isinstance(value, dict) else [], 0
    while waiting:
        each: Any = waiting.pop()
        count += 1
        if count > _MOST_VALUES:
            return f"holds more than {_MOST_VALUES:,} values; expected a few"
        if isinstance(each, dict):
            waiting.extend([*each, *each.values()])
        elif isinstance(each, list):
            waiting.extend(each)
        elif not (each is None or isinstance(each, str | int | float)):
            return f"holds a {type(each).__name__}; put it in quotes"
    return None
