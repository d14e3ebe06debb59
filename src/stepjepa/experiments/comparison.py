"""Runs put together into arms, one for each method; every arm compared with the baseline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.evaluated_run import MEASURES, EvaluatedRun, read_evaluated_run, refuse_different
from stepjepa.experiments.statistics import ExampleTest, PairedT, Spread, holm, paired_t, sign_flip, spread
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
        known = [(one, two) for one, two in means if one is not None and two is not None]
        measures[measure] = paired_t(*zip(*known, strict=True)) if known and len(known) == len(pairs) else None
    judged = _verdicts(pairs, "headline")
    forgiving = [other.verdicts("lenient") for _, other in pairs]
    tokens = [[run.figures["tokens"] or 0 for run in side] for side in zip(*pairs, strict=True)]
    flops = [(ours.figures["flops"], other.figures["flops"]) for ours, other in pairs]
    ratios = [one / two for one, two in flops if one and two]
    ratios = ratios if len(ratios) == len(pairs) else []
    same = {
        "steps": bool(pairs) and all(ours.steps == other.steps for ours, other in pairs),
        "FLOPs": bool(ratios) and all(abs(ratio - 1) <= SAME_FLOPS for ratio in ratios),
    }
    return Difference(
        seeds=tuple(run.seed for run, _ in pairs),
        measures=measures,
        holm=None,
        by_seed={run.seed: sign_flip([pair]) for (run, _), pair in zip(pairs, judged, strict=bool(judged))},
        by_example=sign_flip(judged) if judged else None,
        by_example_holm=None,
        known=_gained_before(judged, forgiving) if judged else None,
        tokens=sum(tokens[0]) / sum(tokens[1]) if tokens and sum(tokens[1]) else None,
        flops=spread(ratios).mean if ratios else None,
        equal=tuple(what for what in EQUAL if same[what]),
    )


def _verdicts(pairs: Sequence[tuple[EvaluatedRun, EvaluatedRun]], score: str) -> list[tuple[list[bool], list[bool]]]:
    """Right or wrong, for each pair of runs and each example; nothing if a score is neither."""
    found = [(ours.verdicts(score), other.verdicts(score)) for ours, other in pairs]
    known = [(one, two) for one, two in found if one is not None and two is not None]
    return known if len(known) == len(pairs) else []


def _gained_before(judged: Sequence[tuple[list[bool], list[bool]]], lenient: Sequence[list[bool] | None]) -> int | None:
    """How many of the examples gained the baseline had right by the lenient score."""
    known = [each for each in lenient if each is not None]
    if len(known) < len(lenient):
        return None
    return sum(
        one and not two and easy
        for (ours, theirs), forgiving in zip(judged, known, strict=True)
        for one, two, easy in zip(ours, theirs, forgiving, strict=True)
    )


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


# What is plain without its name, and what has a shorter one.
_BARE = ("mode", "layout", "jepa_loss_type")
_SHORT = {"predictors": "K"}
_FIRST = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")


def arm_names(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Short names: the mode, and what differs between arms that have it.

    Args:
        settings: of arms, no two of them equal.

    Returns:
        One name each, no two of them equal.
    """
    order = dict.fromkeys([*_FIRST, *(key for each in settings for key in each)])
    values = {key: {json_text(each[key]) for each in settings if key in each} for key in order}
    differing = [key for key in order if key == "mode" or len(values[key]) > 1]
    names = [" ".join(filter(None, (_part(key, each[key]) for key in differing if key in each))) for each in settings]
    for place, name in enumerate(names):
        if names.count(name) > 1:
            # Of two such arms one lacks a setting, as those of an older version may.
            rare = [key for key in order if not all(key in each for each in settings) and key in settings[place]]
            names[place] = " ".join([name, *(f"{key}={json_text(settings[place][key])}" for key in rare)])
    return names


def _part(key: str, value: Any) -> str:
    if value is False:
        return ""
    if value is True:
        return key
    if key == "model":
        value = Path(value).name
    shown = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json_text(value)
    if not shown.strip() or shown != " ".join(shown.split()):
        shown = json_text(shown)
    return shown if key in _BARE else f"{_SHORT.get(key, key)}={shown}"


def json_text(value: Any) -> str:
    """One text for equal settings, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
