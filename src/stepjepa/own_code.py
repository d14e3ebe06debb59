"""Classes and functions that the user names on the command line: the one case in which code from outside is run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, TypeVar

from stepjepa.errors import UserError

Base = TypeVar("Base")


def load(flag: str, address: str, kind: str = "Class") -> Any:
    """Load a class or function, also from a module in the working folder.

    Args:
        flag: that named it, for errors.
        address: ``module:name``.
        kind: what the name should be, for errors.

    Raises:
        UserError: there is none, or its module fails when it is loaded.
    """
    module, _, name = address.partition(":")
    # 'python -m' looks in the working folder, an installed command does not. Last, so that it hides nothing.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the module is the user's, and may do anything when it is loaded
        plain = isinstance(error, ImportError | SyntaxError | AttributeError | ValueError | TypeError)
        cause = str(error) if plain else f"{type(error).__name__}: {error}"
        raise UserError(f"{flag}: can't load '{address}' ({cause}); expected an importable module:{kind}") from None


def load_class(flag: str, address: str, base: type[Base]) -> type[Base]:
    """Load a class that is derived from another one.

    Args:
        flag: that named it, for errors.
        address: ``module:Class``.
        base: that it must be derived from.

    Raises:
        UserError: there is no such class, its module fails when it is loaded, or it is abstract.
    """
    found = load(flag, address)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag}: '{address}' is no class derived from {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"{flag}: '{address}' lacks the method '{missing[0]}'; see docs/design.md")
    return found
