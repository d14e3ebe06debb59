"""One program at a time in a folder: a lock that the kernel releases however the process ends."""

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
    """Hold the lock of a folder while the block runs; its file stands beside the folder, hidden.

    Where the file can't be written nothing is locked: a lock is a help, not a need.

    Args:
        folder: it need not exist; the one that it is in is made.
        what: the program that holds it, for the error that another one gets.
        patience: seconds to wait for a lock that is held.

    Raises:
        UserError: another process holds it; it says which one, on which host, since when.
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
            with suppress(OSError):  # a run that began stands in it
                path.parent.rmdir()
