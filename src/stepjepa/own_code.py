"""Load the user's own classes and functions, named as ``module:name``; loading runs code of that module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, TypeVar

from stepjepa.errors import UserError

Base = TypeVar("Base")


def load(flag: str, address: str, kind: str = "Class") -> Any:
    """Load a class or function; the module may be in the working folder.

    Args:
        flag: the flag that names it, for errors.
        address: ``module:name``.
        kind: what the name should be, for errors.

    Raises:
        UserError: the module or the name does not exist, or the module fails when it is imported.
    """
    # Unlike 'python -m', an installed command does not search the working folder. Added last, it hides no module.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{flag}: can't load '{address}' ({cause}); expected an importable module:{kind}") from None


def load_class(flag: str, address: str, base: type[Base]) -> type[Base]:
    """Load a class of the user with :func:`load`, and check that it is a complete class derived from ``base``."""
    found = load(flag, address)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag}: '{address}' is no class derived from {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"{flag}: '{address}' lacks the method '{missing[0]}'; see docs/design.md")
    return found
