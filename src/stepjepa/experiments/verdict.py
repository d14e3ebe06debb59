"""What a comparison shows, in one sentence; and notes on what a reader must know of its runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.experiments.evaluated_run import EvaluatedRun
from stepjepa.experiments.statistics import LEVEL, POWER, detectable

if TYPE_CHECKING:
    from stepjepa.experiments.comparison import Arm, Comparison, Difference

EQUAL = ("steps", "FLOPs")
"""In what an arm may be equal to the baseline, and so be comparable with it: optimizer steps, compute of training."""

SAME_FLOPS = 0.02
"""Compute counts as equal within this share of the baseline's: a step is the smallest amount that can be added."""

NOTHING_LEARNT = 0.01
"""Runs that are all right on less than this share of the examples have learnt too little to be compared."""


def notes(arms: Sequence[Arm], differences: dict[str, Difference]) -> Iterator[str]:
    """What a reader must know of the runs, one sentence each."""
    yield from _footing(arms, differences)
    means = [mean for arm in arms for run in arm.runs if (mean := run.mean("headline")) is not None]
    if means and max(means) < NOTHING_LEARNT:
        yield (
            f"no run is right on {NOTHING_LEARNT:.0%} of the examples, so their differences say nothing yet; train "
            "longer, or on more records"
        )
    baseline = arms[0]
    for arm in arms[1:]:
        found = differences[arm.name]
        for one, other in ((arm, baseline), (baseline, arm)):
            alone = [run.seed for run in one.runs if run.seed not in found.seeds]
            if alone:
                seeds = ", ".join(alone)
                yield f"{one.name}: {other.name} has no run with seed {seeds}; skipped in the differences"
        test = found.measures["headline"]
        if test is None:
            yield f"{arm.name}: no seed in common with {baseline.name}, so nothing is tested"
        elif test.n == 1:
            yield f"{arm.name}: one seed in common with {baseline.name}, so there is no t-test, only that by example"
        elif test.t is None:
            yield (
                f"{arm.name}: its differences from {baseline.name} are equal for all seeds, so there is no t-test; "
                "with scores this coarse, equal differences are no evidence"
            )
    yield from _doubts([run for arm in arms for run in arm.runs])


def _footing(arms: Sequence[Arm], differences: dict[str, Difference]) -> Iterator[str]:
    """What is equal between the arms, and how it could be."""
    steps = {arm.name: sorted({run.steps for run in arm.runs}) for arm in arms}
    counts = sorted({count for found in steps.values() for count in found})
    if len(counts) == 1:
        yield f"compared at equal steps ({counts[0]:,}); tokens and FLOPs of training differ as the tables say"
    else:
        said = "; ".join(f"{name} {' or '.join(f'{count:,}' for count in found)}" for name, found in steps.items())
        yield f"not all arms are compared at equal steps: {said}"
    if any(run.figures["flops"] is None for arm in arms for run in arm.runs):
        yield "FLOPs are not in all run folders (older versions did not count them), so less is said at equal FLOPs"
    if not any("FLOPs" in found.equal for found in differences.values()):
        yield (
            f"nothing here is comparable at equal FLOPs (within {SAME_FLOPS:.0%} of {arms[0].name}); add runs trained "
            "with --same_flop, for as many steps as spend the compute of regular"
        )


def _doubts(runs: Sequence[EvaluatedRun]) -> Iterator[str]:
    for package in dict.fromkeys(name for run in runs for name in run.versions if name != "platform"):
        found = sorted({run.versions.get(package, "unknown") for run in runs})
        if len(found) > 1:
            yield f"the runs were made with different versions of {package}: {', '.join(found)}"
    for what in ("dtype", "chat_template", "attn_implementation"):
        values = sorted({_shown(run.loaded[what]) for run in runs if what in run.loaded})
        if len(values) > 1:
            yield f"the runs were trained with different {what}: {', '.join(values)}; arms that differ in it say less"
    for run in runs:
        if run.trained_on is not None:
            yield f"{run.folder}: {run.trained_on}"
    models: dict[str, EvaluatedRun] = {}
    for run in runs:
        if run.model is not None:
            other = models.setdefault(run.model, run)
            if other is not run:
                yield f"the very same model was evaluated in {other.folder} and in {run.folder}; is that intended?"
    views = sorted({run.views for run in runs if run.views is not None})
    if len(views) > 1:
        yield f"matched and shuffled are of different views ({', '.join(views)}), so they can't be compared"


def _shown(value: Any) -> str:
    """A setting in a sentence; a template of many lines by its fingerprint."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
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
    score, base = comparison.scores["headline"], comparison.baseline.name
    tests = {name: found.measures["headline"] for name, found in comparison.differences.items()}
    parts = []
    for heading, names in groups(comparison).items():
        better = [name for name in names if _is_better(comparison.differences[name])]
        if better:
            found = " and ".join(f"{name} by {_points(comparison, name)}" for name in better)
            parts.append(f"at {heading}, better than {base} in {score}: {found}")
        else:
            parts.append(f"at {heading}, no arm is shown to be better than {base} in {score}")
    known = [test for test in tests.values() if test is not None and test.n > 1]
    sizes = [size for test in known if (size := detectable(test, comparison.tails, len(known))) is not None]
    if sizes:
        seeds = sorted({test.n for test in known})
        shown = f"{100 * min(sizes):.1f}" + ("" if len(sizes) == 1 else f" to {100 * max(sizes):.1f}")
        parts.append(
            f"{' or '.join(map(str, seeds))} seeds could have shown a difference of {shown} points (in {POWER:.0%} of "
            "cases)"
        )
    elif known:
        parts.append("differences that are equal for all seeds can't be tested")
    else:
        parts.append("without two seeds in common with the baseline nothing can be shown over seeds")
    return "; ".join(parts)


def _is_better(found: Difference) -> bool:
    test = found.measures["headline"]
    return test is not None and test.mean > 0 and found.holm is not None and found.holm < 1 - LEVEL


def _points(comparison: Comparison, name: str) -> str:
    found = comparison.differences[name]
    test = found.measures["headline"]
    if test is None or test.low is None or test.high is None:
        raise ValueError(f"expected a test of {name}, got none")
    ends = f"[{100 * test.low:+.2f}, {100 * test.high:+.2f}]"
    return (
        f"{100 * test.mean:+.2f} points {ends} over {test.n} seeds ({comparison.tails}-tailed Holm p {found.holm:.4f})"
    )
