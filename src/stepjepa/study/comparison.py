"""Runs put together into arms, one for each method; every arm compared with the baseline; and what that shows."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa.base.errors import UserError
from stepjepa.study import statistics
from stepjepa.study.evaluated_run import MEASURES, EvaluatedRun, RunFolder, read_evaluated_run, refuse_different
from stepjepa.study.statistics import ExampleTest, PairedT, Spread

TAILS = {"one": "p_greater", "two": "p_two_sided"}
"""Which p is corrected, to the name that it has in the tests."""

EQUAL = ("steps", "FLOPs")
"""In what an arm may be equal to the baseline, and so be comparable with it: optimizer steps, compute of training."""

SAME_FLOPS = 0.02
"""Compute counts as equal within this share of the baseline's: a step is the smallest amount that can be added."""


@dataclass(frozen=True)
class Arm:
    """A method: runs that differ in nothing but their seeds, in the order of the seeds."""

    name: str
    settings: dict[str, Any]
    runs: tuple[EvaluatedRun, ...]

    def spread(self, what: str) -> Spread | None:
        """Mean and standard deviation over all seeds of one of ``MEASURES`` or ``FIGURES``; None if one is unknown."""
        known = _all_known(run.mean(what) for run in self.runs)
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
class Comparison:
    """Arms against a baseline."""

    scores: dict[str, str]  # the names of headline and lenient score
    test: dict[str, Any]  # task, test file, number of examples
    arms: tuple[Arm, ...]  # the baseline first, the others in the order in which their runs were named
    differences: dict[str, Difference]  # by name, of all arms but the baseline
    tails: str  # one or two, of the p that are corrected
    notes: tuple[str, ...]  # what a reader must know, one sentence each

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    def measure_names(self) -> dict[str, str]:
        """What to call each of ``MEASURES`` that some arm has; the lenient score only if it is not the headline."""
        names = {**self.scores, "stopped": "stop rate"}
        if names["lenient"] == names["headline"]:
            del names["lenient"]
        return {key: name for key, name in names.items() if any(arm.spread(key) is not None for arm in self.arms)}


def compare(
    folders: Sequence[str | os.PathLike[str] | RunFolder],
    *,
    evaluation: str | None = None,
    baseline: str | None = None,
    tails: str = "one",
) -> Comparison:
    """Compare evaluated runs.

    Args:
        folders: of the runs, in any order; arms are named by their sweep, or by what differs.
        evaluation: which one to take of each run; needed only where there are several.
        baseline: name of the arm to compare with; by default that of the sweep, or the regular one.
        tails: key of ``TAILS``.

    Raises:
        UserError: a folder is no evaluated run, or the runs can't be compared.
    """
    places = [each if isinstance(each, RunFolder) else RunFolder(Path(each)) for each in folders]
    runs = [read_evaluated_run(place.folder, evaluation) for place in places]
    refuse_different(runs)
    groups: dict[str, dict[str, EvaluatedRun]] = {}
    labels: dict[str, set[str | None]] = {}
    for place, run in zip(places, runs, strict=True):
        key = _json(run.settings)
        labels.setdefault(key, set()).add(place.arm)
        other = groups.setdefault(key, {}).setdefault(run.seed, run)
        if other is not run:
            fault = f"is of the same arm and seed ({run.seed}) as {other.folder}; leave one out"
            raise UserError(fault, path=run.folder)
    if len(groups) < 2:
        raise UserError("the runs differ in nothing but their seeds; add those of another arm to compare with")
    settings = [next(iter(group.values())).settings for group in groups.values()]
    names = [str(label) for each in labels.values() for label in each if label is not None]
    baselines = {place.arm for place in places if place.is_baseline}
    if len(names) != len(groups) or len(set(names)) < len(names) or len(baselines) != 1:
        # Outside of sweeps; or several sweeps use one name for different arms, or several names for one.
        names, baselines = _names(settings), {None}
    wanted = baseline or baselines.pop()
    arms = [
        Arm(name, each, tuple(sorted(group.values(), key=lambda run: [int(part) for part in run.seed.split("/")])))
        for name, each, group in zip(names, settings, groups.values(), strict=True)
    ]
    first = [arm for arm in arms if (arm.settings["mode"] == "regular" if wanted is None else arm.name == wanted)]
    if len(first) != 1:
        fault = f"no arm '{wanted}'" if wanted is not None else f"{len(first)} arms are regular"
        raise UserError(f"--baseline: {fault}; choose one of {'; '.join(names)}")
    ordered = (*first, *(arm for arm in arms if arm is not first[0]))
    differences = {arm.name: _difference(arm, first[0]) for arm in ordered[1:]}
    _correct(list(differences.values()), TAILS[tails])
    protocol = runs[0].protocol
    test = {
        "task": protocol["task"],
        "sha256": protocol["test file (sha256)"],
        "examples": protocol["number of examples"],
        "evaluation": ", ".join(sorted({run.evaluation for run in runs})),
    }
    scores = {name: protocol[name] for name in ("headline", "lenient")}
    return Comparison(scores, test, ordered, differences, tails, tuple(_notes(ordered, differences)))


def _all_known(values: Iterable[Any]) -> list[Any]:
    """The values; none where one of them is None."""
    found = list(values)
    return [] if None in found else found


