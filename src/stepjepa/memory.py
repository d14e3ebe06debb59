"""Recognise out-of-memory errors of an accelerator or the CPU. Free of torch."""

from __future__ import annotations

# Messages of allocators that raise a plain RuntimeError: torch's on the CPU, and those of other devices.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "failed to allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    # Compared by name, without importing torch: its OutOfMemoryError serves every accelerator.
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)
