"""How many bytes a process holds at most: what an allocator takes from the machine, not what tensors need of it."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ProcessMemory:
    """Measures the peak from now on, over what is held now.

    On CUDA it is what torch's allocator has reserved; on a CPU the resident memory of the process, which Linux alone
    tells of a part of its life.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_reserved(device)
        elif can_measure(device):
            # What was freed before must not be there to be used again unseen.
            _libc().malloc_trim(0)
            _CLEAR.write_text("5", encoding="ascii")
            self._before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes over what was held at the beginning; None if this machine does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) - self._before
        return max(_status("VmHWM") - self._before, 0) if can_measure(self._device) else None


def can_measure(device: torch.device) -> bool:
    """Whether :class:`ProcessMemory` can tell anything here."""
    if device.type == "cuda":
        return True
    return device.type == "cpu" and sys.platform == "linux" and _CLEAR.exists() and hasattr(_libc(), "malloc_trim")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel tells no {name}")
