"""Try a chat template within limits of time and memory: it comes with a model, from whoever made that."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from stepjepa.errors import UserError

SECONDS = 10
MEMORY = 2**30
"""Bytes above what the process has."""

_NO_MEMORY = 3
"""Exit code."""


def refuse_runaway(render: Callable[[], object]) -> None:
    """Refuse a template that does not end, or fills the memory, with a short chat.

    The chat is rendered in a fork, which the system ends at its limits. Other errors are left to the caller, who gets
    the same ones.

    Args:
        render: renders it.

    Raises:
        UserError: it takes more than :data:`SECONDS` or :data:`MEMORY`.
    """
    if not hasattr(os, "fork"):
        return
    child = os.fork()
    if child == 0:
        os._exit(_within_limits(render))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == _NO_MEMORY or status < 0:
        limit = f"{SECONDS} seconds" if status == -signal.SIGALRM else f"{MEMORY >> 30} GiB"
        raise UserError(f"the chat template takes more than {limit} for a chat of three words; name another")


def _within_limits(render: Callable[[], object]) -> int:
    """The exit code of the fork."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        if (sizes := Path("/proc/self/statm")).exists():
            import resource

            used = int(sizes.read_text().split()[0]) * resource.getpagesize()
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
        render()
    except MemoryError:
        return _NO_MEMORY
    except BaseException:  # nothing of this process may come back from the fork
        return 0
    return 0
