"""The processes that torchrun, accelerate or a notebook launcher has started together."""

import os


def is_main_process() -> bool:
    """Return whether this process has rank 0, the only one that writes shared files."""
    return int(os.environ.get("RANK", "0")) == 0
