"""Compare runs: group them into arms (methods), test each against the baseline, and show the outcome."""

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.study import statistics
from stepjepa.study.arms import EQUAL, SAME_FLOPS, TAILS, Arm, ComparedArms, Difference, KeptOut, all_known
from stepjepa.study.evaluated_run import (
    FIGURES,
    MEASURES,
    EvaluatedRun,
    RunFolder,
    find_run_folders,
    read_evaluated_run,
    refuse_different,
)
from stepjepa.study.plot import draw
from stepjepa.study.statistics import PairedT
from stepjepa.study.tables import as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Runs = Sequence[Any]
"""Run folders, folders of sweeps, or objects with a ``folder``, such as the ``Run`` of ``stepjepa.run``."""


@dataclass(frozen=True, repr=False)
class Comparison(ComparedArms):
    """Arms against a baseline, as :func:`compare` returns them.

    Attributes:
        verdict: what is better than the baseline, and how large a difference could have been shown.
        arms: the baseline first, the others in the order in which their runs were named.
        differences: of each arm but the baseline, by its name.
        notes: what a reader must know, one sentence each.
        kept_out: runs that are in no arm's statistics, with the reason.
    """

    def __repr__(self) -> str:
        return f"Comparison({', '.join(f'{arm.name}: {len(arm.runs)} runs' for arm in self.arms)}; {self.verdict})"

    def __str__(self) -> str:
        return as_text(self)

    @property
    def table(self) -> "DataFrame":
        """One row for each arm: means and standard deviations over seeds, and the difference from the baseline."""
        from pandas import DataFrame

        return DataFrame([self._row(arm) for arm in self.arms]).set_index("arm")

    def _row(self, arm: Arm) -> JsonObject:
        row: JsonObject = {"arm": arm.name, "seeds": len(arm.runs)}
        for key, name in self.measure_names().items():
            spread = arm.spread(key)
            row |= {name: spread and spread.mean, f"{name} std": spread and spread.std}
        row |= {name: spread and spread.mean for name in FIGURES for spread in (arm.spread(name),)}
        difference = self.differences.get(arm.name)
        test = difference and difference.measures["headline"]
        row["pairs"] = difference and len(difference.seeds)
        row |= {name: test and getattr(test, field) for name, field in _TEST_COLUMNS.items()}
        return row | {
            "p": test and getattr(test, TAILS[self.tails]),
            "Holm p": difference and difference.holm,
            "equal": difference and (", ".join(difference.equal) or "neither"),
        }

    def plot(self) -> "Figure":
        """Draw means with error bars, every seed as a point, and the baseline as a line."""
        return draw(self)

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"<p>{html.escape(self.verdict)}</p>{self.table.to_html(na_rep='')}<ul>{notes}</ul>"


_TEST_COLUMNS = {"difference": "mean", "low": "low", "high": "high"}


def compare(
    runs: Runs,
    *,
    evaluation: str | None = None,
    baseline: str | None = None,
    tails: str = "one",
    mixed_runs: bool = False,
) -> Comparison:
    """Compare evaluated runs: arms, which are runs that differ in nothing but their seeds, against a baseline.

    Args:
        runs: run folders, folders of sweeps, or runs of ``stepjepa.run``, in any order; arms are named by their sweep,
            or by what differs.
        evaluation: name of the evaluation to take of each run; needed only where there are several.
        baseline: name of the arm to compare with; by default that of the sweep, or the regular one.
        tails: ``one`` or ``two``: of the p that is corrected for the number of arms.
        mixed_runs: let runs into the statistics that were resumed with another optimizer, learning rate, schedule,
            weight decay, global batch, precision, data or objective.

    Returns:
        a :class:`Comparison` with ``.verdict``, ``.table`` (a DataFrame) and ``.plot()``.

    Raises:
        UserError: a folder is no evaluated run, or the runs can't be compared.

    Example:
        >>> stepjepa.compare(["runs/regular-3", "runs/step-3", "runs/regular-5", "runs/step-5"]).verdict
    """
    if tails not in TAILS:
        raise ValueError(f"tails: expected one of {', '.join(TAILS)}, got '{tails}'")
    places = _places(runs)
    read = [read_evaluated_run(place.folder, evaluation) for place in places]
    refuse_different(read)
    groups: dict[str, dict[str, EvaluatedRun]] = {}
    labels: dict[str, set[str | None]] = {}
    apart = [run for run in read if run.mixed and not mixed_runs]
    for place, run in zip(places, read, strict=True):
        if run.mixed and not mixed_runs:
            continue
        key = _json(run.settings)
        labels.setdefault(key, set()).add(place.arm)
        other = groups.setdefault(key, {}).setdefault(run.seed, run)
        if other is not run:
            fault = f"is of the same arm and seed ({run.seed}) as {other.folder}; leave one out"
            raise UserError(fault, path=run.folder)
    if len(groups) < 2:
        fault = "the runs differ in nothing but their seeds; add those of another arm to compare with"
        if apart:
            also = f"{apart[0].folder} is kept out ({apart[0].mixed[0]}); `mixed_runs` lets such runs in"
            fault = f"{fault}; {also}" if groups else also
        raise UserError(fault)
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
        raise UserError(f"`baseline`: {fault}; choose one of {'; '.join(names)}")
    ordered = (*first, *(arm for arm in arms if arm is not first[0]))
    differences = {arm.name: _difference(arm, first[0]) for arm in ordered[1:]}
    _correct(list(differences.values()), TAILS[tails])
    protocol = read[0].protocol
    test = {
        "task": protocol["task"],
        "sha256": protocol["test file (sha256)"],
        "examples": protocol["number of examples"],
        "evaluation": ", ".join(sorted({run.evaluation for run in read})),
    }
    scores = {name: protocol[name] for name in ("headline", "lenient")}
    by_settings = {_json(arm.settings): arm.name for arm in arms}
    kept_out = tuple(KeptOut(run, by_settings.get(_json(run.settings))) for run in apart)
    notes = (*_notes(ordered, differences), *_notes_on_launches(ordered, kept_out))
    return Comparison(scores, test, ordered, differences, tails, notes, kept_out)


