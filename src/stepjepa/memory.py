"""Recognise out-of-memory errors of an accelerator or the CPU. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stepjepa.errors import UserError

# Messages of allocators that raise a plain RuntimeError: torch's on the CPU, and those of other devices.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "failed to allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    # Compared by name, without importing torch: its OutOfMemoryError serves every accelerator.
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


@contextmanager
def naming_batch_size(batch_size: int) -> Iterator[None]:
    """Re-raise an out-of-memory error as a ``UserError`` that names ``--batch_size``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory with --batch_size {batch_size}; lower it") from None
