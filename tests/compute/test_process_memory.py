"""What a process holds, against a block that is known."""

from __future__ import annotations

import pytest
import torch

from stepjepa.compute.process_memory import ProcessMemory, can_measure

CPU = torch.device("cpu")


@pytest.mark.skipif(not can_measure(CPU), reason="the kernel does not tell the peak of a part of a process's life")
def test_a_large_block_is_seen_though_it_is_gone() -> None:
    memory = ProcessMemory(CPU)
    size = 64 * 2**20
    torch.ones(size // 4)
    peak = memory.peak()
    assert peak is not None
    # The kernel counts in handfuls of pages.
    assert 0.9 * size <= peak < 2 * size
    again = ProcessMemory(CPU).peak()
    assert again is not None
    assert again < 0.5 * size
