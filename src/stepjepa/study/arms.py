"""Arms, one for each method: their runs, their differences from the baseline, and what these show."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stepjepa.base.json_object import JsonObject
from stepjepa.study import statistics
from stepjepa.study.evaluated_run import EvaluatedRun
from stepjepa.study.statistics import ExampleTest, PairedT, Spread

TAILS = {"one": "p_greater", "two": "p_two_sided"}
"""Which p is corrected, to the name that it has in the tests."""

EQUAL = ("steps", "FLOPs")
"""In what an arm may be equal to the baseline, and so be comparable with it: optimizer steps, compute of training."""

SAME_FLOPS = 0.02
"""Compute counts as equal within this share of the baseline's: a step is the smallest amount that can be added."""


def all_known(values: Iterable[Any]) -> list[Any]:
    """The values; none where one of them is None."""
    known = list(values)
    return [] if None in known else known


@dataclass(frozen=True)
class Arm:
    """A method: runs that differ in nothing but their seeds, in the order of the seeds."""

    name: str
    settings: dict[str, Any]
    runs: tuple[EvaluatedRun, ...]

    def spread(self, what: str) -> Spread | None:
        """Mean and standard deviation over all seeds of one of ``MEASURES`` or ``FIGURES``; None if one is unknown."""
        known = all_known(run.mean(what) for run in self.runs)
        return statistics.spread(known) if known else None


@dataclass
class Difference:
    """An arm against the baseline, over the seeds that both have. What is not known or not tested is None."""

    seeds: tuple[str, ...]
    measures: dict[str, PairedT | None]  # for each of MEASURES the test over seeds
    by_seed: dict[str, ExampleTest]  # McNemar's test for each seed; empty where the headline is not right or wrong
    by_example: ExampleTest | None  # the test over examples
    gained_lenient_before: int | None  # of the examples gained, those that the baseline had right by the lenient score
    token_ratio: float | None  # mean tokens of training to those of the baseline
    flops_ratio: float | None  # compute of training to that of the baseline's run of the same seed, mean over seeds
    equal: tuple[str, ...]  # those of EQUAL that hold for every seed
    holm: float | None = None  # p of the headline over seeds, corrected for the number of all arms
    by_example_holm: float | None = None  # the same of by_example


@dataclass(frozen=True)
class KeptOut:
    """A run that is in no arm's statistics, since launches with other settings have trained it."""

    run: EvaluatedRun
    arm: str | None  # whose settings its last launch had; None if there is no such arm


@dataclass(frozen=True, repr=False)
class ComparedArms:
    """Arms against a baseline."""

    scores: dict[str, str]  # the names of headline and lenient score
    test: JsonObject  # task, test file, number of examples
    arms: tuple[Arm, ...]  # the baseline first, the others in the order in which their runs were named
    differences: dict[str, Difference]  # by name, of all arms but the baseline
    tails: str  # one or two, of the p that are corrected
    notes: tuple[str, ...]  # what a reader must know, one sentence each
    kept_out: tuple[KeptOut, ...]

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    def measure_names(self) -> dict[str, str]:
        """What to call each of ``MEASURES`` that some arm has; the lenient score only if it is not the headline."""
        names = {**self.scores, "stopped": "stop rate"}
        if names["lenient"] == names["headline"]:
            del names["lenient"]
        return {key: name for key, name in names.items() if any(arm.spread(key) is not None for arm in self.arms)}

    @property
    def verdict(self) -> str:
        """What is better than the baseline (Holm's p of the headline below 0.05), and what could be shown."""
        score, base, tails = self.scores["headline"], self.baseline.name, self.tails
        tests = {name: found.measures["headline"] for name, found in self.differences.items()}
        better = {
            name: f"{name} by {100 * test.mean:+.2f} points [{100 * test.low:+.2f}, {100 * test.high:+.2f}] "
            f"over {test.n} seeds ({tails}-tailed Holm p {p:.4f})"
            for name, test in tests.items()
            if (p := self.differences[name].holm) is not None and p < 1 - statistics.LEVEL
            if test is not None and test.mean > 0 and test.low is not None and test.high is not None
        }
        parts = []
        for heading in (*EQUAL, None):
            # An arm with equal steps and equal FLOPs is in both groups.
            names = [name for name, found in self.differences.items() if heading in (found.equal or (None,))]
            where = f"at equal {heading}" if heading else "at neither equal steps nor FLOPs"
            shown, what = (
                " and ".join(better[name] for name in names if name in better),
                f"better than {base} in {score}",
            )
            if names:
                parts.append(f"{where}, {what}: {shown}" if shown else f"{where}, no arm is shown to be {what}")
        known = [test for test in tests.values() if test is not None and test.n > 1]
        sizes = [100 * size for test in known if (size := statistics.detectable(test, tails, len(known))) is not None]
        if sizes:
            seeds = " or ".join(map(str, sorted({test.n for test in known})))
            most = f" to {max(sizes):.1f}" if len(sizes) > 1 else ""
            share = f"{statistics.POWER:.0%} of cases"
            parts.append(f"{seeds} seeds could have shown a difference of {min(sizes):.1f}{most} points (in {share})")
        elif known:
            parts.append("differences that are equal for all seeds can't be tested")
        else:
            parts.append("without two seeds in common with the baseline nothing can be shown over seeds")
        return "; ".join(parts)
