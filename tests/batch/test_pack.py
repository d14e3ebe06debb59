"""Rows of prefix trees: every sequence sees itself alone, every common beginning stands once, the cut is the best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from slow_trees import random_records, random_sequences
from stepjepa.batch.collate import Collator
from stepjepa.batch.costs import Costs
from stepjepa.batch.cutting import balanced_cut
from stepjepa.batch.mask import Trees, dense
from stepjepa.batch.pack import Rows, pack, pack_passes
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.alignment import Alignment, InfoNCE
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.text import LMLoss, PromptLoss, SemanticTube
from stepjepa.views.sequences import SampledRecord, TokenSequence

NEVER = 10**4


def sequence(*ids: int, start: Sequence[int] | None = None) -> TokenSequence:
    return TokenSequence(np.array(ids, np.int32), start=None if start is None else np.array(start, np.int32))


def prefixes(sequences: Sequence[TokenSequence]) -> set[tuple[tuple[int, int], ...]]:
    """All distinct beginnings, as (token, first token that it sees)."""
    result = set()
    for each in sequences:
        starts = [0] * len(each) if each.start is None else each.start.tolist()
        both = tuple(zip(each.ids.tolist(), starts, strict=True))
        result |= {both[: end + 1] for end in range(len(both))}
    return result


def seen(rows: Rows) -> list[set[int]]:
    """For each place of some rows the places that it sees; rows that need no mask are run without one."""
    count, width = rows.ids.shape
    trees = Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), bool(rows.start.any()))
    mask = dense(trees)[:, 0] if rows.branches else torch.ones(width, width).tril().bool().expand(count, -1, -1)
    real = torch.arange(width) < torch.from_numpy(rows.lengths)[:, None]
    assert mask.any(-1).all(), "a query without a key"
    assert not (mask & real[:, :, None] & ~real[:, None, :]).any(), "padding is seen"
    return [{row * width + int(k) for k in mask[row, q].nonzero()} for row in range(count) for q in range(width)]


WAYS: list[dict[str, Any]] = [
    {"row_length": 7},
    {"row_length": NEVER},
    {"row_length": 13, "costs": Costs(1, 1 / 5, forward=64)},
    {"row_length": 13, "costs": Costs(1, 1 / 19, forward=64)},
    {"row_length": 5, "one_each": True},
    {"row_length": 5, "one_each": True, "costs": Costs(1, 1 / 5, forward=64)},
    {"row_length": NEVER, "groups": True},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize(("isolated", "seed"), [(False, 0), (False, 1), (False, 2), (True, 3), (True, 4)])
def test_every_token_sees_its_own_sequence_up_to_itself(seed: int, isolated: bool, options: dict[str, Any]) -> None:
    sequences = random_sequences(seed, isolated=isolated and "one_each" not in options, vocabulary=3)
    groups = [index % 3 for index in range(len(sequences))]
    passes = pack_passes(sequences, **options | ({"groups": groups} if "groups" in options else {}))
    first, paths = 0, passes[0].paths
    used: set[int] = set()
    for rows in passes:
        visible, width = seen(rows), rows.ids.shape[1]
        assert width == max(rows.lengths)
        assert {row * width + place for row, size in enumerate(rows.lengths) for place in range(size)} == {
            int(place) - first for path in paths for place in path if 0 <= place - first < rows.ids.size
        }, "a token that belongs to no sequence, or a sequence in the padding"
        for number, (each, path) in enumerate(zip(sequences, paths, strict=True)):
            own = path - first
            if 0 <= own[0] < rows.ids.size:
                used.add(number)
                assert rows.ids.ravel()[own].tolist() == each.ids.tolist()
                assert rows.positions.ravel()[own].tolist() == list(range(len(each)))
                starts = np.zeros(len(each), int) if each.start is None else each.start
                for index, place in enumerate(own):
                    assert visible[place] == set(own[starts[index] : index + 1].tolist())
        first += rows.ids.size
    assert used == set(range(len(sequences)))
    if options.get("one_each"):
        # None for a sequence that is a beginning of another, or equal to it.
        ends = {tuple(s.ids.tolist()) for s in sequences}
        alone = [end for end in ends if not any(len(o) > len(end) and o[: len(end)] == end for o in ends)]
        assert sorted(size for rows in passes for size in rows.lengths) == sorted(map(len, alone))
        assert not any(rows.branches for rows in passes)
    elif options["row_length"] == NEVER:
        shared = [[s for s, g in zip(sequences, groups, strict=True) if g == group] for group in range(3)]
        parts = shared if "groups" in options else [sequences]
        assert passes[0].lengths.tolist() == [sum(len(prefixes(part)) for part in parts)], "not all is shared"


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
    sequences = [sequence(1, 2, 3), sequence(1, 2, 4), sequence(1, 7)]
    rows = pack(sequences, row_length=4, pad_id=9)
    assert rows.ids.tolist() == [[1, 2, 3, 4], [1, 7, 9, 9]]
    assert rows.end.tolist() == [[4, 4, 3, 4], [2, 2, 4, 4]]
    assert rows.lengths.tolist() == [4, 2]
    none = pack([], row_length=5, pad_id=7)
    assert (none.ids.tolist(), none.end.tolist(), none.paths, none.lengths.sum()) == ([[7]], [[1]], [], 0)


def test_a_prefix_is_common_only_where_it_sees_the_same() -> None:
    rows = pack([sequence(1, 2, 3), sequence(1, 2, 4, start=[0, 1, 0])], row_length=11)
    assert rows.ids.tolist() == [[1, 2, 3, 2, 4]]
    assert rows.start.tolist() == [[0, 0, 0, 3, 0]]


def test_plain_rows_have_no_branches() -> None:
    assert not pack([sequence(1, 2, 3), sequence(1, 2), sequence(1, 2, 3)], row_length=5).branches
    # Rows of one sequence each, of different lengths.
    assert not pack([sequence(1, 2, 3), sequence(4, 5)], row_length=3).branches
    assert pack([sequence(1, 2, 3), sequence(4, 5)], row_length=5).branches
    assert pack([sequence(1, 2, 3, start=[0, 1, 0])], row_length=5).branches


# -- the best cut ------------------------------------------------------------------------------------------------------


def every_cut(count: int) -> list[list[int]]:
    """Where the parts begin of all cuts of some things in order, and the end of the last one."""
    chosen = itertools.product([False, True], repeat=count - 1)
    return [[0, *(place for place, here in enumerate(each, 1) if here), count] for each in chosen]


@pytest.mark.parametrize("seed", range(17))
def test_one_pass_has_the_fewest_cells_of_all_cuts(seed: int) -> None:
    """Where all lengths of rows can be tried."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 10))
    lengths = draw.integers(1, 12, count)
    shared = np.array([0, *(draw.integers(0, min(pair) + 1) for pair in itertools.pairwise(lengths))])
    row_length = int(draw.integers(2, 23))

    def sizes(bounds: list[int]) -> list[int]:
        return [int(lengths[a] + (lengths - shared)[a + 1 : b].sum()) for a, b in itertools.pairwise(bounds)]

    allowed = max(row_length, int(lengths.max()))
    cells = [len(bounds[1:]) * max(sizes(bounds)) for bounds in every_cut(count) if max(sizes(bounds)) <= allowed]
    bounds = balanced_cut(lengths, shared, row_length)
    assert bounds in every_cut(count)
    assert max(sizes(bounds)) <= allowed
    assert len(bounds[1:]) * max(sizes(bounds)) == min(cells)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(5))
