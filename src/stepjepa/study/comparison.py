"""Compare runs: group them into arms (methods), test each against the baseline, and show the outcome."""

import html
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepjepa.base.errors import UserError, did_you_mean
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, visible_lines
from stepjepa.store.fingerprint import equal_weights
from stepjepa.study import statistics
from stepjepa.study.arms import EQUAL, SAME_FLOPS, TAILS, Arm, ComparedArms, Difference, KeptOut, all_known
from stepjepa.study.comparable import check_comparable
from stepjepa.study.evaluated_run import (
    FIGURES,
    MEASURES,
    RETRIEVAL_MEASURES,
    SUMMARY,
    EvaluatedRun,
    RunFolder,
    find_run_folders,
    read_evaluated_run,
    run_names,
)
from stepjepa.study.plot import draw
from stepjepa.study.statistics import PairedT
from stepjepa.study.tables import as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


class InFolder(Protocol):
    """An object whose ``folder`` is a run folder, such as the ``Run`` of ``stepjepa.run``."""

    @property
    def folder(self) -> Path:
        """The run folder."""


Runs = Sequence[str | os.PathLike[str] | InFolder]
"""Run folders, folders of sweeps, or objects with a ``folder``, such as the ``Run`` of ``stepjepa.run``."""


@dataclass(frozen=True, repr=False)
class Comparison(ComparedArms):
    """Arms against a baseline, as :func:`compare` returns them.

    Attributes:
        verdict: the arms that are better than the baseline, and how large a difference these seeds can detect.
        arms: the baseline first, the others in the order in which their runs were named.
        differences: name of the arm -> its difference from the baseline (which has none).
        notes: caveats for the reader, one sentence each.
        kept_out: runs excluded from the statistics, with the reason.
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
        row |= {name: spread.mean for name in RETRIEVAL_MEASURES if (spread := arm.spread(name)) is not None}
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
    """Compare evaluated runs: group runs that differ only in their seeds into arms, and test each against a baseline.

    Args:
        runs: run folders, folders of sweeps, or runs of ``stepjepa.run``, in any order; arms are named by their sweep,
            or by what differs. If all are one run, trained several times, each is an arm, named by its folder.
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

    Example:
        >>> stepjepa.compare(["runs/regular-3", "runs/step-3", "runs/regular-5", "runs/step-5"]).verdict
    """
    if tails not in TAILS:
        raise ValueError(f"tails: expected one of {', '.join(TAILS)}, got '{tails}'")
    if not runs:
        raise ValueError("runs: expected run folders to compare, got none")
    places = _places(runs)
    evaluated = [read_evaluated_run(place.folder, evaluation) for place in places]
    check_comparable(evaluated)
    mixed = [run for run in evaluated if run.mixed and not mixed_runs]
    included = [(place, run) for place, run in zip(places, evaluated, strict=True) if run not in mixed]
    one_run = _one_run([run for _, run in included])
    if one_run is None:
        arms, named_baseline = _arms(included, mixed)
    else:
        names = run_names([run.folder for _, run in included])
        arms = [Arm(name, run.settings, (run,)) for name, (_, run) in zip(names, included, strict=True)]
        named_baseline = names[0]
    names, baseline_name = [arm.name for arm in arms], baseline or named_baseline
    candidates = [
        arm
        for arm in arms
        if (arm.settings["mode"] == "regular" if baseline_name is None else arm.name == baseline_name)
    ]
    if len(candidates) != 1:
        near = did_you_mean(baseline_name or "", names)
        fault = f"no arm '{baseline_name}'" if baseline_name is not None else f"{len(candidates)} arms are regular"
        raise UserError(f"`baseline`: {fault}; choose one of {'; '.join(names)}{near}")
    ordered = (*candidates, *(arm for arm in arms if arm is not candidates[0]))
    differences = {arm.name: _difference(arm, candidates[0]) for arm in ordered[1:]}
    _correct(list(differences.values()), TAILS[tails])
    protocol = evaluated[0].protocol
    test = {
        "task": protocol["task"],
        "sha256": protocol["test file (sha256)"],
        "examples": protocol["number of examples"],
        "evaluation": ", ".join(sorted({run.evaluation for run in evaluated})),
    }
    scores = {name: protocol[name] for name in ("headline", "lenient")}
    by_settings = {_json(arm.settings): arm.name for arm in arms}
    kept_out = tuple(KeptOut(run, by_settings.get(_json(run.settings))) for run in mixed)
    notes = [*_notes(ordered, differences), *_notes_on_launches(ordered, kept_out)]
    if one_run is None and not any("FLOPs" in difference.equal for difference in differences.values()):
        share = f"within {SAME_FLOPS:.0%} of {ordered[0].name}"
        notes.insert(1, f"nothing here is comparable at equal FLOPs ({share}); add runs trained with `same_flop`")
    return Comparison(scores, test, ordered, differences, tails, tuple(notes), kept_out, one_run)


def _one_run(runs: Sequence[EvaluatedRun]) -> str | None:
    """Describe runs that are one run trained several times, and whether its weights are equal; None for other runs."""
    if len(runs) < 2 or len({(_json(run.settings), run.seed) for run in runs}) > 1:
        return None
    equal = [equal_weights(runs[0].folder, run.folder) for run in runs[1:]]
    if False in equal:
        weights = "its trained weights differ"
    elif None in equal:
        weights = "its trained weights are not in every folder, so they are not compared"
    else:
        weights = "its trained weights are equal bit for bit"
    return f"these are one run, trained {len(runs)} times with the same settings, seed and data; {weights}"


def _arms(
    included: Sequence[tuple[RunFolder, EvaluatedRun]], mixed: Sequence[EvaluatedRun]
) -> tuple[list[Arm], str | None]:
    """Group runs that differ only in their seeds into arms; return them and the baseline that a sweep names.

    Raises:
        UserError: two runs are of the same arm and seed, or all are of one arm; the message names a run in ``mixed``.
    """
    groups: dict[str, dict[str, EvaluatedRun]] = {}
    labels: dict[str, set[str | None]] = {}
    for place, run in included:
        key = _json(run.settings)
        labels.setdefault(key, set()).add(place.arm)
        other = groups.setdefault(key, {}).setdefault(run.seed, run)
        if other is not run:
            fault = f"is of the same arm and seed ({run.seed}) as {other.folder}; leave one out, or compare these alone"
            raise UserError(fault, path=run.folder)
    if len(groups) < 2:
        fault = "the runs differ in nothing but their seeds; add those of another arm to compare with"
        if mixed:
            also = f"{mixed[0].folder} is kept out ({mixed[0].mixed[0]}); `mixed_runs` lets such runs in"
            fault = f"{fault}; {also}" if groups else also
        raise UserError(fault)
    settings = [next(iter(group.values())).settings for group in groups.values()]
    names = [str(label) for group_labels in labels.values() for label in group_labels if label is not None]
    baselines = {place.arm for place, _ in included if place.is_baseline}
    if len(names) != len(groups) or len(set(names)) < len(names) or len(baselines) != 1:
        # The runs are of no sweep, or of sweeps that name arms differently: derive the names from the settings.
        names, baselines = _names(settings), {None}
    arms = [
        Arm(name, own, tuple(sorted(group.values(), key=lambda run: [int(part) for part in run.seed.split("/")])))
        for name, own, group in zip(names, settings, groups.values(), strict=True)
    ]
    return arms, baselines.pop()


def _places(runs: Runs) -> list[RunFolder]:
    """Resolve ``runs`` to run folders; trials of a sweep come with the name of their arm.

    An unfinished sweep has trained runs without an evaluation: they are skipped, with a note. Runs named one by one
    must have one.
    """
    places = [run for run in runs if isinstance(run, RunFolder)]
    if len(places) < len(runs):
        places = find_run_folders([run if isinstance(run, str | os.PathLike) else run.folder for run in runs])
    waiting = [place for place in places if place.arm is not None and not any(place.folder.glob(f"*{SUMMARY}"))]
    if waiting:
        names = visible_lines(", ".join(str(place.folder) for place in waiting))
        note(f"{names}: not evaluated yet, skipped")
    if waiting and len(waiting) == len(places):
        raise UserError(
            "none of its runs is evaluated yet; continue the sweep by its command", path=waiting[0].folder.parents[1]
        )
    return [place for place in places if place not in waiting]


def _difference(arm: Arm, baseline: Arm) -> Difference:
    """Compare an arm with the baseline over the seeds that both have."""
    theirs = {run.seed: run for run in baseline.runs}
    pairs = [(run, theirs[run.seed]) for run in arm.runs if run.seed in theirs]
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    measures: dict[str, PairedT | None] = {}
    for measure in (*MEASURES, *RETRIEVAL_MEASURES):
        ours, others = (all_known(run.mean(measure) for run in side) for side in sides)
        measures[measure] = statistics.paired_t(ours, others) if ours and others else None
    retrieval = {name: test for name in RETRIEVAL_MEASURES if (test := measures.pop(name)) is not None}
    ours, others = (all_known(run.verdicts("headline") for run in side) for side in sides)
    judged = list(zip(ours, others, strict=True)) if ours and others else []
    lenient = all_known(run.verdicts("lenient") for run in sides[1])
    tokens = [math.fsum(all_known(run.figures["tokens"] for run in side)) for side in sides]
    flops = [(run.figures["flops"], base.figures["flops"]) for run, base in pairs]
    ratios = all_known(own / base if own and base else None for own, base in flops)
    same = {
        "steps": bool(pairs) and all(run.steps == base.steps for run, base in pairs),
        "FLOPs": bool(ratios) and all(abs(ratio - 1) <= SAME_FLOPS for ratio in ratios),
    }
    return Difference(
        seeds=tuple(run.seed for run, _ in pairs),
        measures=measures,
        retrieval=retrieval,
        by_seed={run.seed: statistics.sign_flip([both]) for (run, _), both in zip(pairs, judged, strict=bool(judged))},
        by_example=statistics.sign_flip(judged) if judged else None,
        gained_lenient_before=sum(
            right and not base_right and base_lenient
            for (own, base), lenient_base in zip(judged, lenient, strict=True)
            for right, base_right, base_lenient in zip(own, base, lenient_base, strict=True)
        )
        if judged and lenient
        else None,
        token_ratio=tokens[0] / tokens[1] if all(tokens) else None,
        flops_ratio=statistics.spread(ratios).mean if ratios else None,
        equal=tuple(budget for budget in EQUAL if same[budget]),
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


def _names(settings: Sequence[JsonObject]) -> list[str]:
    """Return unique short names of arms: the mode, and the settings that differ between arms."""
    first = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")
    order = dict.fromkeys([*first, *(key for arm in settings for key in arm)])
    keys = [key for key in order if key == "mode" or len({_json(arm[key]) for arm in settings if key in arm}) > 1]
    names = [" ".join(filter(None, (_part(key, arm[key]) for key in keys if key in arm))) for arm in settings]
    # Two names are equal if an arm of an older version did not record the setting that differs.
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _part(key: str, value: object) -> str:
    """Format one setting as ``lbd=0.5``; mode, layout and loss type without their key."""
    if isinstance(value, bool):
        return key if value else ""
    text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else _json(value)
    if key == "model":
        text = Path(text).name
    if not text.strip() or text != " ".join(text.split()):
        text = _json(text)
    return text if key in ("mode", "layout", "jepa_loss_type") else f"{'K' if key == 'predictors' else key}={text}"


def _json(value: object) -> str:
    """Serialise a value so that equal values give equal texts (keys are sorted)."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _notes(arms: Sequence[Arm], differences: dict[str, Difference]) -> Iterator[str]:
    """Yield the caveats of a comparison, one sentence each."""
    runs, baseline = [run for arm in arms for run in arm.runs], arms[0].name
    steps = {arm.name: " or ".join(f"{count:,}" for count in sorted({run.steps for run in arm.runs})) for arm in arms}
    yield f"optimizer steps: {'; '.join(f'{name} {counts}' for name, counts in steps.items())}"
    if max(run.mean("headline") or 0 for run in runs) < 0.01:
        yield "no run is right on 1% of the examples, so their differences say nothing yet; train longer"
    for arm in arms[1:]:
        unpaired = [run.seed for run in (*arm.runs, *arms[0].runs) if run.seed not in differences[arm.name].seeds]
        if unpaired:
            seeds = ", ".join(unpaired)
            yield f"{arm.name} and {baseline} don't both have the seeds {seeds}; skipped in the differences"
    facts = [_circumstances(run) for run in runs]
    for name in dict.fromkeys(name for run_facts in facts for name in run_facts):
        values = {run_facts[name] for run_facts in facts if name in run_facts}
        if len(values) > 1:
            yield f"the runs differ in {name}: {'; '.join(sorted(value[:60] for value in values))}"
    shares = dict.fromkeys(run.trained_on for run in runs if run.trained_on is not None)
    for share in shares:
        folders = [run.folder for run in runs if run.trained_on == share]
        names = "every run" if len(folders) == len(runs) else ", ".join(map(str, folders))
        yield f"{names}: {share}; what is right there may be learnt by heart"


def _notes_on_launches(arms: Sequence[Arm], kept_out: Sequence[KeptOut]) -> Iterator[str]:
    """Yield how the launches of runs differ: of runs that are left out, and of those in the statistics."""
    for excluded in kept_out:
        name = f"{excluded.arm}: " if excluded.arm else ""
        reason = "; ".join(excluded.run.mixed)
        yield f"{name}{excluded.run.folder} (seed {excluded.run.seed}) is kept out: {reason}; `mixed_runs` lets it in"
    for arm in arms:
        for run in arm.runs:
            for change in (*run.mixed, *run.noted):
                yield f"{arm.name}: {run.folder} (seed {run.seed}) was {change}"


def _circumstances(run: EvaluatedRun) -> dict[str, str]:
    """Return facts that should be equal but need not be: versions, loading, views; older runs lack some."""
    facts = {f"version of {name}": version for name, version in run.versions.items() if name != "platform"}
    loaded = ("dtype", "chat_template", "attn_implementation")
    facts |= {name: " ".join(str(run.loaded[name]).split()) for name in loaded if name in run.loaded}
    if run.readout is not None:
        facts["readout of retrieval"] = run.readout
    return facts | ({} if run.views is None else {"views in matched and shuffled similarity": run.views})
