"""The processes that were started together, and the CPU cores that one may use."""

import os


def is_main_process() -> bool:
    """Return whether this process has rank 0 among those of torchrun or accelerate; only it writes shared files."""
    return int(os.environ.get("RANK", "0")) == 0


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
