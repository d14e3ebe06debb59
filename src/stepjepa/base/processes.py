"""The processes that were started together, the one that reports an error, and the CPU cores that one may use."""

import hashlib
import json
import os
import time
from pathlib import Path


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
