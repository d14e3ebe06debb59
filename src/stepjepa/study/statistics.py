"""Statistics of comparing training methods: pure functions on numbers.

There are two sources of chance. Training again with another seed gives another model: :func:`paired_t` asks whether a
method is better than the baseline over seeds. Testing on other examples gives other scores: :func:`sign_flip` asks
whether these very models differ beyond the choice of examples.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

LEVEL, POWER = 0.95, 0.8
"""Confidence level of all intervals; power at which the smallest detectable difference is computed."""


class Spread(NamedTuple):
    """Number of values, their mean, and their standard deviation (n - 1), which is None for a single one."""

    n: int
    mean: float
    std: float | None


class PairedT(NamedTuple):
    """Mean, standard deviation, 95 % interval and t-test of ``n`` paired differences; unknown values are None."""

    n: int
    mean: float
    std: float | None
    low: float | None = None
    high: float | None = None
    t: float | None = None
    p_greater: float | None = None  # one-tailed: the mean is above 0
    p_two_sided: float | None = None


class ExampleTest(NamedTuple):
    """Number of answers over all seeds that only the method (``gained``) or only the baseline (``lost``) had right, and
    the p values of :func:`sign_flip`."""

    gained: int
    lost: int
    p_greater: float
    p_two_sided: float


def spread(values: Sequence[float]) -> Spread:
    """Return number, mean and standard deviation of the values."""
    mean = math.fsum(values) / len(values)
    return Spread(len(values), mean, float(np.std(values, ddof=1)) if len(values) > 1 else None)


def paired_t(method: Sequence[float], baseline: Sequence[float]) -> PairedT:
    """Return Student's paired t-test of the differences ``method - baseline``.

    A single pair has no test. Neither have equal differences: scores of few examples lie on a coarse grid, so that
    equal differences are due to rounding, and p = 0 would claim certainty.

    Args:
        method: one score per seed.
        baseline: the score of the baseline for each of these seeds, in the same order.
    """
    n, mean, std = spread([own - base for own, base in zip(method, baseline, strict=True)])
    # Floating-point rounding of equal differences is not variance.
    if std is None or std <= 1e-12 * max(1.0, *map(abs, method), *map(abs, baseline)):
        return PairedT(n, mean, std if std is None else 0.0)
    test = stats.ttest_rel(method, baseline)
    low, high = map(float, test.confidence_interval(LEVEL))
    t = float(test.statistic)
    return PairedT(n, mean, std, low, high, t, float(stats.t.sf(t, n - 1)), float(test.pvalue))


def detectable(test: PairedT, tails: str, arms: int) -> float | None:
    """Return the smallest true difference that a t-test at level 0.05 detects with power ``POWER``; None if no test.

    By the noncentral t distribution: with a true difference d the statistic has noncentrality d sqrt(n) / std.
    ``tails`` is ``one`` or ``two``; the level is divided among ``arms``, as Holm's correction does for the best arm.
    """
    if test.std is None or test.t is None:
        return None
    degrees_of_freedom = test.n - 1
    critical_value = stats.t.isf((1 - LEVEL) / ((1 if tails == "one" else 2) * arms), degrees_of_freedom)

    def power_deficit(noncentrality: float) -> float:
        return float(stats.nct.cdf(critical_value, degrees_of_freedom, noncentrality)) - (1 - POWER)

    # The probability of the opposite tail is negligible for a difference of this size.
    highest = critical_value + 1.0
    while power_deficit(highest) > 0:
        highest *= 2
    return float(optimize.brentq(power_deficit, 0.0, highest)) * test.std / math.sqrt(test.n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down correction, in the same order, at most 1."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def sign_flip(pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> ExampleTest:
    """Return McNemar's exact test for several seeds: a permutation test whose units are the examples.

    A hard example is hard for every seed, so (seed, example) pairs are not independent. Each example counts once, with
    the number of seeds that gained it minus the number that lost it; under the null hypothesis its sign is a coin flip.
    ``pairs`` holds for each seed the verdicts of the method and of the baseline on the same examples.
    """
    changes = np.array([np.asarray(own, np.int64) - np.asarray(base, np.int64) for own, base in pairs])
    greater, two_sided = flip_p_values(changes.sum(axis=0).tolist())
    return ExampleTest(int((changes == 1).sum()), int((changes == -1).sum()), greater, two_sided)


def flip_p_values(values: Sequence[int]) -> tuple[float, float]:
    """Return the one-tailed and two-tailed p of Fisher's exact permutation test of paired integer differences."""
    # The sum of the values with a positive sign is a sum of independent m * Binomial(c, 1/2), one for each size m.
    plus = np.ones(1)
    for size, count in Counter(abs(value) for value in values if value).items():
        steps = np.zeros(size * count + 1)
        steps[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        plus = np.convolve(plus, steps)
    total_size = sum(map(abs, values))
    at_least = [math.fsum(plus[(total + total_size) // 2 :]) for total in (sum(values), abs(sum(values)))]
    return min(1.0, at_least[0]), min(1.0, 2 * at_least[1])
