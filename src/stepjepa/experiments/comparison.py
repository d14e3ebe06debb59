"""Runs put together into arms, one for each method; every arm compared with the baseline; and what that shows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError
from stepjepa.experiments.evaluated_run import (
    MEASURES,
    EvaluatedRun,
    RunFolder,
    read_evaluated_run,
    refuse_different,
)
from stepjepa.experiments.statistics import (
    LEVEL,
    POWER,
    ExampleTest,
    PairedT,
    Spread,
    detectable,
    holm,
    paired_t,
    sign_flip,
    spread,
)

TAILS = {"one": "p_greater", "two": "p_two_sided"}
"""Which p is corrected, to the name that it has in the tests."""

EQUAL = ("steps", "FLOPs")
"""In what an arm may be equal to the baseline, and so be comparable with it: optimizer steps, compute of training."""

SAME_FLOPS = 0.02
"""Compute counts as equal within this share of the baseline's: a step is the smallest amount that can be added."""

NOTHING_LEARNT = 0.01
"""Runs that are all right on less than this share of the examples have learnt too little to be compared."""


@dataclass(frozen=True)
class Arm:
    """A method: runs that differ in nothing but their seeds, in the order of the seeds."""

    name: str
    settings: dict[str, Any]
    runs: tuple[EvaluatedRun, ...]

    def spread(self, what: str) -> Spread | None:
        """Mean and standard deviation over all seeds of one of ``MEASURES`` or ``FIGURES``; None if one is unknown."""
        values = [run.mean(what) for run in self.runs]
        known = [value for value in values if value is not None]
        return spread(known) if len(known) == len(values) else None


@dataclass
class Difference:
    """An arm against the baseline, over the seeds that both have.

    Attributes:
        seeds: those.
        measures: for each of ``MEASURES`` the test over seeds; None if it is unknown, or no seed is shared.
        by_seed: McNemar's test for each of the seeds; empty where the headline is not right or wrong.
        by_example: the test over examples; None where ``by_seed`` is empty.
        gained_lenient_before: of the examples gained, those that the baseline had right by the lenient score; None
            where that is not right or wrong.
        token_ratio: the arm's mean tokens of training to those of the baseline.
        flops_ratio: the arm's compute of training to that of the baseline's run of the same seed, mean over the seeds;
            None if it is unknown of a run.
        equal: those of ``EQUAL`` that hold for every seed.
        holm: the p of the headline over seeds, corrected for the number of all arms; None without a test.
        by_example_holm: that of ``by_example``.
    """

    seeds: tuple[str, ...]
    measures: dict[str, PairedT | None]
    by_seed: dict[str, ExampleTest]
    by_example: ExampleTest | None
    gained_lenient_before: int | None
    token_ratio: float | None
    flops_ratio: float | None
    equal: tuple[str, ...]
    holm: float | None = None
    by_example_holm: float | None = None


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


def compare_folders(places: Sequence[RunFolder], baseline: str | None = None, **settings: Any) -> Comparison:
    """As :func:`compare`, under the names of the arms of the sweep that all the runs belong to, if there is one."""
    folders = [place.folder for place in places]
    names = list(dict.fromkeys(place.arm for place in places if place.arm is not None))
    baselines = {place.arm for place in places if place.is_baseline}
    if all(place.arm is not None for place in places) and len(baselines) == 1:
        # Fails where several sweeps use one name for different arms, or several names for one.
        with suppress(UserError):
            return compare(folders, names=names, baseline=baseline or baselines.pop(), **settings)
    return compare(folders, baseline=baseline, **settings)


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
    runs = [read_evaluated_run(folder, evaluation) for folder in folders]
    return compare_runs(runs, names=names, baseline=baseline, tails=tails)


