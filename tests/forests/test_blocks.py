"""Blocks of tokens against the token-by-token reading of the forest, and against what torch finds by evaluating."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from stepjepa.forests import blocks
from stepjepa.forests.blocks import evaluated_blocks, padded, static_length, visible_blocks
from stepjepa.forests.forest import Forest, key_ranges
from stepjepa.forests.masks import batch_visibility, visible

each_forest = pytest.mark.parametrize("seed", range(20))


def slow_blocks(allowed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``[N, N]`` partial and full, tile by tile."""
    count = -(-len(allowed) // size)
    partial, full = torch.zeros(2, count, count, dtype=torch.bool)
    for one in range(count):
        for other in range(count):
            tile = allowed[one * size : (one + 1) * size, other * size : (other + 1) * size]
            full[one, other] = tile.shape == (size, size) and bool(tile.all())
            partial[one, other] = bool(tile.any()) and not full[one, other]
    return partial, full


def from_ranges(forest: Forest, length: int) -> Tensor:
    """``[T, T]`` bool, token by token from ``key_ranges``; padding is causal among itself."""
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for query, ranges in enumerate(key_ranges(forest)):
        for start, end in ranges:
            allowed[query, start:end] = True
    size = len(forest)
    allowed[size:, size:] = torch.ones(length - size, length - size).tril().bool()
    return allowed


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@each_forest
def test_blocks_equal_a_double_loop(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several forests of a batch, padded, in blocks so small that segments are in many and many are in one."""
    monkeypatch.setattr(blocks, "BLOCK", size)
    forests = [tiny.random_forest(seed), tiny.random_forest(seed + 100)]
    length = max(map(len, forests)) + seed % 5
    found = visible_blocks(batch_visibility(forests, length))
    for row, forest in enumerate(forests):
        partial, full = slow_blocks(from_ranges(forest, length), size)
        assert torch.equal(found.partial[row], partial)
        assert torch.equal(found.full[row], full)


@pytest.mark.parametrize("size", [2, 5])
@each_forest
def test_evaluated_blocks_are_the_same(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", size)
    forests = [tiny.random_forest(seed), tiny.random_forest(seed + 100)]
    length = max(map(len, forests)) + 3
    visibility = batch_visibility(forests, length)
    allowed = visible(visibility)
    found = evaluated_blocks(lambda b, _h, q, k: allowed[b, q, k], 2, length, torch.device("cpu"))
    expected = visible_blocks(visibility)
    assert torch.equal(found.partial, expected.partial)
    assert torch.equal(found.full, expected.full)


def test_blocks_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 8 tokens in blocks of 2: main text of 4, a branch of 2 that sees 2 of it, a root of 1, padding."""
    from stepjepa.forests.forest import Segment

    monkeypatch.setattr(blocks, "BLOCK", 2)
    segments = (Segment(0, 4), Segment(4, 6, "source", 0, 2), Segment(6, 7, "target"))
    positions = np.asarray([0, 1, 2, 3, 2, 3, 0], np.int32)
    empty = np.empty((0, 2), np.int32)
    forest = Forest(np.zeros(7, np.int32), positions, np.zeros(7, np.int32), segments, empty)
    found = visible_blocks(batch_visibility([forest], 8))
    assert found.partial[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert found.full[0].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@each_forest
def test_padding_sees_and_is_seen_by_itself_alone(seed: int) -> None:
    forests = [tiny.random_forest(seed), tiny.random_forest(seed + 100)]
    length = max(map(len, forests)) + seed % 3
    visibility = batch_visibility(forests, length)
    assert padded(visibility, length) is visibility
    found = visible(padded(visibility, length + 5))
    assert torch.equal(found[:, :length, :length], visible(visibility))
    assert not found[:, :length, length:].any()
    assert not found[:, length:, :length].any()
    assert torch.equal(found[0, length:, length:], torch.ones(5, 5).tril().bool())


def test_lengths_are_few_and_not_much_longer() -> None:
    assert [static_length(length) for length in (1, 127, 128, 129, 1025, 2047, 2048, 2049, 4097, 16384)] == [
        *(128, 128, 128, 256, 1152, 2048, 2048, 2304, 4608, 16384)
    ]
    found = [static_length(length) for length in range(1, 16385)]
    assert found == sorted(found)
    assert len(set(found)) == 16 + 3 * 8
    for length, static in enumerate(found, start=1):
        assert static_length(static) == static
        assert static % blocks.BLOCK == 0
        assert 0 <= static - length < max(blocks.BLOCK, length / 8)
