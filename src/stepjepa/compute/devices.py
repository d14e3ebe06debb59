"""What vendors say of their devices, and what a user says of theirs. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """One accelerator, by its vendor's data sheet: figures that nothing reaches.

    Attributes:
        name: for people.
        peak: FLOP/s of dense bfloat16 matrix products, summed up in float32.
        memory: bytes; gigabytes as sold, taken for 10**9 bytes, so that what a driver keeps is not promised.
        interconnect: bytes/s that it can send to others of its machine, one direction; None if they are apart.
        interconnect_name: of that link.
        per_machine: how many the vendor's board joins by it.
    """

    name: str
    peak: float
    memory: float
    interconnect: float | None = None
    interconnect_name: str = ""
    per_machine: int = 8


# Data sheets of NVIDIA (A100 80GB SXM, L40S, H100 SXM, H200 SXM, HGX B200) and AMD (MI300X). "With sparsity" is twice
# what dense products reach; links are given there as the sum of both directions.
DEVICES = {
    "a100": Device("NVIDIA A100 SXM 80 GB", 312 * TERA, 80 * GIGA, 300 * GIGA, "NVLink"),
    "h100": Device("NVIDIA H100 SXM 80 GB", 989 * TERA, 80 * GIGA, 450 * GIGA, "NVLink"),
    "h200": Device("NVIDIA H200 SXM 141 GB", 989 * TERA, 141 * GIGA, 450 * GIGA, "NVLink"),
    "b200": Device("NVIDIA B200 SXM 180 GB", 2250 * TERA, 180 * GIGA, 900 * GIGA, "NVLink"),
    "l40s": Device("NVIDIA L40S 48 GB", 362 * TERA, 48 * GIGA),
    "mi300x": Device("AMD MI300X 192 GB", 1307 * TERA, 192 * GIGA, 448 * GIGA, "Infinity Fabric"),
}
