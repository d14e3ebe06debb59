"""The error that a user can correct, helpers to print untrusted text in messages, and errors of exhausted memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# Allocators that raise a plain RuntimeError: torch's on the CPU, and those of other devices.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "failed to allocate memory")

ANOTHER_ENDED = "another process of the run has ended"
"""Part of the message of a process that could not go on because another one had failed, been stopped or killed."""

# What libraries say of a connection to a process that is gone, and the errors in which they say it.
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection was likely closed", "remote process exited")
_DISTRIBUTED = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class UserError(ValueError):
    """Wrong input that the user can correct; the command line prints it on one line and exits with code 2.

    Args:
        message: what is wrong and what to do about it.
        path: the file at fault, if any.
        line: the line in that file, counted from 1, if any.
    """

    def __init__(self, message: str, *, path: object = None, line: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{place}{message}")
        self.line = line

    def at(self, path: object, line: int | None = None) -> "UserError":
        """Return this error with its place in front of the message; arguments as for the class."""
        return UserError(str(self), path=path, line=line)


def shown(value: object) -> str:
    """Format a value from a file for a message: in quotes, shortened, control characters escaped."""
    text = value if isinstance(value, str) else repr(value)
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return f"'{visible(short)}'"


def visible(text: str) -> str:
    """Escape the control characters and other unprintable characters of a text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def one_line(error: BaseException | str) -> str:
    """Format an error for the command line: one line, control characters escaped."""
    return visible(" ".join(str(error).split()))


def unexpected(error: Exception) -> str:
    """Return the message for an error that is not the user's; log the traceback at level debug."""
    logging.getLogger(__name__).debug("unexpected error", exc_info=error)
    if is_of_ended_process(error):
        return f"{ANOTHER_ENDED}; what it printed says why, unless it was killed"
    # These types are raised on purpose with a message for the user; of other errors, the type is needed, too.
    message = isinstance(error, ValueError | RuntimeError | ImportError) and str(error)
    return message or f"{type(error).__name__}: {error}"


@contextmanager
def unexpected_as_user_errors() -> Iterator[None]:
    """Raise an error of the block as a ``UserError``, for one line on the screen; those of the system stay."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:  # of any library; its traceback is in the log at level debug
        raise UserError(unexpected(error)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the CPU or on an accelerator."""
    # By name, so that torch is not imported here: its OutOfMemoryError serves every accelerator.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _NO_MEMORY)


def is_of_ended_process(error: BaseException) -> bool:
    """Return whether an error is that of a connection to another process of the run, which is gone."""
    text = str(error)
    is_distributed = "gloo" in text or type(error).__name__ in _DISTRIBUTED
    return isinstance(error, RuntimeError) and is_distributed and any(words in text for words in _GONE)


@contextmanager
def raising_user_errors() -> Iterator[None]:
    """Raise a ``ValueError`` of the block, which names settings, as a ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from None


@contextmanager
def naming_batch_size(batch_size: int) -> Iterator[None]:
    """Re-raise an out-of-memory error as a ``UserError`` that names ``batch_size``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if batch_size == 1:
            raise UserError(
                "out of memory with one text at a time; shorten the texts, or take a smaller dtype"
            ) from None
        raise UserError(f"out of memory with `batch_size {batch_size}`; lower it") from None
