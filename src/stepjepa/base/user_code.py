"""Import objects and classes that a user names as ``module:name``."""

import importlib
import sys
from pathlib import Path
from typing import Any, TypeVar

from stepjepa.base.errors import UserError

T = TypeVar("T")


def load(flag: str, address: str) -> Any:
    """Import a user's object, which runs the code of its module; the module may be in the working folder.

    Args:
        flag: the setting that names it, for the error.
        address: ``module:name``.

    Raises:
        UserError: the module can't be imported, or has no such name.
    """
    # Unlike 'python -m', an installed command does not search the working folder. Added last, it hides no module.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        cause = f"{type(error).__name__}: {error}"
        remedy = f"write {module[:-3].replace('/', '.')}:{name}" if module.endswith(".py") else ""
        remedy = remedy or "expected an importable module:name"
        raise UserError(f"{flag}: can't load '{address}' ({cause}); {remedy}") from None


def load_class(flag: str, address: str, base: type[T], page: str = "docs/design.md") -> type[T]:
    """Load a user's class with :func:`load`.

    Args:
        flag: the setting that names it, for the error.
        address: ``module:name``.
        base: the class that it must be derived from.
        page: the document that describes such classes, for the error.

    Raises:
        UserError: it can't be imported, is not derived from ``base``, or lacks one of its abstract methods.
    """
    value = load(flag, address)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(f"{flag}: '{address}' is no class derived from {base.__module__}.{base.__name__}")
    if missing := sorted(getattr(value, "__abstractmethods__", ())):
        raise UserError(f"{flag}: '{address}' lacks the method '{missing[0]}'; see {page}")
    return value
