"""One program at a time in a folder: a lock that the kernel releases whatever happens to the process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepjepa.errors import UserError, visible


@contextmanager
def locked(folder: Path, what: str, patience: float = 0.5) -> Iterator[None]:
    """Hold the lock of a folder while the block runs; its file stands beside the folder, hidden.

    Nothing is locked where the system has no ``flock`` or the file can't be written: a lock is a help, no need.

    Args:
        folder: it need not exist; the one that it is in is made.
        what: the program that holds it, for the error that another one gets.
        patience: seconds to wait for a lock that is held.

    Raises:
        UserError: another process holds it; it says which one, on which host, since when.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    path = folder.absolute().with_name(f".{folder.absolute().name}.lock")
    made = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+", encoding="utf-8")
    except OSError:
        yield
        return
    with stream:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    stream.seek(0)
                    holder = visible(stream.read().strip())
                    raise UserError(f"is in use by {holder}; wait for it or stop it", path=folder) from None
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        stream.truncate(0)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        stream.write(f"{what}, process {os.getpid()} on {socket.gethostname()} since {now}")
        stream.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # a run that began stands in it
                    path.parent.rmdir()
