"""Bytes counted as tensors are made and freed."""

from __future__ import annotations

import torch
from torch import nn

from stepjepa.compute.live_memory import LiveMemory


def test_every_storage_counts_once_until_it_is_freed() -> None:
    layer = nn.Linear(3, 5, bias=False)
    values = torch.ones(7, 3)
    with LiveMemory(layer) as memory:
        first = layer(values)  # 7 x 5 floats
        assert memory.live == 7 * 5 * 4
        view = first.t()[2:]
        assert memory.live == 7 * 5 * 4
        second = first.double()
        assert memory.live == 7 * 5 * (4 + 8)
        del first
        assert memory.live == 7 * 5 * (4 + 8), "the view still needs it"
        del view
        assert memory.live == 7 * 5 * 8
        del second
    assert memory.live == 0
    assert memory.peak == 7 * 5 * (4 + 8)


def test_gradients_of_parameters_count_while_they_are_made_alone() -> None:
    layer = nn.Linear(3, 5, bias=False)
    values = torch.ones(7, 3)
    with LiveMemory(layer) as memory:
        loss = layer(values).sum()
        loss.backward()
        assert layer.weight.grad is None
        del loss
        assert memory.live == 0
    # The result and its sum; in the backward pass only the weight's gradient and what the sum hands down are made.
    assert memory.peak == 7 * 5 * 4 + 4


def test_kinds_are_told_apart_and_whole_gradients_added() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False)
    model = nn.Sequential(first, second)
    values = torch.ones(7, 3)
    with LiveMemory(model, lambda tensor: "wide" if tuple(tensor.shape) == (7, 5) else "other") as memory:
        hidden = first(values)
        assert memory.at_peak == {"wide": 7 * 5 * 4, "other": 0}
        loss = second(hidden).sum()
        loss.backward()
    assert sum(memory.at_peak.values()) == memory.peak
    assert memory.gradients == (3 * 5 + 5 * 2) * 4
    assert memory.peak <= memory.peak_with_gradients <= memory.peak + memory.gradients
