"""Is it collapsing? Known matrices, double loops, and what a window holds."""

from __future__ import annotations

import math

import pytest
import torch

from stepjepa.objectives.monitors import (
    COLLAPSE_PAIRS,
    COLLAPSE_RANK,
    COLLAPSE_SIMILARITY,
    Window,
    collapse,
    effective_rank,
    pair_similarity,
    retrieval_top1,
    share,
)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_rank_of_known_matrices(size: int) -> None:
    assert effective_rank(torch.eye(size)) == pytest.approx(size, rel=1e-5)
    assert effective_rank(5 * torch.eye(size)) == pytest.approx(size, rel=1e-5)
    assert effective_rank(torch.ones(size, 5)) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.outer(torch.randn(size), torch.randn(5))) == pytest.approx(1, abs=1e-3)


def test_rank_by_hand() -> None:
    # Singular values 3 and 1: shares 3/4 and 1/4.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(math.exp(entropy), rel=1e-5)
    assert effective_rank(torch.empty(0, 5)) == effective_rank(torch.zeros(3, 5)) == 0
    assert math.isnan(effective_rank(torch.tensor([[1.0, math.nan], [1.0, 1.0]])))


def test_centring_hides_a_collapse_to_one_vector() -> None:
    noise = torch.randn(40, 11, generator=torch.Generator().manual_seed(0))
    collapsed = 1000 + 0.1 * noise
    assert effective_rank(collapsed) < 1.1
    assert effective_rank(collapsed, centred=True) > 8


@pytest.mark.parametrize("pairs", [0, 1, 2, 7])
def test_similarity_against_a_double_loop(pairs: int) -> None:
    source, target = torch.randn(pairs, 5), torch.randn(pairs, 5)
    matched = shuffled = 0.0
    for i in range(pairs):
        for j in range(pairs):
            cosine = float(source[i] @ target[j] / source[i].norm() / target[j].norm())
            if i == j:
                matched += cosine
            else:
                shuffled += cosine
    found = pair_similarity(source, target)
    assert [value.item() for value in found] == pytest.approx([matched, shuffled], abs=1e-4)


def test_retrieval_by_hand() -> None:
    source = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    target = torch.tensor([[3.0, 0.1], [9.0, 1.0], [2.0, 2.0]])
    # The second source is nearest to the third target.
    assert retrieval_top1(source, target) == pytest.approx(2 / 3)
    assert retrieval_top1(source, source) == 1
    assert retrieval_top1(source[:0], target[:0]) == 0
    # A constant map finds one partner.
    assert retrieval_top1(torch.ones(5, 3), torch.ones(5, 3)) == pytest.approx(1 / 5)


def test_window_holds_sums_and_the_latest_pairs() -> None:
    window, rows = Window(keep=4), torch.randn(9, 5)
    expected = [pair_similarity(rows[at : at + 3], rows[at : at + 3].flip(0)) for at in (0, 3, 6)]
    for at in (0, 3, 6):
        window.add_pairs(rows[at : at + 3], rows[at : at + 3].flip(0))
    window.add(loss=torch.tensor(2.0, requires_grad=True), tokens=3)
    window.add(loss=torch.tensor(0.5), tokens=4)
    assert window.totals(["tokens", "loss", "other", "pairs", "crossings"]) == [7, 2.5, 0, 9, 18]
    sums = [sum(float(side[index]) for side in expected) for index in (0, 1)]
    assert window.totals(["matched", "shuffled"]) == pytest.approx(sums, abs=1e-5)
    geometry, target = window.geometry(), torch.cat([rows[3:6].flip(0), rows[6:].flip(0)])[2:]
    assert geometry["source_rank"] == pytest.approx(effective_rank(rows[5:]), rel=1e-5)
    assert geometry["target_rank_centred"] == pytest.approx(effective_rank(target, centred=True), rel=1e-5)
    assert geometry["retrieval_top1"] == retrieval_top1(rows[5:], target)
    assert geometry["rank_pairs"] == 4


def test_what_was_not_measured_is_not_there() -> None:
    assert share("shuffled_similarity", 0.0, 0.0) == {}
    assert share("shuffled_similarity", 3.0, 6.0) == {"shuffled_similarity": 0.5}
    window = Window()
    window.add_pairs(torch.ones(1, 3), torch.ones(1, 3))
    assert window.geometry() == {}


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ({"shuffled_similarity": COLLAPSE_SIMILARITY}, "cosine 0.990"),
        ({"shuffled_similarity": COLLAPSE_SIMILARITY - 0.01}, None),
        ({"shuffled_similarity": math.nan, "source_rank": math.nan, "rank_pairs": 99}, None),
        ({"source_rank": COLLAPSE_RANK, "target_rank": 7.0, "rank_pairs": COLLAPSE_PAIRS}, "16 source embeddings"),
        ({"source_rank": 7.0, "target_rank": 1.2, "rank_pairs": 31}, "31 target embeddings have effective rank 1.20"),
        ({"source_rank": 1.0, "target_rank": 1.0, "rank_pairs": COLLAPSE_PAIRS - 1}, None),
        ({"source_rank": 1.0, "target_rank": 1.0}, None),
        ({"source_rank": 1.6, "target_rank": 1.6, "rank_pairs": 99}, None),
        ({"loss": 0.5}, None),
    ],
)
def test_what_counts_as_a_collapse(logs: dict[str, float], said: str | None) -> None:
    found = collapse(logs)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
