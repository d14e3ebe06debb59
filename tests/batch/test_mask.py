"""Who sees whom: the rule over two integers a token, against a double loop over the tokens of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from slow_trees import random_sequences, row_mask
from stepjepa.batch.mask import BLOCK, Blocks, Trees, blocks, dense, padded, static_length
from stepjepa.batch.pack import Rows, pack

NEVER = 10**4


def trees_of(rows: Rows) -> Trees:
    tensors = (torch.from_numpy(each) for each in (rows.start, rows.end, rows.positions))
    return Trees(*tensors, isolates=bool(rows.start.any()))


def real(rows: Rows) -> torch.Tensor:
    """``[R, T]`` bool: not padding."""
    return torch.arange(rows.ids.shape[1]) < torch.from_numpy(rows.lengths)[:, None]


RULES: list[tuple[Any, Any]] = [
    (sliding_window_causal_mask_function(3), lambda query, key: query - key < 3),
    (chunked_causal_mask_function(4, torch.zeros(23, dtype=torch.long)), lambda query, key: query // 4 == key // 4),
]


@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize("seed", range(3))
def test_a_rule_of_the_model_counts_in_positions(seed: int, number: int) -> None:
    ours, slow = RULES[number]
    sequences = random_sequences(seed, vocabulary=5)
    rows = pack(sequences, row_length=23)
    result, here = dense(trees_of(rows), ours)[:, 0], real(rows)
    assert torch.equal(result & here[:, :, None] & here[:, None, :], row_mask(sequences, rows, slow))
    assert not torch.equal(result, dense(trees_of(rows))[:, 0]), "the rule takes nothing away"


def long_rows(seed: int, *, isolated: bool = False) -> Rows:
    """Rows of several blocks."""
    sequences = [
        sequence
        for part in range(3)
        for sequence in random_sequences(seed + 100 * part, isolated=isolated, longest=2 * BLOCK // 3)
    ]
    rows = pack(sequences, row_length=4 * BLOCK)
    assert rows.ids.shape[1] > BLOCK
    return rows


def slow_blocks(allowed: torch.Tensor) -> Blocks:
    """From the dense mask ``[R, T, T]``."""
    tiles = allowed.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [R, N, BLOCK, N, BLOCK]
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    return Blocks(some & ~every, every)


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_those_of_the_dense_mask(seed: int, isolated: bool) -> None:
    rows = long_rows(seed, isolated=isolated)
    trees = padded(trees_of(rows), static_length(rows.ids.shape[1]))
    result, slow = blocks(trees, exact=not isolated), slow_blocks(dense(trees)[:, 0])
    if isolated:
        assert not result.full.any()
        assert not ((slow.full | slow.partial) & ~result.partial).any()
    else:
        assert torch.equal(result.full, slow.full)
        assert torch.equal(result.partial, slow.partial)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 2, 2 * BLOCK - 1, 2 * BLOCK])
def test_a_sequence_that_ends_at_the_edge_of_a_block_is_seen_up_to_there(length: int) -> None:
    """And a stranger behind it: one column more or less makes a block a full one, or hides it."""
    columns = torch.arange(2 * BLOCK)[None]
    trees = Trees(torch.zeros_like(columns), torch.where(columns < length, length, 2 * BLOCK), columns)
    result, slow = blocks(trees, exact=True), slow_blocks(dense(trees)[:, 0])
    assert torch.equal(result.full, slow.full)
    assert torch.equal(result.partial, slow.partial)
    # Where something else hides keys, no block is full.
    hidden = blocks(trees, exact=False)
    assert not hidden.full.any()
    assert torch.equal(hidden.partial, slow.partial | slow.full)


def test_lengths_are_few_and_grow_by_little() -> None:
    sizes = [static_length(length) for length in range(1, 9000)]
    assert all(size >= length for length, size in enumerate(sizes, 1))
    assert all(size - length < max(BLOCK, length / 8 + 1) for length, size in enumerate(sizes, 1))
    assert not any(size % BLOCK for size in sizes)
    assert len(set(sizes)) <= 16 + 8 * 3
    assert sizes == list(np.maximum.accumulate(sizes))
