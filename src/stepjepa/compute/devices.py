"""Peak rates and memory of accelerators, from their data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """One accelerator.

    Attributes:
        name: as sold.
        peak: FLOP/s of dense bfloat16 matrix products; training reaches a share of it, the MFU.
        memory: bytes, a gigabyte as sold taken for 10**9.
    """

    name: str
    peak: float
    memory: float


DEVICES = {
    "a100": Device("NVIDIA A100 SXM 80 GB", 312e12, 80e9),
    "h100": Device("NVIDIA H100 SXM 80 GB", 989e12, 80e9),
    "h200": Device("NVIDIA H200 SXM 141 GB", 989e12, 141e9),
    "b200": Device("NVIDIA B200 SXM 180 GB", 2250e12, 180e9),
    "l40s": Device("NVIDIA L40S 48 GB", 362e12, 48e9),
    "mi300x": Device("AMD MI300X 192 GB", 1307e12, 192e9),
}
