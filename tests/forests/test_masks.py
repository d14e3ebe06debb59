"""The fast mask of a batch against the token-by-token reading of the forest, and against the definition itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import tiny
from stepjepa.forests.forest import Forest, Segment, key_ranges, path, seen_lengths
from stepjepa.forests.masks import Visibility, batch_visibility, causal_in_segment, seen_in_ancestor, visible
from stepjepa.models import attention
from stepjepa.models.attention import forest_visibility

SEEDS = range(40)
each_forest = pytest.mark.parametrize("seed", SEEDS)


def from_ranges(forest: Forest) -> Tensor:
    """``[T, T]`` bool, token by token from ``key_ranges``."""
    mask = torch.zeros(len(forest), len(forest), dtype=torch.bool)
    for query, ranges in enumerate(key_ranges(forest)):
        for start, end in ranges:
            for key in range(start, end):
                mask[query, key] = True
    return mask


def model_mask(visibility: Visibility, rule: Callable[..., Tensor], name: str) -> Tensor:
    """``[B, T, T]`` bool: what a model's attention gets from the registered mask function."""
    from transformers import AttentionMaskInterface

    with forest_visibility(visibility):
        mask = AttentionMaskInterface()[name](mask_function=rule, dtype=torch.float32)
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0


@each_forest
def test_visible_equals_both_double_loops(seed: int) -> None:
    forest = tiny.random_forest(seed)
    fast = visible(batch_visibility([forest], len(forest)))[0]
    assert torch.equal(fast, from_ranges(forest))
    assert torch.equal(fast, tiny.dense_mask(forest))


def test_the_random_forests_hold_every_case() -> None:
    """Guards the test above: branches on branches, isolated segments below and above others, several roots."""
    found = set()
    for seed in SEEDS:
        segments = tiny.random_forest(seed).segments
        for segment in segments:
            parent = segments[segment.parent] if segment.parent >= 0 else None
            found.add("root" if parent is None else "isolated" if segment.isolated else "branch")
            if parent is not None and parent.parent >= 0:
                found.add("branch on isolated" if parent.isolated else "branch on branch")
            if parent is not None and segment.attachment < len(parent):
                found.add("attached in the middle")
        found.add("several roots" if sum(s.parent < 0 for s in segments) > 1 else "one root")
    expected = {"root", "branch", "isolated", "branch on branch", "branch on isolated", "attached in the middle"}
    assert found == expected | {"several roots", "one root"}


@each_forest
def test_visibility_is_causal_and_never_empty(seed: int) -> None:
    forest = tiny.random_forest(seed)
    mask = visible(batch_visibility([forest], len(forest) + 3))[0]
    assert not mask.triu(1).any()
    assert mask.diagonal().all(), "a query without a key would be a softmax of nothing"
    # What is seen stands at an earlier position: the model's own causal rule takes nothing away.
    positions = torch.from_numpy(forest.position_ids)
    size = len(forest)
    assert not (mask[:size, :size] & (positions[None, :] > positions[:, None])).any()


@each_forest
def test_predicates_do_not_overlap(seed: int) -> None:
    forest = tiny.random_forest(seed)
    visibility = batch_visibility([forest], len(forest))
    assert not (causal_in_segment(visibility) & seen_in_ancestor(visibility)).any()


def test_a_batch_equals_its_rows() -> None:
    forests = [tiny.random_forest(seed) for seed in range(7)]
    length = max(len(forest) for forest in forests) + 2
    visibility = batch_visibility(forests, length)
    mask = visible(visibility)
    assert mask.shape == (7, length, length)
    for row, forest in enumerate(forests):
        size = len(forest)
        assert torch.equal(mask[row, :size, :size], tiny.dense_mask(forest))
        assert not mask[row, :size, size:].any(), "padding is seen"
        assert not mask[row, size:, :size].any()
        assert torch.equal(mask[row, size:, size:], torch.ones(length - size, length - size).tril().bool())
        assert visibility.position_ids[row, :size].tolist() == forest.position_ids.tolist()


@pytest.mark.parametrize("name", [attention.SDPA, attention.EAGER])
@each_forest
def test_the_models_window_counts_positions(seed: int, name: str) -> None:
    forest = tiny.random_forest(seed)
    visibility = batch_visibility([forest], len(forest))
    for window in (1, 2, 3, 5):
        found = model_mask(visibility, sliding_window_causal_mask_function(window), name)[0]
        assert torch.equal(found, tiny.dense_mask(forest, window))
    assert torch.equal(model_mask(visibility, causal_mask_function, name)[0], tiny.dense_mask(forest))


@each_forest
def test_the_models_chunks_count_positions(seed: int) -> None:
    """Attention inside chunks of the path, as Llama 4 has it."""
    forest = tiny.random_forest(seed)
    rule = chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    found = model_mask(batch_visibility([forest], len(forest)), rule, attention.SDPA)[0]
    positions = torch.from_numpy(forest.position_ids)
    same_chunk = positions[:, None] // 3 == positions[None, :] // 3
    assert torch.equal(found, tiny.dense_mask(forest) & same_chunk)


def test_the_eager_mask_is_additive() -> None:
    """Eager attention would add a boolean mask to its scores as zeros and ones."""
    from transformers import AttentionMaskInterface

    forest = tiny.random_forest(3)
    with forest_visibility(batch_visibility([forest], len(forest))):
        mask = AttentionMaskInterface()[attention.EAGER](mask_function=causal_mask_function, dtype=torch.bfloat16)
    assert mask.dtype == torch.bfloat16
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(torch.bfloat16).min}


def test_seen_lengths_by_hand() -> None:
    segments = (
        Segment(0, 5, "main"),
        Segment(5, 7, "source", parent=0, attachment=3),
        Segment(7, 8, "source", parent=1, attachment=1),
        Segment(8, 10, "target", parent=0, attachment=5, isolated=True),
        Segment(10, 11, "main", parent=3, attachment=2),
        Segment(11, 13, "target"),
    )
    assert seen_lengths(segments).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [3, 0, 0, 0, 0, 0],
        [3, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [5, 0, 0, 2, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]


@each_forest
def test_path_is_what_the_last_token_sees(seed: int) -> None:
    forest = tiny.random_forest(seed)
    for index, segment in enumerate(forest.segments):
        seen = [key for key in range(len(forest)) if tiny.sees(forest, segment.end - 1, key)]
        ancestors = []
        walker = segment
        while walker.parent >= 0 and not walker.isolated:
            walker = forest.segments[walker.parent]
            ancestors.append(walker)
        if any(ancestor.isolated for ancestor in ancestors):
            with pytest.raises(ValueError, match="isolated segment"):
                path(forest, index)
        else:
            assert sorted(path(forest, index).tolist()) == seen
            if not segment.isolated:
                assert forest.position_ids[path(forest, index)].tolist() == list(range(len(seen)))
