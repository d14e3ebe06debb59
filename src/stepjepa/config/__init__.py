"""Typed settings of the objective and of a run."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Give the names that ``stepjepa.config`` had while it was a module, in 0.2.0."""
    from stepjepa.config import jepa

    if name.startswith("__") or not hasattr(jepa, name):
        raise AttributeError(f"module 'stepjepa.config' has no attribute '{name}'")
    warnings.warn(f"stepjepa.config.{name} is now stepjepa.config.jepa.{name}", DeprecationWarning, stacklevel=2)
    return getattr(jepa, name)
