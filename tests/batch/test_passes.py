"""A micro-batch in several passes: every sequence sees itself alone, and losses and gradients are those of one pass."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from slow_trees import random_records, random_sequences
from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.mask import Trees, dense
from stepjepa.batch.pack import pack, pack_passes
from stepjepa.batch.sequences import Sequence
from stepjepa.models.attention import enable_trees
from stepjepa.objectives.alignment import Alignment, InfoNCE
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.text import LMLoss, PromptLoss, Tube


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(7))
def test_every_token_sees_its_own_sequence_up_to_itself(seed: int, isolated: bool) -> None:
    sequences = random_sequences(seed, isolated=isolated, vocabulary=3)
    passes = pack_passes(sequences, row_length=13, attention_length=5 + 7 * (seed % 3))
    first = 0
    found = 0
    for rows in passes:
        count, width = rows.ids.shape
        trees = Trees(*map(torch.from_numpy, (rows.start, rows.end, rows.positions)), bool(rows.start.any()))
        # Rows that need no mask are run without one.
        seen = dense(trees)[:, 0] if rows.branches else torch.ones(width, width).tril().bool().expand(count, -1, -1)
        for each, path in zip(sequences, rows.paths, strict=True):
            own = path - first
            if not 0 <= own[0] < rows.ids.size:
                continue
            found += 1
            assert rows.ids.ravel()[own].tolist() == each.ids.tolist()
            assert rows.positions.ravel()[own].tolist() == list(range(len(each)))
            for index, place in enumerate(own):
                start = 0 if each.start is None else each.start[index]
                row, column = divmod(int(place), width)
                keys = seen[row, column].nonzero()[:, 0] + row * width
                assert keys.tolist() == own[start : index + 1].tolist()
        first += rows.ids.size
    assert found == len(sequences)


def test_rows_that_share_much_are_joined_and_others_stand_alone_by_length() -> None:
    """By hand: two sequences with 40 tokens in common are one tree; two strangers of 300 run without a mask."""
    common = list(range(40))
    ids = [[*common, 50], [*common, 51], list(range(60, 360)), list(range(400, 700))]
    sequences = [Sequence(np.array(each, np.int32)) for each in ids]
    passes = pack_passes(sequences, row_length=1000, attention_length=400)
    assert [(rows.ids.shape, rows.branches) for rows in passes] == [((2, 300), False), ((1, 42), True)]


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_into_rows_costs_least_of_all(seed: int) -> None:
    """Against every cut of the sorted sequences; one length of row makes each pass, so that padding plays no part."""
    sequences = random_sequences(seed, vocabulary=2, longest=6)[:7]
    attention_length = 11

    def cost(rows_of: list[list[Sequence]]) -> float:
        total = 0.0
        for part in rows_of:
            rows = pack(part, row_length=10**4)
            size = int(rows.lengths.sum())
            total += size * (1 + size / attention_length * (1.0 if rows.branches else 0.5))
        return total

    ordered = sorted(sequences, key=lambda each: each.ids.astype(np.int64).tobytes())
    count = len(ordered)
    every = []
    for size in range(count):
        for cuts in itertools.combinations(range(1, count), size):
            edges = [0, *cuts, count]
            every.append(cost([ordered[a:b] for a, b in itertools.pairwise(edges)]))
    passes = pack_passes(sequences, row_length=10**4, attention_length=attention_length)
    got = sum(
        float((rows.lengths * (1 + rows.lengths / attention_length * (1.0 if rows.branches else 0.5))).sum())
        for rows in passes
    )
    assert got == pytest.approx(min(every))


@pytest.mark.parametrize("encoding", ["tree", "rows"])
def test_losses_and_gradients_are_those_of_one_pass(encoding: str) -> None:
    model = tiny.make_model("llama")
    enable_trees(model)
    objective = Objective([LMLoss(), PromptLoss(0.3), Alignment(0.7, InfoNCE()), Tube(0.1)])
    items = [Item(record, True, (0, index)) for index, record in enumerate(random_records(3, vocabulary=60))]

    def run(attention_length: int | None) -> tuple[Tensor, dict[str, Tensor], int]:
        collator = Collator(
            "branched",
            np.array([61, 62], np.int32),
            encoding=encoding,  # type: ignore[arg-type]
            row_length=97,
            attention_length=attention_length,
            prompt_labels=True,
        )
        batch = collator([*items, None])
        loss = jepa_loss(model, batch, objective).loss
        return loss.detach(), tiny.gradients(model, loss), len(batch.passes)

    one, several = run(None), run(1)
    assert one[2] == 1 < several[2]
    tiny.assert_same(one[0], several[0])
    tiny.assert_same_gradients(one[1], several[1])
