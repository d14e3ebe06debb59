"""Arms, one for each method: their runs, their differences from the baseline, and the conclusion."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stepjepa.base.counting import counted
from stepjepa.base.json_object import JsonObject
from stepjepa.evaluation.summary_text import MAPS, score_words
from stepjepa.study import statistics
from stepjepa.study.evaluated_run import HITS_AT_1, MAP_MEASURES, EvaluatedRun
from stepjepa.study.statistics import ExampleTest, PairedT, Spread

T = TypeVar("T")

TAILS = {"one": "p_greater", "two": "p_two_sided"}
"""Number of tails of the corrected p value -> its field in the tests."""

EQUAL = ("steps", "FLOPs")
"""Budgets in which an arm can match the baseline's: optimizer steps, training FLOPs."""

SAME_FLOPS = 0.02
"""Relative tolerance within which training FLOPs count as equal: compute changes in whole steps only."""


def all_known(values: Iterable[T | None]) -> list[T]:
    """Return the values as a list; an empty list if one of them is None."""
    collected = list(values)
    known = [value for value in collected if value is not None]
    return known if len(known) == len(collected) else []


@dataclass(frozen=True)
class Arm:
    """A method: runs that differ only in their seeds, sorted by seed."""

    name: str
    settings: JsonObject
    runs: tuple[EvaluatedRun, ...]

    def __repr__(self) -> str:
        return f"Arm('{self.name}', {counted(len(self.runs), 'run')})"

    @property
    def ranks_steps(self) -> bool:
        """Whether its retrieval ranks next steps, not answers."""
        return any(run.ranks_steps for run in self.runs)

    def spread(self, measure: str) -> Spread | None:
        """Return the spread over seeds of a measure, see ``EvaluatedRun.mean``; None if a run lacks it."""
        means = all_known(run.mean(measure) for run in self.runs)
        return statistics.spread(means) if means else None


@dataclass
class Difference:
    """An arm compared with the baseline over their common seeds. Unknown or untested values are None."""

    seeds: tuple[str, ...]
    measures: dict[str, PairedT | None]  # t-test over seeds of each of MEASURES
    by_seed: dict[str, ExampleTest]  # seed -> McNemar's test; empty if the headline score is not binary
    by_example: ExampleTest | None  # permutation test over examples
    gained_lenient_before: int | None  # gained examples that the baseline answered right by the lenient score
    token_ratio: float | None  # training tokens divided by those of the baseline
    flops_ratio: float | None  # mean over seeds of training FLOPs divided by those of the baseline
    equal: tuple[str, ...]  # the budgets of EQUAL that match the baseline for every seed
    # t-test of each of RANKING_MEASURES that both have
    retrieval: dict[str, PairedT] = field(default_factory=dict)
    over_linear_map: PairedT | None = None  # hits at 1 of the arm as it is, against the baseline behind a linear map
    over_projection_heads: PairedT | None = None  # the same behind projection heads
    holm: float | None = None  # p value of the headline score over seeds, Holm-corrected for the number of arms
    by_example_holm: float | None = None  # p value of by_example, Holm-corrected

    def over(self, of_map: str) -> PairedT | None:
        """Return the test of hits at 1 as it is, against the baseline behind one of ``summary_text.MAPS``."""
        return {"linear_map": self.over_linear_map, "projection_heads": self.over_projection_heads}[of_map]

    @property
    def budget(self) -> str | None:
        """The budgets that match the baseline's, or ``neither``; None without a common seed, so that none is known."""
        return ", ".join(self.equal) or ("neither" if self.seeds else None)


@dataclass(frozen=True)
class KeptOut:
    """A run kept out of the statistics: launches with different settings trained it."""

    run: EvaluatedRun
    arm: str | None  # the arm with the settings of its last launch; None if there is no such arm


