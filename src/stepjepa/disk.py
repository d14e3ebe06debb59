"""Disk errors (full, read-only, failing) re-raised as ``OSError`` with the name of the file being written."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Disk full, quota exceeded, file too large, input/output error, read-only file system."""

# Disk errors in the messages of libraries: safetensors gives the system's error number, PyTorch gives none.
_SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)")
_PYTORCH_WRITER = re.compile(r"PytorchStreamWriter|inline_container|basic_ios|iostream error")


@contextmanager
def naming_disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Re-raise disk errors as ``OSError`` with the path being written, which the system's error lacks.

    Args:
        path: the file or folder being written.

    Raises:
        OSError: the disk is full, can't be written to, or fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    except Exception as error:  # safetensors and PyTorch raise disk errors as types of their own
        told = _SYSTEM_NUMBER.search(str(error))
        if told is not None and int(told[1]) in DISK_ERRORS:
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from None
        if isinstance(error, RuntimeError) and _PYTORCH_WRITER.search(str(error)):
            raise OSError(errno.EIO, "can't be written to its end; is the disk full?", str(path)) from None
        raise
