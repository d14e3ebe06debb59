"""What a name of a model means: a preset, a folder, or an id of the hub."""

from __future__ import annotations

import difflib
from pathlib import Path

from stepjepa.errors import UserError
from stepjepa.models.presets import PREFIX, PRESETS


def is_hub_id(name: str) -> bool:
    """Whether a model would be asked of the hub: neither a preset, nor a folder, nor what can only be a path.

    A name such as ``runs/one`` is a path where there is a folder ``runs``.
    """
    if ":" in name or Path(name).is_dir() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def refuse_missing(name: str) -> None:
    """Say of a folder that it is missing, and of a preset that it is misspelt, before it is taken for a hub id.

    Raises:
        UserError: it is no folder, and no hub id either.
    """
    if Path(name).is_dir() or is_hub_id(name):
        return
    if ":" in name:
        near = difflib.get_close_matches(name, [PREFIX + preset for preset in PRESETS], n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]}?" if near else f"presets begin with {PREFIX}, such as {PREFIX}tiny"
        raise UserError(f"no model '{name}', and no hub id holds a colon; {remedy}")
    parent = Path(name).expanduser().parent
    folders = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(name).name, folders, n=1)
    remedy = f"did you mean {Path(name).parent / near[0]}?" if near else "check the path"
    raise UserError(f"no such model folder; {remedy}", path=name)
