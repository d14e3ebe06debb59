"""Try a chat template under limits of time and memory, since it is untrusted code that comes with a model."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from stepjepa.errors import UserError

SECONDS = 10
MEMORY = 2**30
"""Bytes that rendering may use beyond the memory of the process."""

_NO_MEMORY = 3
"""Exit code of a fork that ran out of memory."""


def refuse_runaway(render: Callable[[], object]) -> None:
    """Refuse a chat template that does not terminate, or exhausts the memory, on a short chat.

    The chat is rendered in a fork that runs under the limits; a system without ``os.fork`` skips the check. Other
    errors are ignored here, since they recur when the caller renders the chat.

    Args:
        render: renders the chat.

    Raises:
        UserError: rendering takes more than :data:`SECONDS` or :data:`MEMORY`.
    """
    if not hasattr(os, "fork"):
        return
    child = os.fork()
    if child == 0:
        os._exit(_within_limits(render))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == _NO_MEMORY or status < 0:
        limit = f"{SECONDS} seconds" if status == -signal.SIGALRM else f"{MEMORY >> 30} GiB"
        raise UserError(
            f"the chat template takes more than {limit} to render three words; pass another with --chat_template"
        )


def _within_limits(render: Callable[[], object]) -> int:
    """Render under the limits, in the fork; returns the fork's exit code."""
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
    except BaseException:  # the fork must not return into the code of its parent
        return 0
    return 0
