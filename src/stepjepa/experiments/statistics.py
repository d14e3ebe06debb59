"""The statistics of comparing training methods: pure functions on numbers.

There are two sources of chance. Training again with another seed gives another model: :func:`paired_t` asks whether a
method is better than the baseline over seeds. Testing on other examples gives other scores: :func:`mcnemar` and
:func:`sign_flip` ask whether these very models differ beyond the choice of examples. Neither answers the other's
question.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
"""Of all intervals."""

# Scores are shares. Differences of equal counts differ by rounding, which must not pass for variance.
_ROUNDING = 1e-12


class Spread(NamedTuple):
    """What some numbers are around.

    Attributes:
        n: how many.
        mean: of them.
        std: the standard deviation of what they are a sample of (n - 1); None for a single one.
    """

    n: int
    mean: float
    std: float | None


class PairedT(NamedTuple):
    """What :func:`paired_t` finds.

    Attributes:
        n: pairs.
        mean: of the differences.
        std: of the differences (n - 1); None for a single pair.
        low: end of the interval of the mean; None where nothing is known of it.
        high: the other end.
        t: the statistic.
        p_greater: one-tailed, for the alternative that the mean is above 0.
        p_two_sided: two-tailed.
    """

    n: int
    mean: float
    std: float | None
    low: float | None = None
    high: float | None = None
    t: float | None = None
    p_greater: float | None = None
    p_two_sided: float | None = None


class ExampleTest(NamedTuple):
    """What a paired test over examples finds.

    Attributes:
        gained: how often the method was right and the baseline wrong, over all seeds.
        lost: the other way round.
        p_greater: one-tailed, for the alternative that the method is right more often.
        p_two_sided: two-tailed.
    """

    gained: int
    lost: int
    p_greater: float
    p_two_sided: float


def spread(values: Sequence[float]) -> Spread:
    """Mean and standard deviation.

    Args:
        values: at least one.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("expected at least one value, got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(1, mean, None)
    return Spread(len(values), mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)))


def paired_t(method: Sequence[float], baseline: Sequence[float]) -> PairedT:
    """Student's t-test of the differences of pairs, as papers of this field report it, and the interval they leave out.

    A single pair gives its difference and no test. Nor is there one where all differences are equal: scores of few
    examples fall on a coarse grid, so that equal differences are a matter of rounding, and a p of 0 would be a claim of
    certainty made from it. Interval, t and p are None then.

    Args:
        method: scores, one for each seed.
        baseline: scores of the same seeds, in the same order.

    Raises:
        ValueError: there are no pairs, or not equally many scores.
    """
    if len(method) != len(baseline):
        raise ValueError(f"expected as many scores as the baseline's {len(baseline)}, got {len(method)}")
    n, mean, std = spread([ours - theirs for ours, theirs in zip(method, baseline, strict=True)])
    scale = max(1.0, *map(abs, method), *map(abs, baseline))
    if std is None or std <= _ROUNDING * scale:
        return PairedT(n, mean, std if std is None else 0.0)
    error = std / math.sqrt(n)
    t = mean / error
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    greater, two_sided = float(stats.t.sf(t, n - 1)), 2 * float(stats.t.sf(abs(t), n - 1))
    return PairedT(n, mean, std, mean - half, mean + half, t, greater, two_sided)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p, with which a claim on any of several methods errs as rarely as on one.

    Args:
        p_values: one for each method that was compared with the baseline.

    Returns:
        The adjusted values in the same order; never above 1.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def mcnemar(method: Sequence[bool], baseline: Sequence[bool]) -> ExampleTest:
    """McNemar's exact test: of two models, which is right where the other is wrong?

    Args:
        method: for each example, whether the method's model was right.
        baseline: the same of the baseline's, in the same order.

    Raises:
        ValueError: not equally many.
    """
    if len(method) != len(baseline):
        raise ValueError(f"expected as many verdicts as the baseline's {len(baseline)}, got {len(method)}")
    gained = sum(ours and not theirs for ours, theirs in zip(method, baseline, strict=True))
    lost = sum(theirs and not ours for ours, theirs in zip(method, baseline, strict=True))
    if not gained + lost:
        return ExampleTest(0, 0, 1.0, 1.0)
    greater, two_sided = (
        float(stats.binomtest(gained, gained + lost, alternative=tail).pvalue) for tail in ("greater", "two-sided")
    )
    return ExampleTest(gained, lost, greater, two_sided)


def sign_flip(pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> ExampleTest:
    """McNemar's test for several seeds: an exact permutation test whose units are the examples.

    Adding up the seeds' discordant counts and testing the sum would take every (seed, example) for an observation of
    its own. But a hard example is hard for every seed: its verdicts go together, there are fewer independent ones than
    are counted, and p comes out too small. So an example counts once here, with the number of seeds that gained it less
    the number that lost it. If method and baseline were the same, each such number would as likely have the other
    sign; p is the share of all assignments of signs whose sum is as far out as the one found. For one seed that is
    McNemar's exact test. The seeds are taken as given: nothing is said of other seeds.

    Args:
        pairs: for each seed the verdicts of the method's and of the baseline's model on the same examples.

    Raises:
        ValueError: there are no seeds, or not equally many verdicts everywhere.
    """
    sizes = {len(verdicts) for pair in pairs for verdicts in pair}
    if len(sizes) != 1:
        raise ValueError(f"expected at least one seed and as many verdicts everywhere, got {sorted(sizes)}")
    changes = [np.asarray(ours, np.int64) - np.asarray(theirs, np.int64) for ours, theirs in pairs]
    net = np.sum(changes, axis=0)
    greater, two_sided = flip_p_values([value for value in net.tolist() if value])
    gained, lost = (int(sum((change == sign).sum() for change in changes)) for sign in (1, -1))
    return ExampleTest(gained, lost, greater, two_sided)


def flip_p_values(values: Sequence[int]) -> tuple[float, float]:
    """Fisher's permutation test of paired differences, over all assignments of signs.

    Args:
        values: whole differences.

    Returns:
        The share of assignments whose sum is at least that of ``values``, and of those at least as far from 0.
    """
    # The sum of those that have a plus is a sum of independent m * Binomial(c, 1/2), one for each size m.
    plus = np.ones(1)
    for size, count in Counter(map(abs, values)).items():
        if size:
            steps = np.zeros(size * count + 1)
            steps[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
            plus = np.convolve(plus, steps)
    whole = sum(map(abs, values))
    at_least = [math.fsum(plus[(total + whole) // 2 :]) for total in (sum(values), abs(sum(values)))]
    return min(1.0, at_least[0]), min(1.0, 2 * at_least[1])