@dataclass(frozen=True, repr=False)
class ComparedArms:
    """Arms against a baseline.

    Attributes:
        scores: the names of headline and lenient score.
        test: task, test file, number of examples.
        arms: the baseline first, the others in the order in which their runs were named.
        differences: by the name of the arm; the baseline has none.
        tails: one or two: which p values are corrected.
        notes: caveats for the reader, one sentence each.
        kept_out: runs that are not in the statistics.
        one_run: sentence on the weights if all runs are one run, trained several times; else None.
    """

    scores: dict[str, str]
    test: JsonObject
    arms: tuple[Arm, ...]
    differences: dict[str, Difference]
    tails: str
    notes: tuple[str, ...]
    kept_out: tuple[KeptOut, ...]
    one_run: str | None = None

    @property
    def baseline(self) -> Arm:
        """The arm that all others are compared with."""
        return self.arms[0]

    def measure_names(self) -> dict[str, str]:
        """Return the display name of each of ``MEASURES`` that an arm has; the lenient score only if it differs."""
        names = {**self.scores, "stopped": "stop rate"}
        if names["lenient"] == names["headline"]:
            del names["lenient"]
        return {key: name for key, name in names.items() if any(arm.spread(key) is not None for arm in self.arms)}

    @property
    def verdict(self) -> str:
        """The arms better than the baseline (Holm's p of the headline below 0.05), and the detectable difference.

        With two tails also the arms that are worse.
        """
        if self.one_run is not None:
            return "; ".join([self.one_run, *self._changed_answers()])
        return "; ".join([*self._shown(), *self._detectable_differences()])

    def _shown(self) -> Iterator[str]:
        """Yield the arms better than the baseline, or that there is none, for each budget that arms share with it.

        Arms that are worse follow; a one-tailed test shows none.
        """
        scores = f"than {self.baseline.name} in right answers ({score_words(self.scores['headline'])})"
        for budget in (*EQUAL, None):
            # An arm with equal steps and equal FLOPs is in both groups.
            arms = {
                name: arm for name, arm in self.differences.items() if arm.seeds and budget in (arm.equal or (None,))
            }
            if not arms:
                continue
            where = f"at equal {budget}" if budget else "at neither equal steps nor FLOPs"
            better, worse = (
                " and ".join(filter(None, (self._significant(name, arm, sign) for name, arm in arms.items())))
                for sign in (1, -1)
            )
            yield f"{where}, better {scores}: {better}" if better else f"{where}, no arm is shown to be better {scores}"
            if worse:
                yield f"{where}, worse {scores}: {worse}"

    def _significant(self, name: str, difference: Difference, sign: int) -> str | None:
        """Describe a significant difference from the baseline that has this sign; None for any other."""
        test, p = difference.measures["headline"], difference.holm
        if test is None or test.low is None or test.high is None or p is None:
            return None
        if sign * test.mean <= 0 or p >= 1 - statistics.LEVEL:
            return None
        points = f"{100 * test.mean:+.2f} points [{100 * test.low:+.2f}, {100 * test.high:+.2f}]"
        return f"{name} by {points} over {test.n} seeds ({self.tails}-tailed Holm p {p:.4f})"

    def _detectable_differences(self) -> Iterator[str]:
        """Yield the smallest differences that these seeds can detect, and why some can't be detected or tested."""
        tests = [(name, difference.measures["headline"]) for name, difference in self.differences.items()]
        tested = {name: test for name, test in tests if test is not None and test.n > 1}
        if not tested:
            yield "without two seeds in common with the baseline nothing can be shown over seeds"
            return
        detectable = {name: statistics.detectable(test, self.tails, len(tested)) for name, test in tested.items()}
        points = {name: 100 * size for name, size in detectable.items() if size is not None}
        possible = {name: size for name, size in points.items() if size <= 100}
        share = f"(in {statistics.POWER:.0%} of cases)"
        if possible:
            seeds = " or ".join(map(str, sorted({tested[name].n for name in possible})))
            yield f"{seeds} seeds could have shown a difference of {_extent(possible.values())} points {share}"
        if beyond := {name: size for name, size in points.items() if name not in possible}:
            seeds = " or ".join(map(str, sorted({tested[name].n for name in beyond})))
            needed = f"with {seeds} seeds it would have to be {_extent(beyond.values())} points {share}"
            yield f"no difference of {_any_of([*beyond])} could have been shown: {needed}"
        if constant := [name for name in tested if name not in points]:
            yield f"differences that are equal for all seeds can't be tested: those of {' and '.join(constant)}"

    def _changed_answers(self) -> Iterator[str]:
        """Yield the number of answers that changed between the folders of one run, trained several times."""
        for name, difference in self.differences.items():
            if (test := difference.by_example) is not None and test.gained == test.lost == 0:
                yield f"{name} is right on the same examples as {self.baseline.name}"
            elif test is not None:
                yield (
                    f"{name} is right on {test.gained} where {self.baseline.name} is wrong, "
                    f"and wrong on {test.lost} where that is right"
                )

    @property
    def sentences(self) -> list[str]:
        """The verdict, and the sentences on retrieval if there are any; a reader sees them first."""
        return [self.verdict, *self._on_retrieval()]

    @property
    def retrieval(self) -> str | None:
        """How often each arm's nearest answer is right; None if no arm was evaluated with retrieval."""
        return "; ".join(self._on_retrieval()) or None

    def _on_retrieval(self) -> list[str]:
        """Return the sentences on the nearest answers: as it is, behind each map, the one against the other."""
        as_it_is, base = self._hits(HITS_AT_1), self.baseline.name
        if not as_it_is:
            return []
        nearest = "next step" if self._ranked_steps == {True} else "answer"
        parts = [f"by embeddings, the nearest {nearest} is right: {', '.join(as_it_is)}"]
        for of_map, (name, short) in MAPS.items():
            if mapped := self._hits(MAP_MEASURES[of_map][0]):
                parts.append(f"behind {name}: {', '.join(mapped)}")
            tests = {arm: difference.over(of_map) for arm, difference in self.differences.items()}
            beyond = [f"{arm}{_points(test)}" for arm, test in tests.items() if test is not None]
            parts += [f"as it is, over {base} behind {short}: {', '.join(beyond)}"] if mapped and beyond else []
        return parts

    @property
    def _ranked_steps(self) -> set[bool]:
        """Whether retrieval ranked next steps, of the arms that have it."""
        return {arm.ranks_steps for arm in self.arms if arm.spread(HITS_AT_1) is not None}

    def _hits(self, measure: str) -> list[str]:
        """Format each arm's share of queries whose nearest answer is right, with the difference from the baseline.

        Where some arms rank next steps instead of answers, it is said of these.
        """
        texts = []
        for arm in self.arms:
            spread, difference = arm.spread(measure), self.differences.get(arm.name)
            if spread is not None:
                test = None if difference is None else difference.retrieval.get(measure)
                of_steps = " (next step)" if arm.ranks_steps and False in self._ranked_steps else ""
                texts.append(f"{arm.name} {spread.mean:.1%}{of_steps}{'' if test is None else _points(test)}")
        return texts


def _points(test: PairedT) -> str:
    """Format a difference of shares: `` (+3.1 points [-0.2, +6.4], which includes 0)``."""
    ends = ""
    if test.low is not None and test.high is not None:
        ends = f" [{100 * test.low:+.1f}, {100 * test.high:+.1f}]"
        ends += ", which includes 0" if test.low <= 0 <= test.high else ""
    return f" ({100 * test.mean:+.1f} points{ends})"


def _extent(values: Iterable[float]) -> str:
    """Format the least and the greatest value: ``20.6 to 54.4``, or one number where both look the same."""
    known = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (known[0], known[-1])))


def _any_of(names: Sequence[str]) -> str:
    """List names: ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