def test_several_passes_cost_least_of_all_cuts(seed: int) -> None:
    """One length of row makes each pass, so that padding plays no part."""
    sequences = random_sequences(seed, vocabulary=2, longest=6)[:7]

    def cost(rows: Rows) -> float:
        return float((rows.lengths * (1 + rows.lengths / 11)).sum())

    ordered = sorted(sequences, key=lambda each: each.ids.astype(np.int64).tobytes())
    every = [
        sum(cost(pack(ordered[a:b], row_length=NEVER)) for a, b in itertools.pairwise(bounds))
        for bounds in every_cut(len(ordered))
    ]
    assert sum(
        map(cost, pack_passes(sequences, row_length=NEVER, costs=Costs(1, 1 / 11, forward=64)))
    ) == pytest.approx(min(every))


def test_rows_that_share_much_are_joined_and_others_stand_alone_by_length() -> None:
    """By hand: two sequences with 40 tokens in common are one tree; two strangers of 300 run without a mask."""
    ids = [[*range(40), 50], [*range(40), 51], list(range(60, 360)), list(range(400, 700))]
    passes = pack_passes([sequence(*each) for each in ids], row_length=1000, costs=Costs(1, 1 / 400, forward=64))
    assert [(rows.ids.shape, rows.branches) for rows in passes] == [((2, 300), False), ((1, 42), True)]


@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_losses_and_gradients_of_several_passes_are_those_of_one(encoding: Any) -> None:
    model = tiny.make_model("llama")
    enable_trees(model)
    objective = Objective([LMLoss(), PromptLoss(0.3), Alignment(0.7, InfoNCE()), SemanticTube(0.1)])
    items = [SampledRecord(record, True, (0, index)) for index, record in enumerate(random_records(3, vocabulary=60))]

    def run(costs: Costs | None) -> tuple[Tensor, dict[str, Tensor], int]:
        options = {"encoding": encoding, "row_length": 97, "costs": costs, "prompt_labels": True}
        batch = Collator("branched", np.array([61, 62], np.int32), **options)([*items, None])
        loss = jepa_loss(model, batch, objective).loss
        return loss.detach(), tiny.gradients(model, loss), len(batch.passes)

    one, several = run(None), run(Costs(1, 1, forward=64))
    assert one[2] == 1 < several[2]
    tiny.assert_same(one[0], several[0])
    tiny.assert_same_gradients(one[1], several[1])
