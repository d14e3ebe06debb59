"""The processes that were started together, the one that reports an error, and the CPU cores that one may use."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepjepa.base.errors import UserError, shown

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LAUNCH_VARIABLES = (*_NUMBERS, "GROUP_RANK", "MASTER_ADDR")
"""Variables by which torchrun tells a process of the others."""


def check_launch() -> None:
    """Raise ``UserError`` if torchrun's variables are half set, as an unfinished job script leaves them.

    A process of rank 1 that is alone would train, and write no record of it.
    """
    remedy = "unset it, or start with torchrun"
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is not None and not re.fullmatch("-?[0-9]+", value):
            raise UserError(f"the environment variable {name} is {shown(value)}, expected a whole number; {remedy}")
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE")
    if not 0 <= int(rank) < int(size or 1):
        others = "not set" if size is None else size
        fault = f"the environment variable RANK is {rank}, and WORLD_SIZE is {others}, so that there is no such process"
        raise UserError(f"{fault}; {remedy}")


@contextmanager
def as_single_process() -> Iterator[None]:
    """Unset torchrun's variables, so that libraries, and :func:`is_main_process`, behave as in a single process."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def is_main_process() -> bool:
    """Return whether this process has rank 0 among those of torchrun or accelerate; only it writes shared files."""
    return int(os.environ.get("RANK", "0")) == 0


def started_together() -> int:
    """Return the number of processes of torchrun or accelerate; 1 without them."""
    # Without a local rank, WORLD_SIZE may be the number of a cluster's machines, each with one process.
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def claim_report(message: str, *, follows: bool = False) -> bool:
    """Return whether this process is to print its last message; of all that torchrun started here, one prints it.

    torchrun gives each process a file for its error, which its own summary shows. The message is also written there,
    and a file beside it marks the message as printed.

    Args:
        message: the message.
        follows: the message follows from the error of another process, and is not printed if there was one.
    """
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    folder = file.parent.parent
    # Files are written only into a folder that torchrun made for its processes.
    if file.name != "error.json" or file.parent.name != os.environ.get("LOCAL_RANK"):
        return True
    try:
        if follows and any(folder.glob("*/error.json")):
            return False
        first = _make(folder / f"reported-{hashlib.sha256(message.encode()).hexdigest()}")
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    except OSError:
        return True
    return first


def _make(path: Path) -> bool:
    """Make an empty file; return whether it was not there before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
