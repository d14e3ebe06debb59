"""Rows of prefix trees: every sequence is there, every common beginning stands once, and the cut is the best one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest

from slow_trees import random_sequences
from stepjepa.batch.pack import Rows, cut, pack
from stepjepa.batch.sequences import Sequence


def sequence(*ids: int, start: Many[int] | None = None) -> Sequence:
    return Sequence(np.array(ids, np.int32), start=None if start is None else np.array(start, np.int32))


def prefixes(sequences: Many[Sequence]) -> set[tuple[tuple[int, int], ...]]:
    """All distinct beginnings, as (token, first token that it sees)."""
    found = set()
    for each in sequences:
        starts = [0] * len(each) if each.start is None else each.start.tolist()
        both = tuple(zip(each.ids.tolist(), starts, strict=True))
        found |= {both[: end + 1] for end in range(len(both))}
    return found


def check(sequences: Many[Sequence], rows: Rows) -> None:
    """Every sequence is there, in one row, at ascending places, at its own positions."""
    assert rows.ids.shape == rows.positions.shape == rows.start.shape == rows.end.shape
    assert rows.ids.shape[1] == max(rows.lengths)
    assert len(rows.paths) == len(sequences)
    used = set()
    for each, path in zip(sequences, rows.paths, strict=True):
        assert rows.ids.ravel()[path].tolist() == each.ids.tolist()
        assert rows.positions.ravel()[path].tolist() == list(range(len(each)))
        assert (np.diff(path) > 0).all()
        assert len(set(path // rows.ids.shape[1])) == 1
        used |= set(path.tolist())
    real = {row * rows.ids.shape[1] + place for row, size in enumerate(rows.lengths) for place in range(size)}
    assert used == real, "a token that belongs to no sequence, or a sequence in the padding"


def test_by_hand() -> None:
    """``1 2 3``, ``1 2 4 5``, ``1 2``, ``6`` in one row: a tree of five tokens and one of one."""
    rows = pack([sequence(1, 2, 3), sequence(1, 2, 4, 5), sequence(1, 2), sequence(6)], row_length=11, pad_id=9)
    assert rows.ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert rows.positions.tolist() == [[0, 1, 2, 2, 3, 0]]
    assert rows.end.tolist() == [[5, 5, 3, 5, 5, 6]]
    assert not rows.start.any()
    assert [path.tolist() for path in rows.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 1], [5]]
    assert rows.branches


def test_rows_repeat_what_they_need_and_are_padded_by_themselves() -> None:
    rows = pack([sequence(1, 2, 3), sequence(1, 2, 4), sequence(1, 7)], row_length=4, pad_id=9)
    assert rows.ids.tolist() == [[1, 2, 3, 4], [1, 7, 9, 9]]
    assert rows.end.tolist() == [[4, 4, 3, 4], [2, 2, 4, 4]]
    assert rows.lengths.tolist() == [4, 2]


def test_a_prefix_is_common_only_where_it_sees_the_same() -> None:
    seeing, cut_off = sequence(1, 2, 3), sequence(1, 2, 4, start=[0, 1, 0])
    rows = pack([seeing, cut_off], row_length=11)
    assert rows.ids.tolist() == [[1, 2, 3, 2, 4]]
    assert rows.start.tolist() == [[0, 0, 0, 3, 0]]
    assert rows.branches


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(11))
def test_every_common_beginning_stands_once_in_one_long_row(seed: int, isolated: bool) -> None:
    sequences = random_sequences(seed, isolated=isolated, vocabulary=3)
    rows = pack(sequences, row_length=10**4)
    check(sequences, rows)
    assert rows.lengths.tolist() == [len(prefixes(sequences))]


@pytest.mark.parametrize("options", [{"row_length": 7}, {"row_length": 13}, {"row_length": 5, "one_each": True}])
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_there(seed: int, options: dict[str, Any]) -> None:
    sequences = random_sequences(seed, vocabulary=3)
    rows = pack(sequences, **options)
    check(sequences, rows)
    if options.get("one_each"):
        # None for a sequence that is a beginning of another, or equal to it.
        ends = [tuple(s.ids.tolist()) for s in sequences]
        alone = {end for end in ends if not any(len(o) > len(end) and o[: len(end)] == end for o in ends)}
        assert sorted(rows.lengths) == sorted(map(len, alone))
        assert not rows.branches


@pytest.mark.parametrize("seed", range(5))
def test_groups_share_nothing_with_each_other(seed: int) -> None:
    sequences = random_sequences(seed, vocabulary=2)
    groups = [index % 3 for index in range(len(sequences))]
    rows = pack(sequences, row_length=10**4, groups=groups)
    check(sequences, rows)
    apart = [prefixes([s for s, g in zip(sequences, groups, strict=True) if g == group]) for group in range(3)]
    assert rows.lengths.sum() == sum(map(len, apart))
    for one, other in itertools.combinations(range(len(sequences)), 2):
        if groups[one] != groups[other]:
            assert not set(rows.paths[one]) & set(rows.paths[other])


def test_plain_rows_have_no_branches() -> None:
    assert not pack([sequence(1, 2, 3)], row_length=5).branches
    assert not pack([sequence(1, 2, 3), sequence(1, 2), sequence(1, 2, 3)], row_length=5).branches
    # Rows of one sequence each, of different lengths.
    assert not pack([sequence(1, 2, 3), sequence(4, 5)], row_length=3).branches
    assert pack([sequence(1, 2, 3), sequence(4, 5)], row_length=5).branches
    assert pack([sequence(1, 2, 3, start=[0, 1, 0])], row_length=5).branches


def test_no_sequences_are_one_token_of_padding() -> None:
    rows = pack([], row_length=5, pad_id=7)
    assert rows.ids.tolist() == [[7]]
    assert rows.end.tolist() == [[1]]
    assert rows.paths == []
    assert rows.lengths.sum() == 0


def sizes_of(bounds: Many[int], lengths: Many[int], shared: Many[int]) -> list[int]:
    """Tokens of each row, one sequence after the other."""
    found = []
    for first, last in itertools.pairwise(bounds):
        found.append(lengths[first] + sum(lengths[n] - shared[n] for n in range(first + 1, last)))
    return found


@pytest.mark.parametrize("seed", range(17))
def test_the_cut_is_the_best_of_all_cuts(seed: int) -> None:
    """Where all lengths of rows can be tried, no other cut into rows of at most that many tokens has fewer cells."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 10))
    lengths = draw.integers(1, 12, count)
    shared = np.array([0, *(draw.integers(0, min(pair) + 1) for pair in itertools.pairwise(lengths))])
    row_length = int(draw.integers(2, 23))
    allowed = max(row_length, int(lengths.max()))
    cells = []
    for chosen in itertools.product([False, True], repeat=count - 1):
        bounds = [0, *(place for place, here in enumerate(chosen, 1) if here), count]
        sizes = sizes_of(bounds, lengths.tolist(), shared.tolist())
        if max(sizes) <= allowed:
            cells.append(len(sizes) * max(sizes))
    bounds = cut(lengths, shared, row_length)
    assert bounds[0] == 0
    assert bounds[-1] == count
    assert bounds == sorted(set(bounds))
    sizes = sizes_of(bounds, lengths.tolist(), shared.tolist())
    assert max(sizes) <= allowed
    assert len(sizes) * max(sizes) == min(cells)
