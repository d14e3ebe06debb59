"""The statistics against hand-computed values, published examples, and the slow obvious way."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from stepjepa.study.statistics import PairedT, detectable, flip_p_values, holm, paired_t, sign_flip


def test_students_own_example():
    # Student (1908), the soporific drugs; R prints t = -4.0621, df = 9, p = 0.002833, -2.4598858 .. -0.7001142.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_t(first, second)
    assert result.t == pytest.approx(-4.0621, abs=5e-5)
    assert result.p_two_sided == pytest.approx(0.002833, abs=5e-7)
    assert result.p_greater == pytest.approx(1 - 0.002833 / 2, abs=5e-7)
    assert (result.low, result.high) == (pytest.approx(-2.4598858), pytest.approx(-0.7001142))


@pytest.mark.parametrize(
    ("ours", "theirs", "mean", "std"),
    [
        ([0.5], [0.25], 0.25, None),
        # 0.3 - 0.2 and 0.8 - 0.7 differ in the last bits; the scores don't differ in their differences.
        ([0.3, 0.8, 0.5], [0.2, 0.7, 0.4], 0.1, 0),
        ([0.2, 0.7], [0.3, 0.8], -0.1, 0),
        ([0.2, 0.7, 0.1], [0.2, 0.7, 0.1], 0, 0),
    ],
)
def test_nothing_is_claimed_where_nothing_varies(ours, theirs, mean, std):
    result = paired_t(ours, theirs)
    assert result[:3] == (len(ours), pytest.approx(mean), std)
    assert result[3:] == (None,) * 5


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # the example of Wikipedia's article
        ([], []),
        ([0.3, 0.2, 0.01], [0.4, 0.4, 0.03]),  # 0.3 once is less than 0.2 twice, and must not come before it
        ([0.6, 0.9], [1.0, 1.0]),
    ],
)
def test_holm_by_hand(p_values, adjusted):
    assert holm(p_values) == pytest.approx(adjusted)


def pair_of(gained, lost, both=2, neither=3):
    ours = [True] * gained + [False] * lost + [True] * both + [False] * neither
    theirs = [False] * gained + [True] * lost + [True] * both + [False] * neither
    return ours, theirs


@pytest.mark.parametrize(
    ("gained", "lost", "greater", "two_sided"),
    [
        (0, 0, 1, 1),
        (5, 1, 7 / 64, 14 / 64),
        (9, 2, 67 / 2048, 134 / 2048),  # 0.06543 in the manual of R's exact2x2
        (2, 9, 2036 / 2048, 134 / 2048),
    ],
)
def test_of_one_seed_it_is_mcnemars_test(gained, lost, greater, two_sided):
    assert sign_flip([pair_of(gained, lost)]) == (gained, lost, pytest.approx(greater), pytest.approx(two_sided))


def test_fishers_own_example():
    # Fisher (1935), section 21: Darwin's plants, in eighths of an inch. 863 of 32768 sums reach 314.
    differences = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert flip_p_values(differences) == (pytest.approx(863 / 32768), pytest.approx(1726 / 32768))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_sign_flip_is_all_assignments_counted(seeds):
    generator = random.Random(seeds)
    for _ in range(20):
        pairs = [[[generator.random() < share for _ in range(9)] for share in (0.6, 0.4)] for _ in range(seeds)]
        net = [sum(ours[i] - theirs[i] for ours, theirs in pairs) for i in range(9)]
        sums = [sum(map(int.__mul__, signs, net)) for signs in itertools.product((1, -1), repeat=9)]
        result = sign_flip(pairs)
        assert result.p_greater == pytest.approx(sum(total >= sum(net) for total in sums) / 512)
        assert result.p_two_sided == pytest.approx(sum(abs(total) >= abs(sum(net)) for total in sums) / 512)


def test_the_same_example_seen_by_five_seeds_is_one_example():
    # Pooling would count 20 of 20 discordant pairs and find p = 1e-6; there are four examples.
    result = sign_flip([pair_of(4, 0)] * 5)
    assert (result.gained, result.lost) == (20, 0)
    assert (result.p_greater, result.p_two_sided) == (pytest.approx(1 / 16), pytest.approx(1 / 8))


@pytest.mark.parametrize(("seeds", "arms", "tails"), [(3, 4, "one"), (3, 1, "two"), (5, 3, "one"), (7, 2, "two")])
def test_a_difference_called_detectable_is_found_in_four_of_five_cases(seeds: int, arms: int, tails: str) -> None:
    generator = np.random.default_rng(seeds)
    size = detectable(PairedT(seeds, 0.0, 1.0, t=0.0), tails, arms)
    draws = generator.normal(size, 1.0, (200_000, seeds))
    t = draws.mean(1) * math.sqrt(seeds) / draws.std(1, ddof=1)
    share = (t > stats.t.isf(0.05 / arms / (1 if tails == "one" else 2), seeds - 1)).mean()
    assert share == pytest.approx(0.8, abs=0.005)


def test_without_a_test_nothing_is_detectable() -> None:
    assert detectable(PairedT(1, 0.3, None), "one", 2) is None
