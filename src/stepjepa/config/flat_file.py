"""Read a YAML file of ``name: value`` lines, such as that of a run; the names are not looked up here."""

from __future__ import annotations

import os
from pathlib import Path

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import existing_file, read_text, read_yaml
from stepjepa.base.json_object import JsonObject

_PARTS = ("jepa", "lora", "trainer")  # of a ``RunConfig``, which Python nests


def read_flat(path: str | os.PathLike[str]) -> JsonObject:
    """Read the lines of a YAML file as settings by the names of their flags, with underscores; nothing is checked yet.

    Raises:
        UserError: it is no YAML of ``name: value`` lines, or a name occurs twice or is a part of ``RunConfig``.
    """
    file = existing_file(path, "configuration file")
    values = read_yaml(file)
    if not isinstance(values, dict | None):
        raise UserError(f"holds a {type(values).__name__}; expected 'name: value' lines", path=file)
    flat: JsonObject = {}
    for key, value in (values or {}).items():
        name = str(key).replace("-", "_")
        if name in flat:
            raise UserError(f"the key {shown(str(key))} occurs twice; leave one out", path=file)
        if name in _PARTS and isinstance(value, dict):
            fault = f"'{name}' is a group of Python alone; write its settings at the top level"
            raise UserError(fault, path=file, line=line_of(file, name))
        flat[name] = value
    return flat


def line_of(path: str | os.PathLike[str], *names: str) -> int | None:
    """Return the line number of the first of ``names`` that is a key of a YAML file; None if none is."""
    lines = [line.lstrip(" \t{,'\"?").replace("-", "_") for line in read_text(Path(path)).splitlines()]
    for name in names:
        for number, line in enumerate(lines, start=1):
            if line.partition(":")[0].strip(" '\"") == name and ":" in line:
                return number
    return None
