"""Devices to estimate runs for. Free of torch."""

DEVICES = {
    "a100": (312e12, 80e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "b200": (2250e12, 180e9),
    "l40s": (362e12, 48e9),
    "mi300x": (1307e12, 192e9),
}
"""Device -> FLOP/s of dense bfloat16 matrix products and bytes of memory, from its data sheet."""
