"""Segments of a row: what each query of each call sees is what the mask of the row shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slow_trees import random_sequences
from stepjepa.batch.costs import Costs, causal_share
from stepjepa.batch.mask import Calls, Kernel, Trees, dense
from stepjepa.batch.pack import Rows, pack_passes
from stepjepa.batch.segments import Segment, add_segments, calls, cheapest_calls, varlen_segments
from stepjepa.views.sequences import TokenSequence

COSTS = {
    "a call each": Costs(1.0, 1.0),
    "one call": Costs(1.0, 1.0, call=1e9),
    "whole paths": Costs(1.0, 0.0, call=1.0),
    "few calls": Costs(1.0, 1.0, query=3.0, key=1.0, call=30.0),
}


def sequence(*ids: int, start: list[int] | None = None) -> TokenSequence:
    return TokenSequence(np.array(ids, np.int32), start=None if start is None else np.array(start, np.int32))


def one_row(sequences: list[TokenSequence], **options: Any) -> Rows:
    (rows,) = pack_passes(sequences, row_length=10**6, **{"kernel": "varlen", **options})
    return rows


def visible(rows: Rows) -> list[set[int]]:
    """The columns that each token of a row sees, by its mask."""
    trees = Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), bool(rows.start.any()))
    return [set(row.nonzero().flatten().tolist()) for row in dense(trees)[0, 0]]


def seen_in_calls(made: Calls) -> list[set[int]]:
    """The same by the calls, query by query."""
    queries: list[tuple[int, set[int]]] = []  # column of each query, and the columns that it sees
    for call in made.split():
        number, height, width, causal = call.shape
        assert (call.query.shape, call.key.shape) == ((number, height), (number, width))
        for row in range(number):
            count, keys = int(call.query_count[row]), int(call.key_count[row])
            assert not causal or count == keys
            for index in range(height):
                last = keys - count + min(index, count - 1)
                queries.append((int(call.query[row, index]), set(call.key[row, : last + 1].tolist())))
    result = [queries[place] for place in made.output_index.tolist()]
    assert [column for column, _ in result] == list(range(len(result)))
    return [keys for _, keys in result]


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_calls_show_what_the_mask_shows(seed: int, isolated: bool, name: str) -> None:
    rows = one_row(random_sequences(seed, isolated=isolated, vocabulary=3))
    if not rows.branches:
        pytest.skip("a single path")
    assert rows.segments is not None
    made = calls(rows.segments, COSTS[name])
    assert seen_in_calls(made) == visible(rows)
    assert made.scores == sum(shape.segments * shape.queries * shape.keys for shape in made.shapes)
    if name == "whole paths":
        assert all(shape.causal for shape in made.shapes)
    if name == "one call":
        assert len(made.shapes) == 1


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_varlen_segments_show_what_the_mask_shows(seed: int, isolated: bool) -> None:
    rows = one_row(random_sequences(seed, isolated=isolated, vocabulary=3))
    if not rows.branches:
        pytest.skip("a single path")
    assert rows.segments is not None
    made = varlen_segments(rows.segments)
    bounds, key_bounds = made.query_bounds.tolist(), made.key_bounds.tolist()
    assert bounds[-1] == rows.ids.size
    columns = list(range(bounds[-1])) if made.key_index is None else made.key_index.tolist()
    result = []
    for first, last, begin, end in zip(bounds, bounds[1:], key_bounds, key_bounds[1:], strict=False):
        keys = columns[begin:end]
        assert keys[first - last :] == list(range(first, last))
        result += [set(keys[: len(keys) - (last - first) + index + 1]) for index in range(last - first)]
    assert result == visible(rows)
    sizes = np.diff(bounds), np.diff(key_bounds)
    assert (made.most_queries, made.most_keys) == tuple(each.max() for each in sizes)
    assert made.scores == int((sizes[0] * sizes[1]).sum())
    assert made.query_bounds.dtype == made.key_bounds.dtype == torch.int32


def test_by_hand() -> None:
    """``1 2 3``, ``1 2 4 5``, ``1 2``, ``6``: a whole path, what the second adds, nothing, a tree of one token."""
    rows = one_row([sequence(1, 2, 3), sequence(1, 2, 4, 5), sequence(1, 2), sequence(6)])
    result = rows.segments
    assert result is not None
    assert (result.first.tolist(), result.queries.tolist(), result.keys.tolist()) == ([0, 3, 5], [3, 2, 1], [3, 4, 1])
    assert [path.tolist() for path in result.paths] == [[0, 1, 2], [0, 1, 3, 4], [5]]


def test_isolated_tokens_are_segments_of_their_own() -> None:
    """Tokens 2 and 3 of a sequence see nothing before token 2; token 4 sees all."""
    path, start = np.arange(10, 15), np.array([0, 0, 2, 2, 0], np.int32)
    segments: list[Segment] = []
    add_segments(segments, 11, path, 1, start)
    result = [(place, count, keys.tolist()) for place, count, keys in segments]
    assert result == [(11, 1, [10, 11]), (12, 2, [12, 13]), (14, 1, [10, 11, 12, 13, 14])]


def test_the_groups_cost_least_of_all_cuts() -> None:
    """Two short segments in one call, the long one in another, by hand."""
    rows = one_row([sequence(*range(1, 5)), sequence(*range(11, 16)), sequence(*range(20, 60))])
    assert rows.segments is not None
    groups, time = cheapest_calls(rows.segments.queries, rows.segments.keys, Costs(1.0, 1.0, call=10.0))
    assert [(sorted(chosen.tolist()), whole) for chosen, whole in groups] == [([0, 1], True), ([2], True)]
    assert time == 2 * 5 * 5 + 10 + 40 * 40 + 10


def test_fused_attention_skips_blocks_behind_the_diagonal() -> None:
    assert causal_share(np.array([1, 512, 513, 1024, 2048])).tolist() == [1.0, 1.0, 0.75, 0.75, 0.625]


@pytest.mark.parametrize(
    ("prompt", "kernel", "wanted"),
    [(300, "cheapest", [True]), (0, "cheapest", [False]), (0, "calls", [True]), (300, "mask", [False])],
)
def test_segments_run_where_they_are_faster(prompt: int, kernel: Kernel, wanted: list[bool]) -> None:
    """Eight records behind a long prompt; eight strangers of one length are plain rows."""
    ids = [[*range(prompt), *range(400 + 20 * each, 420 + 20 * each)] for each in range(8)]
    costs = Costs(1.0, 0.003, query=0.01, key=0.01, call=20.0, forward=60.0)
    passes = pack_passes([sequence(*each) for each in ids], row_length=512, costs=costs, kernel=kernel)
    if kernel != "mask":
        assert [rows.segments is not None for rows in passes] == wanted
    assert any(rows.segments is not None for rows in passes) == wanted[0]


def test_passes_by_segments_hold_at_most_so_many_tokens() -> None:
    ids = [[*range(7), *range(20 + 10 * each, 30 + 10 * each)] for each in range(5)]
    given = {"row_length": 10**6, "kernel": "varlen", "pass_length": 31}
    passes = pack_passes([sequence(*each) for each in ids], **given)  # type: ignore[arg-type]
    assert [rows.ids.shape for rows in passes] == [(1, 27), (1, 27), (1, 17)]
    assert [rows.ids.shape for rows in pack_passes([sequence(*each) for each in ids], **given, one_pass=True)] == [
        (1, 57)
    ]


@pytest.mark.parametrize(("common", "shared"), [(1, False), (20, True)])
def test_one_variable_length_call_shares_what_is_worth_gathering(common: int, *, shared: bool) -> None:
    """Two sequences of 31 tokens save 1 or 20 of 62: where that is little, no key is gathered."""
    beginning = range(3, 3 + common)
    first, second = ([*beginning, *range(start, start + 31 - common)] for start in (100, 200))
    (rows,) = pack_passes([sequence(*first), sequence(*second)], row_length=10**6, kernel="varlen")
    assert rows.segments is not None
    assert (varlen_segments(rows.segments).key_index is not None) == shared
    assert rows.ids.size == 62 - common * shared