def _difference(arm: Arm, baseline: Arm) -> Difference:
    theirs = {run.seed: run for run in baseline.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    measures: dict[str, PairedT | None] = {}
    for measure in MEASURES:
        ours, others = (_all_known(run.mean(measure) for run in side) for side in sides)
        measures[measure] = statistics.paired_t(ours, others) if ours and others else None
    ours, others = (_all_known(run.verdicts("headline") for run in side) for side in sides)
    judged = list(zip(ours, others, strict=True)) if ours and others else []
    lenient = _all_known(run.verdicts("lenient") for run in sides[1])
    tokens = [math.fsum(_all_known(run.figures["tokens"] for run in side)) for side in sides]
    flops = [(one.figures["flops"], two.figures["flops"]) for one, two in pairs]
    ratios = _all_known(one / two if one and two else None for one, two in flops)
    same = {
        "steps": bool(pairs) and all(one.steps == two.steps for one, two in pairs),
        "FLOPs": bool(ratios) and all(abs(ratio - 1) <= SAME_FLOPS for ratio in ratios),
    }
    return Difference(
        seeds=tuple(run.seed for run, _ in pairs),
        measures=measures,
        by_seed={run.seed: statistics.sign_flip([each]) for (run, _), each in zip(pairs, judged, strict=bool(judged))},
        by_example=statistics.sign_flip(judged) if judged else None,
        gained_lenient_before=sum(
            right and not wrong and easy
            for (one, two), before in zip(judged, lenient, strict=True)
            for right, wrong, easy in zip(one, two, before, strict=True)
        )
        if judged and lenient
        else None,
        token_ratio=tokens[0] / tokens[1] if all(tokens) else None,
        flops_ratio=statistics.spread(ratios).mean if ratios else None,
        equal=tuple(what for what in EQUAL if same[what]),
    )


def _correct(differences: Sequence[Difference], p_name: str) -> None:
    """Put in the p of both tests with Holm's correction over the arms.

    An arm whose differences don't vary has no p but counts as one of those tested, with a p of 1: whether it has one
    depends on the data, and the size of a family must not. An arm with one seed is not tested at all.
    """
    tested = [each for each in differences if (test := each.measures["headline"]) is not None and test.n > 1]
    found = [getattr(each.measures["headline"], p_name) for each in tested]
    for each, p, holm in zip(tested, found, statistics.holm([1.0 if p is None else p for p in found]), strict=True):
        each.holm = None if p is None else holm
    tested = [each for each in differences if each.by_example is not None]
    for each, holm in zip(tested, statistics.holm([getattr(each.by_example, p_name) for each in tested]), strict=True):
        each.by_example_holm = holm


def _names(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Short names of arms, no two of them equal: the mode, and what differs between arms that have it."""
    first = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")
    order = dict.fromkeys([*first, *(key for each in settings for key in each)])
    shown = [key for key in order if key == "mode" or len({_json(each[key]) for each in settings if key in each}) > 1]
    names = [" ".join(filter(None, (_part(key, each[key]) for key in shown if key in each))) for each in settings]
    # Of two equal names one arm lacks a setting, as those of an older version may.
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


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
    runs, baseline = [run for arm in arms for run in arm.runs], arms[0].name
    steps = {arm.name: " or ".join(f"{each:,}" for each in sorted({run.steps for run in arm.runs})) for arm in arms}
    yield f"optimizer steps: {'; '.join(f'{name} {each}' for name, each in steps.items())}"
    if not any("FLOPs" in found.equal for found in differences.values()):
        share = f"within {SAME_FLOPS:.0%} of {baseline}"
        yield f"nothing here is comparable at equal FLOPs ({share}); add runs trained with --same_flop"
    if max(run.mean("headline") or 0 for run in runs) < 0.01:
        yield "no run is right on 1% of the examples, so their differences say nothing yet; train longer"
    for arm in arms[1:]:
        alone = [each.seed for each in (*arm.runs, *arms[0].runs) if each.seed not in differences[arm.name].seeds]
        if alone:
            yield f"{arm.name} and {baseline} don't both have the seeds {', '.join(alone)}; skipped in the differences"
    facts = [_circumstances(run) for run in runs]
    for what in dict.fromkeys(name for each in facts for name in each):
        values = {each[what] for each in facts if what in each}
        if len(values) > 1:
            yield f"the runs differ in {what}: {', '.join(sorted(value[:60] for value in values))}"
    yield from (f"{run.folder}: {run.trained_on}" for run in runs if run.trained_on is not None)


def _circumstances(run: EvaluatedRun) -> dict[str, str]:
    """What should be equal but need not; older runs don't say all of it."""
    found = {f"version of {name}": version for name, version in run.versions.items() if name != "platform"}
    loaded = ("dtype", "chat_template", "attn_implementation")
    found |= {name: " ".join(str(run.loaded[name]).split()) for name in loaded if name in run.loaded}
    return found | ({} if run.views is None else {"views in matched and shuffled similarity": run.views})


def verdict(comparison: Comparison) -> str:
    """One sentence: what is better than the baseline (Holm's p of the headline below 0.05), and what could be shown."""
    score, base, tails = comparison.scores["headline"], comparison.baseline.name, comparison.tails
    tests = {name: found.measures["headline"] for name, found in comparison.differences.items()}
    better = {
        name: f"{name} by {100 * test.mean:+.2f} points [{100 * test.low:+.2f}, {100 * test.high:+.2f}] over {test.n} "
        f"seeds ({tails}-tailed Holm p {p:.4f})"
        for name, test in tests.items()
        if (p := comparison.differences[name].holm) is not None and p < 1 - statistics.LEVEL
        if test is not None and test.mean > 0 and test.low is not None and test.high is not None
    }
    parts = []
    for heading in (*EQUAL, None):
        # An arm with equal steps and equal FLOPs is in both groups.
        names = [name for name, found in comparison.differences.items() if heading in (found.equal or (None,))]
        where = f"at equal {heading}" if heading else "at neither equal steps nor FLOPs"
        found, what = " and ".join(better[name] for name in names if name in better), f"better than {base} in {score}"
        if names:
            parts.append(f"{where}, {what}: {found}" if found else f"{where}, no arm is shown to be {what}")
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
