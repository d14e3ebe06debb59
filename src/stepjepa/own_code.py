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
    module, _, name = address.partition(":")
    # Unlike 'python -m', an installed command does not search the working folder. Added last, it hides no module.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        plain = isinstance(error, ImportError | SyntaxError | AttributeError | ValueError | TypeError)
        cause = str(error) if plain else f"{type(error).__name__}: {error}"
        raise UserError(f"{flag}: can't load '{address}' ({cause}); expected an importable module:{kind}") from None


def load_class(flag: str, address: str, base: type[Base]) -> type[Base]:
    """Load a class and check its base class.

    Args:
        flag: the flag that names it, for errors.
        address: ``module:Class``.
        base: the class that it must be derived from.

    Raises:
        UserError: the class does not exist, its module fails when it is imported, it is not derived from ``base``, or
            it is abstract.
    """
    found = load(flag, address)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{flag}: '{address}' is no class derived from {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"{flag}: '{address}' lacks the method '{missing[0]}'; see docs/design.md")
    return found
