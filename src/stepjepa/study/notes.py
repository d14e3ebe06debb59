"""Caveats of a comparison, one sentence each: differences between its runs other than their settings."""

from collections.abc import Iterator, Sequence

from stepjepa.study.arms import Arm, Difference, KeptOut
from stepjepa.study.evaluated_run import LOADING, EvaluatedRun, readouts


def notes_on_runs(arms: Sequence[Arm], differences: dict[str, Difference]) -> Iterator[str]:
    """Yield the caveats of a comparison, one sentence each.

    Args:
        arms: the baseline first.
        differences: name of each other arm -> its difference from the baseline.
    """
    runs, baseline = [run for arm in arms for run in arm.runs], arms[0].name
    steps = {arm.name: " or ".join(f"{count:,}" for count in sorted({run.steps for run in arm.runs})) for arm in arms}
    yield f"optimizer steps: {'; '.join(f'{name} {counts}' for name, counts in steps.items())}"
    if max(run.mean("headline") or 0 for run in runs) < 0.01:
        yield "no run is right on 1% of the examples, so their differences say nothing yet; train longer"
    for arm in arms[1:]:
        unpaired = [run.seed for run in (*arm.runs, *arms[0].runs) if run.seed not in differences[arm.name].seeds]
        if unpaired:
            seeds = f"seed{'s' * (len(unpaired) > 1)} {', '.join(unpaired)}"
            yield f"{arm.name} and {baseline} don't both have the {seeds}; skipped in the differences"
    # Within a seed such arms are refused; the texts do not depend on the seed of training.
    if of_other_texts := [arm.name for arm in arms if len({run.fingerprints.texts for run in arm.runs} - {None}) > 1]:
        fault = "differ in more than their seed: in training texts, by columns, template, records or order"
        yield f"the runs of {' and of '.join(of_other_texts)} {fault}"
    facts = [_circumstances(run) for run in runs]
    for name in dict.fromkeys(name for run_facts in facts for name in run_facts):
        values = {run_facts[name] for run_facts in facts if name in run_facts}
        if len(values) > 1:
            yield f"the runs differ in {name}: {'; '.join(sorted(value[:60] for value in values))}"
    # Arms with views and arms without them are read at different places anyway; the table of retrieval says where.
    for has_views, kind in readouts(runs).items():
        if len(kind) > 1:
            arms_of_kind = "arms with views" if has_views else "arms without views"
            yield f"the {arms_of_kind} differ in readout of retrieval: {'; '.join(sorted(kind))}"
    if described := _different(arms, "ranked"):
        yield f"retrieval did not rank the same in all runs; where it did not, no difference is given: {described}"
    for fact, fitted in {
        "map_records": "the linear maps are not fitted on the same records, in the same places, by the same fits,",
        "head_records": "the projection heads are not trained on the same records, in the same places,",
    }.items():
        if described := _different(arms, fact):
            remedy = "no difference is given until they are evaluated again, with `overwrite`"
            yield f"{fitted} in all runs; where they are not, {remedy}: {described}"
    shares = dict.fromkeys(run.trained_on for run in runs if run.trained_on is not None)
    for share in shares:
        folders = [run.folder for run in runs if run.trained_on == share]
        names = "every run" if len(folders) == len(runs) else ", ".join(map(str, folders))
        yield f"{names}: {share}; what is right there may be learnt by heart"


def _different(arms: Sequence[Arm], fact: str) -> str | None:
    """Describe a fact of each arm's runs where it differs between runs that have it; None where it does not."""
    texts = {arm.name: [*dict.fromkeys(filter(None, (getattr(run, fact) for run in arm.runs)))] for arm in arms}
    if len({text for own in texts.values() for text in own}) < 2:
        return None
    return "; ".join(f"{name} {' or '.join(own)}" for name, own in texts.items() if own)


def notes_on_launches(arms: Sequence[Arm], kept_out: Sequence[KeptOut]) -> Iterator[str]:
    """Yield the differences between the launches of each run, one sentence each.

    Args:
        arms: the arms, with the runs in the statistics.
        kept_out: the runs that are not in the statistics.
    """
    for excluded in kept_out:
        name, run = f"{excluded.arm}: " if excluded.arm else "", excluded.run
        yield f"{name}{run.folder} (seed {run.seed}) is kept out: {'; '.join(run.mixed)}; `mixed_runs` lets it in"
    for arm in arms:
        for run in arm.runs:
            for change in (*run.mixed, *run.noted):
                yield f"{arm.name}: {run.folder} (seed {run.seed}) was {change}"


def _circumstances(run: EvaluatedRun) -> dict[str, str]:
    """Return facts that should be equal but need not be: versions, loading, views; older runs lack some."""
    facts = {f"version of {name}": version for name, version in run.versions.items() if name != "platform"}
    facts |= {name: " ".join(str(run.loaded[name]).split()) for name in LOADING if name in run.loaded}
    return facts | ({} if run.views is None else {"views in matched and shuffled similarity": run.views})
