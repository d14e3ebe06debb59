"""What a disk says that is full, can't be written to, or fails: made an error that names the file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Full, a quota or a largest size reached, failing, to be read only."""

# How libraries that write by themselves tell of them: safetensors with the system's number, PyTorch without.
_SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)")
_PYTORCH_WRITER = re.compile(r"PytorchStreamWriter|inline_container|basic_ios|iostream error")


@contextmanager
def naming_disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of a disk become an ``OSError`` that says what was being written, which the system does not tell.

    Args:
        path: what is being written.

    Raises:
        OSError: the disk is full, can't be written to, or fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    except Exception as error:  # safetensors and PyTorch wrap the system's error in ones of their own; others go on
        told = _SYSTEM_NUMBER.search(str(error))
        if told is not None and int(told[1]) in DISK_ERRORS:
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from None
        if isinstance(error, RuntimeError) and _PYTORCH_WRITER.search(str(error)):
            raise OSError(errno.EIO, "can't be written to its end; is the disk full?", str(path)) from None
        raise