def compare_runs(
    runs: Sequence[EvaluatedRun], *, names: Sequence[str] = (), baseline: str | None = None, tails: str = "one"
) -> Comparison:
    """Compare runs that are read already; see :func:`compare`."""
    refuse_different(runs)
    arms = _arms(runs, names)
    first = _baseline(arms, baseline)
    ordered = (first, *(arm for arm in arms if arm is not first))
    differences = {arm.name: _difference(arm, first) for arm in ordered[1:]}
    _correct(list(differences.values()), TAILS[tails])
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
        tuple(_notes(ordered, differences)),
    )


def _arms(runs: Sequence[EvaluatedRun], names: Sequence[str]) -> list[Arm]:
    groups: dict[str, dict[str, EvaluatedRun]] = {}
    for run in runs:
        group = groups.setdefault(_json(run.settings), {})
        other = group.setdefault(run.seed, run)
        if other is not run:
            raise UserError(
                f"is of the same arm and seed ({run.seed}) as {other.folder}; leave one out", path=run.folder
            )
    settings = [next(iter(group.values())).settings for group in groups.values()]
    if len(settings) < 2:
        raise UserError("the runs differ in nothing but their seeds; add those of another arm to compare with")
    found = _names(settings)
    if names and len(names) != len(found):
        raise UserError(f"--names: {len(names)} for {len(found)} arms, which are in this order: {'; '.join(found)}")
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"--names: every arm needs a name of its own, got {', '.join(map(repr, names))}")
    return [
        Arm(name, each, tuple(sorted(group.values(), key=lambda run: [int(part) for part in run.seed.split("/")])))
        for name, each, group in zip(names or found, settings, groups.values(), strict=True)
    ]


def _baseline(arms: Sequence[Arm], name: str | None) -> Arm:
    listed = "; ".join(arm.name for arm in arms)
    if name is not None:
        named = [arm for arm in arms if arm.name == name]
        if not named:
            raise UserError(f"--baseline: no arm '{name}'; choose one of {listed}")
        return named[0]
    regular = [arm for arm in arms if arm.settings["mode"] == "regular"]
    if len(regular) != 1:
        raise UserError(f"{len(regular)} arms are regular; pass --baseline with one of {listed}")
    return regular[0]


def _difference(arm: Arm, baseline: Arm) -> Difference:
    theirs = {run.seed: run for run in baseline.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    measures: dict[str, PairedT | None] = {}
    for measure in MEASURES:
        means = [(ours.mean(measure), other.mean(measure)) for ours, other in pairs]
        known = [(one, two) for one, two in means if one is not None and two is not None]
        measures[measure] = paired_t(*zip(*known, strict=True)) if known and len(known) == len(pairs) else None
    judged = [(ours.verdicts("headline"), other.verdicts("headline")) for ours, other in pairs]
    right = [(one, two) for one, two in judged if one is not None and two is not None]
    if len(right) < len(pairs):
        right = []
    lenient = [easy for _, other in pairs if (easy := other.verdicts("lenient")) is not None]
    before = None
    if right and len(lenient) == len(pairs):
        each = (zip(*both, easy, strict=True) for both, easy in zip(right, lenient, strict=True))
        before = sum(ours and not theirs and easy for examples in each for ours, theirs, easy in examples)
    tokens = [sum(run.figures["tokens"] or 0 for run in side) for side in zip(*pairs, strict=True)]
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
        by_seed={run.seed: sign_flip([each]) for (run, _), each in zip(pairs, right, strict=bool(right))},
        by_example=sign_flip(right) if right else None,
        gained_lenient_before=before,
        token_ratio=tokens[0] / tokens[1] if tokens and tokens[1] else None,
        flops_ratio=spread(ratios).mean if ratios else None,
        equal=tuple(what for what in EQUAL if same[what]),
    )


