"""Memory that runs out, on an accelerator or on the CPU. Free of torch."""

from __future__ import annotations

# How allocators say it that raise no error of their own kind: torch's on a CPU, and those of other devices.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "failed to allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory."""
    # That of torch, for every accelerator.
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)
