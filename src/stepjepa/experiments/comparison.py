"""Runs put together into arms, one for each method, and every arm compared with the baseline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.arm_names import arm_names, json_text
from stepjepa.experiments.evaluated_run import MEASURES, EvaluatedRun, read_evaluated_run, refuse_different
from stepjepa.experiments.statistics import ExampleTest, PairedT, Spread, holm, mcnemar, paired_t, sign_flip, spread
from stepjepa.experiments.verdict import EQUAL, SAME_FLOPS, notes

TAILS = {"one": "p_greater", "two": "p_two_sided"}
"""Which p a correction is made of, to the name that it has in the tests."""


@dataclass(frozen=True)
class Arm:
    """A method: runs that differ in nothing but their seeds, in the order of the seeds."""

    name: str
    settings: dict[str, Any]
    runs: tuple[EvaluatedRun, ...]

    def spread(self, what: str) -> Spread | None:
        """Mean and standard deviation over all seeds of one of ``MEASURES`` or ``FIGURES``; None if one is unknown."""
        values = [run.mean(what) if what in MEASURES else run.figures[what] for run in self.runs]
        known = [value for value in values if value is not None]
        return spread(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline, over the seeds that both have.

    Attributes:
        seeds: those.
        measures: for each of ``MEASURES`` the test over seeds; None if it is unknown, or no seed is shared.
        holm: the p of the headline over seeds, corrected for the number of all arms; None without a test.
        by_seed: McNemar's test for each of the seeds; empty where the headline is not right or wrong.
        by_example: the test over examples; None where ``by_seed`` is empty.
        by_example_holm: its p, corrected.
        known: of the examples gained, those that the baseline had right by the lenient score; None where that is not
            right or wrong.
        tokens: the arm's mean tokens of training to those of the baseline, over the shared seeds.
        flops: the arm's compute of training to that of the baseline's run of the same seed, mean over the shared seeds;
            None if it is unknown of a run.
        equal: those of ``EQUAL`` that hold for every shared seed.
    """

    seeds: tuple[str, ...]
    measures: dict[str, PairedT | None]
    holm: float | None
    by_seed: dict[str, ExampleTest]
    by_example: ExampleTest | None
    by_example_holm: float | None
    known: int | None
    tokens: float | None
    flops: float | None
    equal: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Arms against a baseline.

    Attributes:
        scores: the names of headline and lenient score.
        test: task, test file, number of examples.
        arms: the baseline first, the others in the order in which their runs were named.
        differences: by name, of all arms but the baseline.
        tails: ``one`` or ``two``, of the p that are corrected.
        notes: what a reader must know, one sentence each.
    """

    scores: dict[str, str]
    test: dict[str, Any]
    arms: tuple[Arm, ...]
    differences: dict[str, Difference]
    tails: str
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Arm:
        """What the others are compared with."""
        return self.arms[0]


def compare(
    folders: Sequence[str | os.PathLike[str]],
    *,
    evaluation: str | None = None,
    names: Sequence[str] = (),
    baseline: str | None = None,
    tails: str = "one",
) -> Comparison:
    """Compare evaluated runs.

    Args:
        folders: of the runs, in any order.
        evaluation: which one to take of each run; needed only where there are several.
        names: of the arms, in the order in which ``folders`` first names a run of each; by default they are named by
            what differs between them.
        baseline: name of the arm to compare with; by default the regular one.
        tails: key of ``TAILS``.

    Raises:
        UserError: a folder is no evaluated run, the runs can't be compared, an arm has a seed twice, there is only one
            arm, or none or several of them may be the baseline.
    """
    return compare_runs(
        [read_evaluated_run(folder, evaluation) for folder in folders], names=names, baseline=baseline, tails=tails
    )


def compare_runs(
    runs: Sequence[EvaluatedRun], *, names: Sequence[str] = (), baseline: str | None = None, tails: str = "one"
) -> Comparison:
    """Compare runs that are read already; see :func:`compare`."""
    refuse_different(runs)
    arms = _arms(runs, names)
    first = _baseline(arms, baseline)
    ordered = (first, *(arm for arm in arms if arm is not first))
    differences = _corrected({arm.name: _difference(arm, first) for arm in ordered[1:]}, tails)
    protocol = runs[0].protocol
    return Comparison(
        {name: protocol[name] for name in ("headline", "lenient")},
        {
            "task": protocol["task"],
            "sha256": protocol["test file (sha256)"],
            "examples": protocol["number of examples"],
            "evaluation": ", ".join(sorted({run.evaluation for run in runs})),
        },
        ordered,
        differences,
        tails,
        tuple(notes(ordered, differences)),
    )


def _arms(runs: Sequence[EvaluatedRun], names: Sequence[str]) -> list[Arm]:
    groups: dict[str, list[EvaluatedRun]] = {}
    for run in runs:
        group = groups.setdefault(json_text(run.settings), [])
        for other in group:
            if other.seed == run.seed:
                raise UserError(
                    f"is of the same arm and seed ({run.seed}) as {other.folder}; leave one out", path=run.folder
                )
        group.append(run)
    settings = [group[0].settings for group in groups.values()]
    if len(settings) < 2:
        raise UserError("the runs differ in nothing but their seeds; add those of another arm to compare with")
    found = arm_names(settings)
    if names and len(names) != len(found):
        raise UserError(f"--names: {len(names)} for {len(found)} arms, which are in this order: {'; '.join(found)}")
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"--names: every arm needs a name of its own, got {', '.join(map(repr, names))}")
    return [
        Arm(name, group[0].settings, tuple(sorted(group, key=lambda run: _numbers(run.seed))))
        for name, group in zip(names or found, groups.values(), strict=True)
    ]


def _numbers(seed: str) -> tuple[int, ...]:
    return tuple(map(int, seed.split("/")))


def _baseline(arms: Sequence[Arm], name: str | None) -> Arm:
    listed = "; ".join(arm.name for arm in arms)
    if name is not None:
        for arm in arms:
            if arm.name == name:
                return arm
        raise UserError(f"--baseline: no arm '{name}'; choose one of {listed}")
    regular = [arm for arm in arms if arm.settings["mode"] == "regular"]
    if len(regular) == 1:
        return regular[0]
    found = "none of the arms is regular" if not regular else f"{len(regular)} arms are regular"
    raise UserError(f"{found}, so there is no telling what to compare with; pass --baseline with one of {listed}")


def _difference(arm: Arm, baseline: Arm) -> Difference:
    theirs = {run.seed: run for run in baseline.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    measures: dict[str, PairedT | None] = {}
    for measure in MEASURES:
        means = [(ours.mean(measure), other.mean(measure)) for ours, other in pairs]
        both = [(one, two) for one, two in means if one is not None and two is not None]
        complete = both and len(both) == len(pairs)
        measures[measure] = paired_t([one for one, _ in both], [two for _, two in both]) if complete else None
    verdicts = [(ours.verdicts("headline"), other.verdicts("headline")) for ours, other in pairs]
    judged = [(one, two) for one, two in verdicts if one is not None and two is not None]
    binary = bool(judged) and len(judged) == len(pairs)
    lenient = [other.verdicts("lenient") for _, other in pairs]
    spent = [sum(run.figures["tokens"] or 0 for run in side) for side in zip(*pairs, strict=True)]
    ratios = _flops_ratios(pairs)
    same = (
        bool(pairs) and all(ours.steps == other.steps for ours, other in pairs),
        bool(ratios) and all(abs(ratio - 1) <= SAME_FLOPS for ratio in ratios),
    )
    return Difference(
        tuple(run.seed for run, _ in pairs),
        measures,
        None,
        {run.seed: mcnemar(*pair) for (run, _), pair in zip(pairs, judged, strict=True)} if binary else {},
        sign_flip(judged) if binary else None,
        None,
        _known(judged, lenient) if binary else None,
        spent[0] / spent[1] if spent and spent[1] else None,
        spread(ratios).mean if ratios else None,
        tuple(what for what, holds in zip(EQUAL, same, strict=True) if holds),
    )


def _flops_ratios(pairs: Sequence[tuple[EvaluatedRun, EvaluatedRun]]) -> list[float]:
    """Compute to that of the baseline, for each pair; nothing if one is unknown."""
    both = [(ours.figures["flops"], other.figures["flops"]) for ours, other in pairs]
    found = [one / two for one, two in both if one and two]
    return found if len(found) == len(both) else []


def _known(pairs: Sequence[tuple[list[bool], list[bool]]], lenient: Sequence[list[bool] | None]) -> int | None:
    """How many of the examples gained the baseline had right by the lenient score."""
    count = 0
    for (ours, theirs), forgiving in zip(pairs, lenient, strict=True):
        if forgiving is None:
            return None
        count += sum(one and not two and easy for one, two, easy in zip(ours, theirs, forgiving, strict=True))
    return count


def _corrected(differences: dict[str, Difference], tails: str) -> dict[str, Difference]:
    """Both tests with Holm's correction over the arms.

    An arm whose differences don't vary has no p but counts as one of those tested, with a p of 1: whether it has one
    depends on the data, and the size of a family must not. An arm with one seed is not tested at all.
    """
    p_name = TAILS[tails]
    over_seeds, over_examples = {}, {}
    for name, found in differences.items():
        headline = found.measures["headline"]
        if headline is not None and headline.n > 1:
            over_seeds[name] = getattr(headline, p_name)
        if found.by_example is not None:
            over_examples[name] = getattr(found.by_example, p_name)
    by_seed = dict(zip(over_seeds, holm([1.0 if p is None else p for p in over_seeds.values()]), strict=True))
    by_example = dict(zip(over_examples, holm(list(over_examples.values())), strict=True))
    return {
        name: replace(
            found,
            holm=None if over_seeds.get(name) is None else by_seed[name],
            by_example_holm=by_example.get(name),
        )
        for name, found in differences.items()
    }
