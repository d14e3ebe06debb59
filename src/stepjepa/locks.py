"""A lock that admits one program at a time to a folder; the kernel releases it however the process ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from stepjepa.errors import UserError, visible


@contextmanager
def locked(folder: Path, what: str, patience: float = 0.5) -> Iterator[None]:
    """Hold the lock of a folder while the block runs; the lock is a hidden file beside the folder.

    If that file can't be written the block runs without a lock.

    Args:
        folder: the folder; it need not exist, and its parent is created if missing.
        what: name of this program, for the error that another program gets.
        patience: seconds to wait for a lock that another process holds.

    Raises:
        UserError: another process holds the lock; the error names the process, its host and the time of locking.
    """
    path = folder.absolute().with_name(f".{folder.absolute().name}.lock")
    made = not path.parent.exists()
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience)
        path.write_text(f"{what}, process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}")
    except Timeout:
        holder = visible(path.read_text().strip()) if path.exists() else "another process"
        raise UserError(f"is in use by {holder}; wait for it or stop it", path=folder) from None
    except OSError:  # a folder that can't be written to, a file system without locks
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)
            lock.release()
        if made:
            with suppress(OSError):  # not empty: the run has created its folder
                path.parent.rmdir()
