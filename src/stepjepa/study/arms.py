"""Arms, one for each method: their runs, their differences from the baseline, and the conclusion."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from stepjepa.base.json_object import JsonObject
from stepjepa.evaluation.summary_text import score_words
from stepjepa.study import statistics
from stepjepa.study.evaluated_run import HITS_AT_1, EvaluatedRun
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
    retrieval: dict[str, PairedT] = field(default_factory=dict)  # the same of each of RETRIEVAL_MEASURES that both have
    holm: float | None = None  # p value of the headline score over seeds, Holm-corrected for the number of arms
    by_example_holm: float | None = None  # p value of by_example, Holm-corrected


@dataclass(frozen=True)
class KeptOut:
    """A run kept out of the statistics: launches with different settings trained it."""

    run: EvaluatedRun
    arm: str | None  # the arm with the settings of its last launch; None if there is no such arm


@dataclass(frozen=True, repr=False)
class ComparedArms:
    """Arms against a baseline."""

    scores: dict[str, str]  # the names of headline and lenient score
    test: JsonObject  # task, test file, number of examples
    arms: tuple[Arm, ...]  # the baseline first, the others in the order in which their runs were named
    differences: dict[str, Difference]  # by the name of the arm; the baseline has none
    tails: str  # one or two: which p values are corrected
    notes: tuple[str, ...]  # caveats for the reader, one sentence each
    kept_out: tuple[KeptOut, ...]
    one_run: str | None = None  # sentence on runs that are one run, trained several times, and on its weights

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
        """The arms better than the baseline (Holm's p of the headline below 0.05), and the detectable difference."""
        score, base, tails = score_words(self.scores["headline"]), self.baseline.name, self.tails
        tests = {name: difference.measures["headline"] for name, difference in self.differences.items()}
        better = {
            name: f"{name} by {100 * test.mean:+.2f} points [{100 * test.low:+.2f}, {100 * test.high:+.2f}] "
            f"over {test.n} seeds ({tails}-tailed Holm p {p:.4f})"
            for name, test in tests.items()
            if (p := self.differences[name].holm) is not None and p < 1 - statistics.LEVEL
            if test is not None and test.mean > 0 and test.low is not None and test.high is not None
        }
        if self.one_run is not None:
            return "; ".join([self.one_run, *self._changed_answers()])
        parts = []
        for heading in (*EQUAL, None):
            # An arm with equal steps and equal FLOPs is in both groups.
            names = [name for name, difference in self.differences.items() if heading in (difference.equal or (None,))]
            where = f"at equal {heading}" if heading else "at neither equal steps nor FLOPs"
            winners, claim = (
                " and ".join(better[name] for name in names if name in better),
                f"better than {base} in right answers ({score})",
            )
            if names:
                parts.append(f"{where}, {claim}: {winners}" if winners else f"{where}, no arm is shown to be {claim}")
        tested = [test for test in tests.values() if test is not None and test.n > 1]
        sizes = [100 * size for test in tested if (size := statistics.detectable(test, tails, len(tested))) is not None]
        if sizes:
            seeds = " or ".join(map(str, sorted({test.n for test in tested})))
            upper = f" to {max(sizes):.1f}" if len(sizes) > 1 else ""
            share = f"{statistics.POWER:.0%} of cases"
            parts.append(f"{seeds} seeds could have shown a difference of {min(sizes):.1f}{upper} points (in {share})")
        elif tested:
            parts.append("differences that are equal for all seeds can't be tested")
        else:
            parts.append("without two seeds in common with the baseline nothing can be shown over seeds")
        return "; ".join(parts)

    def _changed_answers(self) -> Iterator[str]:
        """Yield which answers of one run, trained several times, are right in one folder and wrong in the first."""
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
        """The verdict, and the sentence on retrieval if there is one; a reader sees them first."""
        return [text for text in (self.verdict, self.retrieval) if text is not None]

    @property
    def retrieval(self) -> str | None:
        """How often each arm's nearest answer is right; None if no arm was evaluated with retrieval."""
        hits = {arm.name: spread for arm in self.arms if (spread := arm.spread(HITS_AT_1)) is not None}
        texts = []
        for name, spread in hits.items():
            test = self.differences[name].retrieval.get(HITS_AT_1) if name in self.differences else None
            points = ""
            if test is not None:
                ends = ""
                if test.low is not None and test.high is not None:
                    ends = f" [{100 * test.low:+.1f}, {100 * test.high:+.1f}]"
                    ends += ", which includes 0" if test.low <= 0 <= test.high else ""
                points = f" ({100 * test.mean:+.1f} points{ends})"
            texts.append(f"{name} {spread.mean:.1%}{points}")
        return f"by embeddings, the nearest answer is right: {', '.join(texts)}" if texts else None