def _correct(differences: Sequence[Difference], p_name: str) -> None:
    """Put in the p of both tests with Holm's correction over the arms.

    An arm whose differences don't vary has no p but counts as one of those tested, with a p of 1: whether it has one
    depends on the data, and the size of a family must not. An arm with one seed is not tested at all.
    """
    tested = [each for each in differences if (test := each.measures["headline"]) is not None and test.n > 1]
    p_values = [getattr(each.measures["headline"], p_name) for each in tested]
    for each, p, corrected in zip(tested, p_values, holm([1.0 if p is None else p for p in p_values]), strict=True):
        each.holm = None if p is None else corrected
    tested = [each for each in differences if each.by_example is not None]
    for each, corrected in zip(tested, holm([getattr(each.by_example, p_name) for each in tested]), strict=True):
        each.by_example_holm = corrected


_FIRST = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")


def _names(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Short names of arms, no two of them equal: the mode, and what differs between arms that have it."""
    order = dict.fromkeys([*_FIRST, *(key for each in settings for key in each)])
    differing = [key for key in order if len({_json(each[key]) for each in settings if key in each}) > 1]
    shown = ["mode", *(key for key in differing if key != "mode")]
    names = [" ".join(filter(None, (_part(key, each[key]) for key in shown if key in each))) for each in settings]
    for place, each in enumerate(settings):
        if names.count(names[place]) > 1:
            # Of two such arms one lacks a setting, as those of an older version may.
            rare = [key for key in each if not all(key in other for other in settings)]
            names[place] = " ".join([names[place], *(f"{key}={_json(each[key])}" for key in rare)])
    return names


def _part(key: str, value: Any) -> str:
    """``lbd=0.5``; what is plain without its name stands alone."""
    if isinstance(value, bool):
        return key if value else ""
    shown = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else _json(value)
    if key == "model":
        shown = Path(shown).name
    if not shown.strip() or shown != " ".join(shown.split()):
        shown = _json(shown)
    return shown if key in ("mode", "layout", "jepa_loss_type") else f"{'K' if key == 'predictors' else key}={shown}"


def _json(value: Any) -> str:
    """One text for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _notes(arms: Sequence[Arm], differences: dict[str, Difference]) -> Iterator[str]:
    """What a reader must know of the runs, one sentence each."""
    runs, baseline = [run for arm in arms for run in arm.runs], arms[0]
    if len({run.steps for run in runs}) == 1:
        yield f"compared at equal steps ({runs[0].steps:,}); tokens and FLOPs of training differ as the tables say"
    else:
        steps = {arm.name: " or ".join(f"{each:,}" for each in sorted({run.steps for run in arm.runs})) for arm in arms}
        told = "; ".join(f"{name} {each}" for name, each in steps.items())
        yield f"not all arms are compared at equal steps: {told}"
    if any(run.figures["flops"] is None for run in runs):
        yield "FLOPs are not in all run folders (older versions did not count them), so less is said at equal FLOPs"
    if not any("FLOPs" in found.equal for found in differences.values()):
        yield (
            f"nothing here is comparable at equal FLOPs (within {SAME_FLOPS:.0%} of {baseline.name}); add runs trained "
            "with --same_flop, for as many steps as spend the compute of regular"
        )
    if max(run.mean("headline") or 0 for run in runs) < NOTHING_LEARNT:
        yield (
            f"no run is right on {NOTHING_LEARNT:.0%} of the examples, so their differences say nothing yet; train "
            "longer, or on more records"
        )
    for arm in arms[1:]:
        seeds, test = differences[arm.name].seeds, differences[arm.name].measures["headline"]
        for one, other in ((arm, baseline), (baseline, arm)):
            alone = ", ".join(run.seed for run in one.runs if run.seed not in seeds)
            if alone:
                yield f"{one.name}: {other.name} has no run with seed {alone}; skipped in the differences"
        if len(seeds) < 2:
            yield f"{arm.name}: {len(seeds)} seeds in common with {baseline.name}, so there is no t-test"
        elif test is not None and test.t is None:
            yield (
                f"{arm.name}: its differences from {baseline.name} are equal for all seeds, so there is no t-test; "
                "with scores this coarse, equal differences are no evidence"
            )
    yield from _doubts(runs)


def _doubts(runs: Sequence[EvaluatedRun]) -> Iterator[str]:
    packages = dict.fromkeys(name for run in runs for name in run.versions if name != "platform")
    made = {f"version of {name}": [run.versions.get(name, "unknown") for run in runs] for name in packages}
    for name in ("dtype", "chat_template", "attn_implementation"):
        made[name] = [_shown(run.loaded[name]) for run in runs if name in run.loaded]
    made["views in matched and shuffled similarity"] = [run.views for run in runs if run.views is not None]
    for what, values in made.items():
        if len(set(values)) > 1:
            yield f"the runs differ in {what}: {', '.join(sorted(set(values)))}"
    models: dict[str, EvaluatedRun] = {}
    for run in runs:
        if run.trained_on is not None:
            yield f"{run.folder}: {run.trained_on}"
        if run.model is not None and (other := models.setdefault(run.model, run)) is not run:
            yield f"the very same model was evaluated in {other.folder} and in {run.folder}; is that intended?"


def _shown(value: Any) -> str:
    """A setting in a sentence; a template of many lines by its fingerprint."""
    text = value if isinstance(value, str) else _json(value)
    return text if len(text) <= 40 and text.isprintable() else hashlib.sha256(text.encode()).hexdigest()[:12]


def groups(comparison: Comparison) -> dict[str, list[str]]:
    """The arms by what is equal between them and the baseline: ``equal steps``, ``equal FLOPs``, or neither.

    An arm with equal steps and equal FLOPs is in both groups. Empty groups are omitted.
    """
    found = {
        f"equal {what}": [name for name, each in comparison.differences.items() if what in each.equal] for what in EQUAL
    }
    found["neither equal steps nor FLOPs"] = [name for name, each in comparison.differences.items() if not each.equal]
    return {heading: names for heading, names in found.items() if names}


def verdict(comparison: Comparison) -> str:
    """One sentence: what is better than the baseline over seeds, by how much, at equal steps or at equal FLOPs.

    Better means that the p of the headline, corrected by Holm, is below 0.05. Where nothing is, the sentence says so,
    and how large a difference these seeds could have shown.
    """
    score, base, tails = comparison.scores["headline"], comparison.baseline.name, comparison.tails
    tests = {name: found.measures["headline"] for name, found in comparison.differences.items()}
    better = {
        name: f"{name} by {100 * test.mean:+.2f} points [{100 * test.low:+.2f}, {100 * test.high:+.2f}] over {test.n} "
        f"seeds ({tails}-tailed Holm p {p:.4f})"
        for name, test in tests.items()
        if (p := comparison.differences[name].holm) is not None and p < 1 - LEVEL
        if test is not None and test.mean > 0 and test.low is not None and test.high is not None
    }
    parts = []
    for heading, names in groups(comparison).items():
        found = " and ".join(better[name] for name in names if name in better)
        said = (
            f"better than {base} in {score}: {found}"
            if found
            else f"no arm is shown to be better than {base} in {score}"
        )
        parts.append(f"at {heading}, {said}")
    known = [test for test in tests.values() if test is not None and test.n > 1]
    sizes = [100 * size for test in known if (size := detectable(test, tails, len(known))) is not None]
    if sizes:
        seeds = " or ".join(map(str, sorted({test.n for test in known})))
        size = f"{min(sizes):.1f}" + (f" to {max(sizes):.1f}" if len(sizes) > 1 else "")
        parts.append(f"{seeds} seeds could have shown a difference of {size} points (in {POWER:.0%} of cases)")
    elif known:
        parts.append("differences that are equal for all seeds can't be tested")
    else:
        parts.append("without two seeds in common with the baseline nothing can be shown over seeds")
    return "; ".join(parts)
