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
"""Of all intervals; and of the smallest difference that some seeds could have shown."""


class Spread(NamedTuple):
    """Number of values, their mean, and their standard deviation (n - 1), which is None for a single one."""

    n: int
    mean: float
    std: float | None


class PairedT(NamedTuple):
    """Of ``n`` differences mean, deviation, 95 % interval of the mean and t-test; what is not known is None."""

    n: int
    mean: float
    std: float | None
    low: float | None = None
    high: float | None = None
    t: float | None = None
    p_greater: float | None = None  # one-tailed: the mean is above 0
    p_two_sided: float | None = None


class ExampleTest(NamedTuple):
    """Over all seeds, how often only the method was right (``gained``) or only the baseline; p of :func:`sign_flip`."""

    gained: int
    lost: int
    p_greater: float
    p_two_sided: float


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation."""
    mean = math.fsum(values) / len(values)
    return Spread(len(values), mean, float(np.std(values, ddof=1)) if len(values) > 1 else None)


def paired_t(method: Sequence[float], baseline: Sequence[float]) -> PairedT:
    """Student's paired t-test of scores, one for each seed.

    A single pair has no test. Nor is there one where all differences are equal: scores of few examples fall on a coarse
    grid, so that equal differences are a matter of rounding, and a p of 0 would claim certainty.
    """
    n, mean, std = spread([ours - theirs for ours, theirs in zip(method, baseline, strict=True)])
    # Differences of equal counts differ by rounding, which is no variance.
    if std is None or std <= 1e-12 * max(1.0, *map(abs, method), *map(abs, baseline)):
        return PairedT(n, mean, std if std is None else 0.0)
    found = stats.ttest_rel(method, baseline)
    low, high = map(float, found.confidence_interval(LEVEL))
    t = float(found.statistic)
    return PairedT(n, mean, std, low, high, t, float(stats.t.sf(t, n - 1)), float(found.pvalue))


def detectable(test: PairedT, tails: str, arms: int) -> float | None:
    """The difference that a t-test of level 0.05 with this spread finds in ``POWER`` of all cases; None if no test.

    By the noncentral t distribution: with a true difference d the statistic has noncentrality d sqrt(n) / std.
    ``tails`` is ``one`` or ``two``; the level is divided among ``arms``, as Holm's correction does for the best one.
    """
    if test.std is None or test.t is None:
        return None
    freedom = test.n - 1
    bound = stats.t.isf((1 - LEVEL) / ((1 if tails == "one" else 2) * arms), freedom)

    def lacking(noncentrality: float) -> float:
        return float(stats.nct.cdf(bound, freedom, noncentrality)) - (1 - POWER)

    # The other tail of a two-tailed test is never reached by a difference of this size.
    highest = bound + 1.0
    while lacking(highest) > 0:
        highest *= 2
    return float(optimize.brentq(lacking, 0.0, highest)) * test.std / math.sqrt(test.n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p in the same order, never above 1."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def sign_flip(pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> ExampleTest:
    """McNemar's exact test, for several seeds: a permutation test whose units are the examples.

    A hard example is hard for every seed, so (seed, example) pairs are not independent. Each example counts once, with
    the number of seeds that gained it less the number that lost it; under the null hypothesis its sign is a coin flip.
    ``pairs`` holds for each seed the verdicts of the method and of the baseline on the same examples.
    """
    changes = np.array([np.asarray(ours, np.int64) - np.asarray(theirs, np.int64) for ours, theirs in pairs])
    greater, two_sided = flip_p_values(changes.sum(axis=0).tolist())
    return ExampleTest(int((changes == 1).sum()), int((changes == -1).sum()), greater, two_sided)


def flip_p_values(values: Sequence[int]) -> tuple[float, float]:
    """Fisher's exact permutation test of paired whole differences: one-tailed and two-tailed p."""
    # The sum of those that have a plus is a sum of independent m * Binomial(c, 1/2), one for each size m.
    plus = np.ones(1)
    for size, count in Counter(abs(value) for value in values if value).items():
        steps = np.zeros(size * count + 1)
        steps[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        plus = np.convolve(plus, steps)
    whole = sum(map(abs, values))
    at_least = [math.fsum(plus[(total + whole) // 2 :]) for total in (sum(values), abs(sum(values)))]
    return min(1.0, at_least[0]), min(1.0, 2 * at_least[1])
