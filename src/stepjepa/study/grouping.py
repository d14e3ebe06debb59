"""Group runs into arms, by their settings or as one run that was trained several times, and name the arms."""

import json
from collections.abc import Sequence
from pathlib import Path

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.store.fingerprint import equal_weights
from stepjepa.study.arms import Arm
from stepjepa.study.evaluated_run import LOADING, EvaluatedRun
from stepjepa.study.run_folders import RunFolder, run_names


def settings_key(settings: object) -> str:
    """Return a text that is equal for equal settings in any order."""
    return json.dumps(settings, sort_keys=True, ensure_ascii=False)


def describe_one_run(included: Sequence[tuple[RunFolder, EvaluatedRun]]) -> str | None:
    """Describe runs that are one run trained several times, and whether its weights are equal; None for other runs."""
    runs = [run for _, run in included]
    if len(runs) < 2 or len({*zip(_arm_keys(included), (run.seed for run in runs), strict=True)}) > 1:
        return None
    equal = [equal_weights(runs[0].folder, run.folder) for run in runs[1:]]
    if False in equal:
        weights = "its trained weights differ"
    elif None in equal:
        weights = "its trained weights are not in every folder, so they are not compared"
    else:
        weights = "its trained weights are equal bit for bit"
    loading = [name for name in LOADING if len({str(run.loaded[name]) for run in runs if name in run.loaded}) > 1]
    same = "the same settings, seed and data" + "".join(f", but another `{name}`" for name in loading)
    return f"these are one run, trained {len(runs)} times with {same}; {weights}"


def _arm_keys(included: Sequence[tuple[RunFolder, EvaluatedRun]]) -> list[str]:
    """Return for each run a text that is equal for runs of one arm: its settings.

    Arms of one sweep with equal settings stay apart, by their names: they differ in how the model was loaded
    (``dtype``, a chat template), which is no setting of an arm, or in what leaves the weights alone.
    """
    keys = [settings_key(run.settings) for _, run in included]
    names: dict[tuple[Path, str], set[str]] = {}
    for (place, _), key in zip(included, keys, strict=True):
        if place.arm is not None:
            names.setdefault((place.folder.resolve().parents[1], key), set()).add(place.arm)
    shared = {key for (_, key), arms in names.items() if len(arms) > 1}
    return [f"{key} {place.arm}" if key in shared else key for (place, _), key in zip(included, keys, strict=True)]


def one_arm_each(runs: Sequence[EvaluatedRun]) -> list[Arm]:
    """Return an arm for each run, named by its folder."""
    names = run_names([run.folder for run in runs])
    return [Arm(name, run.settings, (run,)) for name, run in zip(names, runs, strict=True)]


def group_by_settings(
    included: Sequence[tuple[RunFolder, EvaluatedRun]], mixed: Sequence[EvaluatedRun], missing: Sequence[str] = ()
) -> tuple[list[Arm], str | None]:
    """Group runs that differ only in their seeds into arms.

    Args:
        included: the runs in the statistics, with their folders.
        mixed: the runs that are left out, for the error.
        missing: sentences on trials that are not finished, for the error.

    Returns:
        The arms, and the name of the baseline; None unless the sweeps name one, whose lists of values give one arm.

    Raises:
        UserError: two runs are of the same arm and seed, or all are of one arm; the message names a run in ``mixed``.
    """
    groups: dict[str, dict[str, EvaluatedRun]] = {}
    labels: dict[str, set[str | None]] = {}
    for key, (place, run) in zip(_arm_keys(included), included, strict=True):
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
        fault = "; ".join([fault, *missing])
        raise UserError(fault)
    settings = [next(iter(group.values())).settings for group in groups.values()]
    names = [str(label) for group_labels in labels.values() for label in group_labels if label is not None]
    baselines = {place.arm for place, _ in included if place.is_baseline}
    if len(names) != len(groups) or len(set(names)) < len(names):
        # The runs belong to no sweep, or to sweeps that name arms differently: derive the names from the settings.
        names, baselines = _names(settings), set()
    arms = [
        Arm(name, own, tuple(sorted(group.values(), key=lambda run: [int(part) for part in run.seed.split("/")])))
        for name, own, group in zip(names, settings, groups.values(), strict=True)
    ]
    return arms, baselines.pop() if len(baselines) == 1 else None


def _names(settings: Sequence[JsonObject]) -> list[str]:
    """Return unique short names of arms: the mode, and the settings that differ between arms."""
    first = ("mode", "layout", "predictors", "lbd", "jepa_loss_type", "lora", "lora_rank")
    order = dict.fromkeys([*first, *(key for arm in settings for key in arm)])
    keys = [
        key for key in order if key == "mode" or len({settings_key(arm[key]) for arm in settings if key in arm}) > 1
    ]
    names = [" ".join(filter(None, (_part(key, arm[key]) for key in keys if key in arm))) for arm in settings]
    # Two names are equal if an arm of an older version did not record the setting that differs.
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _part(key: str, value: object) -> str:
    """Format one setting as ``lbd=0.5``; mode, layout and loss type without their key."""
    if isinstance(value, bool):
        return key if value else ""
    text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else settings_key(value)
    if key == "model":
        text = Path(text).name
    if not text.strip() or text != " ".join(text.split()):
        text = settings_key(text)
    return text if key in ("mode", "layout", "jepa_loss_type") else f"{'K' if key == 'predictors' else key}={text}"