def _places(runs: Runs) -> list[RunFolder]:
    """The run folders that are meant, with their arms where they are trials of a sweep."""
    if all(isinstance(run, RunFolder) for run in runs):
        return list(runs)
    folders: list[Any] = [getattr(run, "folder", run) for run in runs]
    return find_run_folders(folders)


def _difference(arm: Arm, baseline: Arm) -> Difference:
    theirs = {run.seed: run for run in baseline.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    measures: dict[str, PairedT | None] = {}
    for measure in MEASURES:
        ours, others = (all_known(run.mean(measure) for run in side) for side in sides)
        measures[measure] = statistics.paired_t(ours, others) if ours and others else None
    ours, others = (all_known(run.verdicts("headline") for run in side) for side in sides)
    judged = list(zip(ours, others, strict=True)) if ours and others else []
    lenient = all_known(run.verdicts("lenient") for run in sides[1])
    tokens = [math.fsum(all_known(run.figures["tokens"] for run in side)) for side in sides]
    flops = [(one.figures["flops"], two.figures["flops"]) for one, two in pairs]
    ratios = all_known(one / two if one and two else None for one, two in flops)
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


def _names(settings: Sequence[JsonObject]) -> list[str]:
    """Short names of arms, no two of them equal: the mode, and what differs between arms that have it."""
    first = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")
    order = dict.fromkeys([*first, *(key for each in settings for key in each)])
    shown = [key for key in order if key == "mode" or len({_json(each[key]) for each in settings if key in each}) > 1]
    names = [" ".join(filter(None, (_part(key, each[key]) for key in shown if key in each))) for each in settings]
    # Of two equal names one arm lacks a setting, as those of an older version may.
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _part(key: str, value: object) -> str:
    """``lbd=0.5``; what is plain without its name stands alone."""
    if isinstance(value, bool):
        return key if value else ""
    shown = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else _json(value)
    if key == "model":
        shown = Path(shown).name
    if not shown.strip() or shown != " ".join(shown.split()):
        shown = _json(shown)
    return shown if key in ("mode", "layout", "jepa_loss_type") else f"{'K' if key == 'predictors' else key}={shown}"


def _json(value: object) -> str:
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


def _notes_on_launches(arms: Sequence[Arm], kept_out: Sequence[KeptOut]) -> Iterator[str]:
    """In what launches of runs differ, beside the name of the arm."""
    for each in kept_out:
        name = f"{each.arm}: " if each.arm else ""
        reason = "; ".join(each.run.mixed)
        yield f"{name}{each.run.folder} (seed {each.run.seed}) is kept out: {reason}; --mixed_runs lets it in"
    for arm in arms:
        for run in arm.runs:
            for change in (*run.mixed, *run.noted):
                yield f"{arm.name}: {run.folder} (seed {run.seed}) was {change}"


def _circumstances(run: EvaluatedRun) -> dict[str, str]:
    """What should be equal but need not; older runs don't say all of it."""
    found = {f"version of {name}": version for name, version in run.versions.items() if name != "platform"}
    loaded = ("dtype", "chat_template", "attn_implementation")
    found |= {name: " ".join(str(run.loaded[name]).split()) for name in loaded if name in run.loaded}
    return found | ({} if run.views is None else {"views in matched and shuffled similarity": run.views})
