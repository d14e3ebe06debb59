"""Devices to estimate runs for. Free of torch."""

from typing import NamedTuple


class Device(NamedTuple):
    """The figures of a data sheet."""

    peak: float  # FLOP/s of dense bfloat16 matrix products
    memory: float  # bytes


DEVICES = {
    "a100": Device(312e12, 80e9),
    "h100": Device(989e12, 80e9),
    "h200": Device(989e12, 141e9),
    "b200": Device(2250e12, 180e9),
    "l40s": Device(362e12, 48e9),
    "mi300x": Device(1307e12, 192e9),
}
"""Name of a device -> its data sheet."""
