"""What ``evaluate`` and ``score`` share: a flag, and the line that says how answers are scored."""

# option() makes the field

from __future__ import annotations

from dataclasses import dataclass

from stepjepa.options import option
from stepjepa.tasks.registry import AUTO, FALLBACK


@dataclass
class JsonFlags:
    """How the summary is printed."""

    json: bool = option(False, "the summary as JSON on standard output, lines on standard error")


def describe_task(asked: str, found: str) -> str:
    """A line that says how answers are scored, and why so.

    Args:
        asked: what ``--task`` said.
        found: the name of the task.
    """
    if asked != AUTO:
        return f"task: {found} (as asked for)"
    # Also where it is scored by the published rules, which its name says then.
    return f"task: {found} ({'nothing more special was ' if found.startswith(FALLBACK) else ''}recognised)"
