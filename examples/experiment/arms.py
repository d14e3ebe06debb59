"""What the arms of a sweep are, from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def rows(file: Path) -> list[list[str]]:
    """Heads, and for each arm its name and the flags that are its own.

    Args:
        file: YAML of the sweep.
    """
    arms: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))["arms"]
    return [["arm", "flags"], *([name, f"`{' '.join(map(_flag, arm.items()))}`"] for name, arm in arms.items())]


def _flag(item: tuple[str, Any]) -> str:
    name, value = item
    return f"--{name}" if value is True else f"--{name} {value}"
