"""Compare runs: group them into arms (methods), test each against the baseline, and show the outcome."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepjepa.base.arguments import expanded, kind_of
from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.similar_names import did_you_mean
from stepjepa.study import statistics
from stepjepa.study.arms import EQUAL, SAME_FLOPS, TAILS, Arm, ComparedArms, Difference, KeptOut, all_known
from stepjepa.study.comparable import check_comparable
from stepjepa.study.evaluated_run import (
    FIGURES,
    HITS_AT_1,
    MAP_MEASURES,
    MEASURES,
    RANKING_MEASURES,
    RETRIEVAL_MEASURES,
    EvaluatedRun,
    read_evaluated_run,
)
from stepjepa.study.grouping import describe_one_run, group_by_settings, one_arm_each, settings_key
from stepjepa.study.notes import notes_on_launches, notes_on_runs
from stepjepa.study.plot import draw
from stepjepa.study.run_folders import (
    RunFolder,
    find_run_folders,
    notes_on_missing_trials,
    without_waiting_trials,
)
from stepjepa.study.statistics import PairedT, sign_flip
from stepjepa.study.tables import as_html, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class InFolder(Protocol):
    """An object whose ``folder`` is a run folder, such as the ``Run`` of ``stepjepa.run``."""

    @property
    def folder(self) -> Path:
        """The run folder."""


Runs = Iterable[str | os.PathLike[str] | InFolder]
"""Run folders, folders of sweeps, or objects with a ``folder``, such as the ``Run`` of ``stepjepa.run``."""


@dataclass(frozen=True, repr=False)
class Comparison(ComparedArms):
    """Arms against a baseline, as :func:`compare` returns them.

    Attributes:
        scores: the names of the score that decides (``headline``), and of the more lenient one (``lenient``).
        test: task, test file and number of examples.
        tails: ``one`` or ``two``: which p values are corrected.
        verdict: the arms that are better than the baseline, and how large a difference these seeds can detect.
        arms: the baseline first, the others in the order in which their runs were named.
        differences: name of the arm -> its difference from the baseline (which has none).
        notes: caveats for the reader, one sentence each.
        kept_out: runs that are not in the statistics, with the reason.
        one_run: a sentence on the weights, if all runs are one run, trained several times; otherwise None.
    """

    def __repr__(self) -> str:
        return f"Comparison({', '.join(f'{arm.name}: {len(arm.runs)} runs' for arm in self.arms)}; {self.verdict})"

    def __str__(self) -> str:
        return as_text(self)

    @property
    def details(self) -> str:
        """All tables as text: means, losses and costs, tests over seeds and over examples."""
        return as_text(self, details=True)

    @property
    def table(self) -> "DataFrame":
        """One row for each arm: means and standard deviations over seeds, and the difference from the baseline."""
        from pandas import DataFrame

        return DataFrame([self._row(arm) for arm in self.arms]).set_index("arm")

    def _row(self, arm: Arm) -> JsonObject:
        """Return the row of an arm for :attr:`table`."""
        row: JsonObject = {"arm": arm.name, "seeds": len(arm.runs)}
        for key, name in self.measure_names().items():
            spread = arm.spread(key)
            row |= {name: spread and spread.mean, f"{name} std": spread and spread.std}
        row |= {name: spread and spread.mean for name in FIGURES for spread in (arm.spread(name),)}
        row |= {name: spread.mean for name in RANKING_MEASURES if (spread := arm.spread(name)) is not None}
        difference = self.differences.get(arm.name)
        test = difference and difference.measures["headline"]
        row["pairs"] = difference and len(difference.seeds)
        row |= {name: test and getattr(test, field) for name, field in _TEST_COLUMNS.items()}
        return row | {
            "p": test and getattr(test, TAILS[self.tails]),
            "Holm p": difference and difference.holm,
            "equal": difference and difference.budget,
        }

    def plot(self) -> "Figure":
        """Draw means with error bars, every seed as a point, and the baseline as a line."""
        return draw(self)

    def _repr_html_(self) -> str:
        return as_html(self)


_TEST_COLUMNS = {"difference": "mean", "low": "low", "high": "high"}


def compare(
    runs: Runs | str | os.PathLike[str] | InFolder,
    *,
    evaluation: str | None = None,
    baseline: str | None = None,
    tails: str = "one",
    mixed_runs: bool = False,
) -> Comparison:
    """Compare evaluated runs: group runs that differ only in their seeds into arms, and test each against a baseline.

    Args:
        runs: the folder of a sweep; or run folders, folders of sweeps, or runs of ``stepjepa.run``, in any order; arms
            are named by their sweep, or by what differs. If all are one run, trained several times, each is an arm,
            named by its folder.
        evaluation: name of the evaluation to read in each run; needed only if a run has several.
        baseline: name of the arm to compare with; by default that of the sweep, the regular arm, or the first of
            the folders of one run.
        tails: ``one`` or ``two``: whether the one-tailed or the two-tailed p value is corrected for the number of arms.
        mixed_runs: include runs that were resumed with another optimizer, learning rate, schedule, weight decay,
            global batch, precision, data or objective.

    Returns:
        a :class:`Comparison` with ``.verdict``, ``.table`` (a DataFrame) and ``.plot()``.

    Raises:
        UserError: a folder holds no evaluated run, or the runs can't be compared.
        ValueError: there are no runs, or ``tails`` is another text.
        TypeError: one of ``runs`` is neither a folder nor a run.

    Example:
        >>> stepjepa.compare(["runs/regular-3", "runs/step-3", "runs/regular-5", "runs/step-5"]).verdict
    """
    if tails not in TAILS:
        raise ValueError(f"tails: expected one of {', '.join(TAILS)}, got '{tails}'")
    runs = [runs] if isinstance(runs, str | os.PathLike) or not isinstance(runs, Iterable) else [*runs]
    if wrong := [run for run in runs if not (isinstance(run, str | os.PathLike) or hasattr(run, "folder"))]:
        raise TypeError(f"runs: expected run folders, or runs of stepjepa.run, got {kind_of(wrong[0])}")
    runs = [expanded(run) if isinstance(run, str | os.PathLike) else run for run in runs]
    if not runs:
        raise ValueError("runs: expected run folders to compare, got none")
    places = _places(runs)
    evaluated = [read_evaluated_run(place.folder, evaluation) for place in places]
    check_comparable(evaluated)
    mixed = [(place, run) for place, run in zip(places, evaluated, strict=True) if run.mixed and not mixed_runs]
    included = [pair for pair in zip(places, evaluated, strict=True) if pair not in mixed]
    one_run = describe_one_run(included)
    if one_run is None:
        missing = notes_on_missing_trials([run for run in runs if isinstance(run, str | os.PathLike)])
        arms, named_baseline = group_by_settings(included, [run for _, run in mixed], missing)
    else:
        arms = one_arm_each([run for _, run in included])
        named_baseline = arms[0].name
    ordered = _baseline_first(arms, baseline or named_baseline)
    differences = {arm.name: _difference(arm, ordered[0]) for arm in ordered[1:]}
    _correct(list(differences.values()), TAILS[tails])
    protocol = evaluated[0].protocol
    test = {
        "task": protocol["task"],
        "sha256": protocol["test file (sha256)"],
        "examples": protocol["number of examples"],
        "evaluation": ", ".join(sorted({run.evaluation for run in evaluated})),
    }
    scores = {name: protocol[name] for name in ("headline", "lenient")}
    by_settings = {settings_key(arm.settings): arm.name for arm in arms}
    names = {arm.name for arm in arms}
    kept_out = tuple(
        KeptOut(run, place.arm if place.arm in names else by_settings.get(settings_key(run.settings)))
        for place, run in mixed
    )
    notes = [*notes_on_runs(ordered, differences), *notes_on_launches(ordered, kept_out)]
    paired = [difference for difference in differences.values() if difference.seeds]
    if one_run is None and paired and not any("FLOPs" in difference.equal for difference in paired):
        share = f"within {SAME_FLOPS:.0%} of {ordered[0].name}"
        notes.insert(1, f"nothing here is comparable at equal FLOPs ({share}); add runs trained with `same_flop`")
    notes = [*notes_on_missing_trials([run for run in runs if isinstance(run, str | os.PathLike)]), *notes]
    return Comparison(scores, test, ordered, differences, tails, tuple(notes), kept_out, one_run)


def _baseline_first(arms: Sequence[Arm], baseline: str | None) -> tuple[Arm, ...]:
    """Return the arms, the baseline first; None for the regular arm. UserError unless exactly one is the baseline."""
    names = [arm.name for arm in arms]
    candidates = [
        arm for arm in arms if (arm.settings["mode"] == "regular" if baseline is None else arm.name == baseline)
    ]
    if len(candidates) != 1:
        near = did_you_mean(baseline or "", names)
        fault = f"no arm '{baseline}'" if baseline is not None else f"{len(candidates)} arms are regular"
        raise UserError(f"`baseline`: {fault}; choose one of {'; '.join(names)}{near}")
    return (*candidates, *(arm for arm in arms if arm is not candidates[0]))


def _places(runs: Sequence[str | os.PathLike[str] | InFolder]) -> list[RunFolder]:
    """Resolve ``runs`` to folders of evaluated runs; trials of a sweep come with the name of their arm."""
    places = [run for run in runs if isinstance(run, RunFolder)]
    if len(places) < len(runs):
        places = find_run_folders([run if isinstance(run, str | os.PathLike) else run.folder for run in runs])
    return without_waiting_trials(places)


def _difference(arm: Arm, baseline: Arm) -> Difference:
    """Compare an arm with the baseline over the seeds that both have."""
    by_seed = {run.seed: run for run in baseline.runs}
    pairs = [(run, by_seed[run.seed]) for run in arm.runs if run.seed in by_seed]
    own_runs, base_runs = zip(*pairs, strict=True) if pairs else ((), ())
    # Shares of other questions, such as steps instead of whole answers, have no difference.
    ranked_alike = all(own_run.ranked == base_run.ranked for own_run, base_run in pairs)
    alike = [*RETRIEVAL_MEASURES] if ranked_alike else []
    over: dict[str, PairedT | None] = dict.fromkeys(MAP_MEASURES)
    for of_map, measures in MAP_MEASURES.items():
        own_records, base_records = ([run.fitted_on(of_map) for run in runs] for runs in (own_runs, base_runs))
        # A map that is fitted on more or other records, or by more fits, finds more, whatever the training was.
        if ranked_alike and own_records == base_records:
            alike += measures
        if ranked_alike and len({*base_records}) == 1:
            over[of_map] = _paired_t(own_runs, base_runs, HITS_AT_1, measures[0])
    retrieval = {name: _paired_t(own_runs, base_runs, name) for name in alike}
    own, base = (all_known(run.verdicts("headline") for run in runs) for runs in (own_runs, base_runs))
    judged = list(zip(own, base, strict=True)) if own and base else []
    tokens = [math.fsum(all_known(run.figures["tokens"] for run in runs)) for runs in (own_runs, base_runs)]
    ratios = _flops_ratios(pairs)
    is_equal = {
        "steps": bool(pairs) and all(own_run.steps == base_run.steps for own_run, base_run in pairs),
        "FLOPs": bool(ratios) and all(abs(ratio - 1) <= SAME_FLOPS for ratio in ratios),
    }
    return Difference(
        seeds=tuple(run.seed for run in own_runs),
        measures={name: _paired_t(own_runs, base_runs, name) for name in MEASURES},
        retrieval={name: test for name, test in retrieval.items() if test is not None},
        over_linear_map=over["linear_map"],
        over_projection_heads=over["projection_heads"],
        by_seed={run.seed: sign_flip([both]) for run, both in zip(own_runs, judged, strict=bool(judged))},
        by_example=sign_flip(judged) if judged else None,
        gained_lenient_before=_gained_lenient_before(judged, all_known(run.verdicts("lenient") for run in base_runs)),
        token_ratio=tokens[0] / tokens[1] if all(tokens) else None,
        flops_ratio=statistics.spread(ratios).mean if ratios else None,
        equal=tuple(budget for budget in EQUAL if is_equal[budget]),
    )


def _paired_t(
    own_runs: Sequence[EvaluatedRun], base_runs: Sequence[EvaluatedRun], measure: str, base_measure: str | None = None
) -> PairedT | None:
    """Test a measure over paired runs, by default against the same measure of the baseline; None if a run lacks it."""
    own = all_known(run.mean(measure) for run in own_runs)
    base = all_known(run.mean(base_measure or measure) for run in base_runs)
    return statistics.paired_t(own, base) if own and base else None


def _flops_ratios(pairs: Sequence[tuple[EvaluatedRun, EvaluatedRun]]) -> list[float]:
    """Return the training FLOPs of each run divided by those of its partner; empty if one of them is unknown."""
    flops = [(own_run.figures["flops"], base_run.figures["flops"]) for own_run, base_run in pairs]
    return all_known(own / base if own and base else None for own, base in flops)


def _gained_lenient_before(
    judged: Sequence[tuple[Sequence[bool], Sequence[bool]]], base_lenient: Sequence[Sequence[bool]]
) -> int | None:
    """Count the examples that an arm gained and that the baseline had right by the lenient score; None if unknown.

    Args:
        judged: for each seed the verdicts of the arm and of the baseline by the headline score.
        base_lenient: for each seed the verdicts of the baseline by the lenient score.
    """
    if not judged or not base_lenient:
        return None
    return sum(
        right and not base_right and lenient
        for (own, base), lenients in zip(judged, base_lenient, strict=True)
        for right, base_right, lenient in zip(own, base, lenients, strict=True)
    )


def _correct(differences: Sequence[Difference], p_name: str) -> None:
    """Set the Holm-corrected p values of both tests; the family is all arms.

    An arm whose differences don't vary has no p value, but is in the family with p = 1: whether it has one depends on
    the data, and the size of the family must not. An arm with one seed is not tested.
    """
    tested = [arm for arm in differences if (test := arm.measures["headline"]) is not None and test.n > 1]
    p_values = [getattr(arm.measures["headline"], p_name) for arm in tested]
    corrected = statistics.holm([1.0 if p is None else p for p in p_values])
    for arm, p, holm in zip(tested, p_values, corrected, strict=True):
        arm.holm = None if p is None else holm
    tested = [arm for arm in differences if arm.by_example is not None]
    corrected = statistics.holm([getattr(arm.by_example, p_name) for arm in tested])
    for arm, holm in zip(tested, corrected, strict=True):
        arm.by_example_holm = holm
