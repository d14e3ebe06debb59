"""Resuming a run: check that its settings have not changed, and list allowed changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.base.files import json_or_empty
from stepjepa.base.json_object import JsonObject
from stepjepa.base.typed_json import to_json
from stepjepa.config.lora import LoraSettings
from stepjepa.config.option import options_of
from stepjepa.store.folder import CONFIG_FILE, RUN_FILE
from stepjepa.store.record import (
    Change,
    Fingerprints,
    Launch,
    RunRecord,
    Source,
    complete_objective,
    read_record,
    record_of,
)

INVARIANT = ("model", "jepa", "objective", "lora", "loaded", "data", "order")
"""Parts of the record that must not change when a run is resumed."""

FINGERPRINTED = {
    "records": "training records as tokens",
    "eval_records": "held-out records as tokens",
    "weights": "weights of the base model",
}
"""Fingerprints that must not change when a run is resumed, in words."""

SPELLED = {
    **{f"lora.{setting.name}": f"`{setting.flag}`" for setting in options_of(LoraSettings)},
    "model": "`model_name`",
    "jepa.terms": "`term`",
    "loaded.quantized": "`load_in_4bit` or `load_in_8bit`",
    "order.seed": "`finetune_seed`",
    "order.records_per_micro_step": "`batch_size` x processes",
    "order.gradient_accumulation_steps": "`grad_accum`",
}
"""Field of the record -> the setting as a user spells it, where the names differ."""

LAUNCH_SETTINGS = (
    *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("bf16", "fp16", "tf32", "neftune_noise_alpha", "ignore_data_skip", "load_best_model_at_end"),
)
"""Fields of ``TrainingArguments`` that a launch may change, and that affect the weights."""


class FinishedError(UserError):
    """The run to resume is already finished."""


def launch_settings(record: RunRecord) -> JsonObject:
    """Return the settings of a launch that affect the weights, by name."""
    if record.training is None:
        return {}
    training, values, processes = record.training, record.training.other, int(record.machine.get("processes") or 1)
    batch_size, grad_accum = values.get("per_device_train_batch_size"), values.get("gradient_accumulation_steps")
    recorded = {**values, "load_best_model_at_end": training.load_best_model_at_end}
    chooses = training.load_best_model_at_end or values.get("lr_scheduler_type") == "reduce_lr_on_plateau"
    return {
        **{name: recorded.get(name) for name in LAUNCH_SETTINGS},
        # Without either of them the metric has no effect on the weights.
        **{name: values.get(name) if chooses else None for name in ("metric_for_best_model", "greater_is_better")},
        "max_steps": training.max_steps,
        "num_train_epochs": training.num_train_epochs,
        "batch_size": batch_size,
        "grad_accum": grad_accum,
        "records_per_step": batch_size * grad_accum * processes if batch_size and grad_accum else None,
    }


def resumed_launches(
    folder: Path,
    checkpoint: str | None,
    now: RunRecord,
    *,
    allow_changes: bool,
    say: Callable[[str], None],
    refuse_finished: bool = True,
    steps_before: int | None = None,
) -> list[Launch]:
    """Return the launches of a resumed run; the last one is that of ``now``, with its changes.

    Args:
        folder: the run folder.
        checkpoint: the checkpoint to resume from, perhaps of another run, whose settings are then compared. None if the
            run was stopped before its first checkpoint: then it starts again.
        now: the record of the launch that begins.
        allow_changes: resume although the model, the data, their order or the objective have changed.
        say: is called with one line for each change.
        refuse_finished: raise an error for a finished run that would not become longer.
        steps_before: steps of earlier calls of ``train`` before those of the checkpoint; None if it does not say so.

    Raises:
        UserError: the model, the data, their order or the objective have changed.
        FinishedError: the run is finished.
    """
    *_, launch = now.launches
    in_run_folder = (folder / RUN_FILE).is_file()
    before = read_record(folder) if in_run_folder else record_of(checkpoint) if checkpoint else None
    if before is None:
        return [launch]
    changes = list(_invariant_changes(before, now))
    if changes and not allow_changes:
        texts = _as_spelled(changes, now)
        raise UserError(
            f"the run was begun with other settings ({'; '.join(texts)}); {_remedy(folder, texts)}, "
            "or name another `output_dir` (`allow_changes` resumes it anyway)",
            path=folder,
        )
    if refuse_finished and in_run_folder and before.status == "finished" and _length(before) == _length(now):
        raise FinishedError("the run is finished; there is nothing to resume", path=folder)
    if checkpoint is None:
        return [launch]
    before = replace(before, launches=_launches_until(before.launches, _steps_of(checkpoint), steps_before))
    *_, last = before.launches or [launch]
    if in_run_folder and last.is_further_call and not last.trained:
        fault = f"the call of train that began at step {last.from_step} had saved no checkpoint"
        say(f"{fault}: {Path(checkpoint).name} of the call before is resumed")
    changes += launch_changes(before, now)
    for change in changes:
        say(f"resumed with another {change}")
    if in_run_folder:
        return [*before.launches, replace(launch, changes=changes)]
    # The steps before are those of the other run, with its changes.
    inherited = [change for earlier in before.launches if earlier.trained for change in earlier.changes]
    return [replace(launch, changes=[*inherited, *changes])]


def _steps_of(checkpoint: str) -> int | None:
    """Return the number of steps after which a checkpoint was saved; None if it does not say so."""
    steps = json_or_empty(Path(checkpoint) / "trainer_state.json").get("global_step")
    return steps if isinstance(steps, int) else None


def _launches_until(launches: Sequence[Launch], steps: int | None, steps_before: int | None) -> list[Launch]:
    """Return the launches of a run, without the steps that a checkpoint lacks.

    A launch whose steps were all lost, since none of its checkpoints was saved, affects no weight of the run.

    Args:
        launches: those of the run record.
        steps: number of steps of the checkpoint, in its call of ``train``; None if it is not known.
        steps_before: steps of earlier calls; None if they are not known.
    """
    if steps is None or (steps_before is None and any(launch.is_further_call for launch in launches)):
        return [*launches]
    steps += steps_before or 0
    reached = [replace(launch, to_step=min(launch.to_step, steps)) for launch in launches]
    # The record may be older than the checkpoint, by a kill between the two.
    saved_by = max((at for at, launch in enumerate(launches) if (launch.from_step or 0) < steps), default=None)
    if saved_by is not None:
        reached[saved_by] = replace(reached[saved_by], to_step=steps)
    return reached


def _remedy(folder: Path, changes: Sequence[str]) -> str:
    """Return how a run is resumed with what it was begun with; ``changes`` are those of :func:`_as_spelled`.

    A configuration names the same files again, so it is no remedy for other contents.
    """
    config = folder / CONFIG_FILE
    take = f"`config {config}` with `output_dir {folder}` takes those" if config.is_file() else "take those"
    files = [change.removesuffix(_CONTENTS) for change in changes if change.endswith(_CONTENTS)]
    restore = f"bring back the earlier contents of {' and '.join(files)}"
    if not files:
        weights = FINGERPRINTED["weights"]
        return f"bring back the earlier {weights}" if changes == [weights] else take
    # Other contents are other tokens, too, and other weights of a preset, whose tokenizer is made of them.
    settings = [change for change in changes if not change.endswith(_CONTENTS) and change not in FINGERPRINTED.values()]
    return f"{restore}; {take.replace('those', 'the rest')}" if settings else restore


class _SpelledChange(NamedTuple):
    """A change for a message."""

    setting: str  # the setting that changed, as a user spells it
    text: str  # the setting with both values; or with :data:`_CONTENTS` where the record has only hashes of them


_CONTENTS = ": contents"


def _as_spelled(changes: Iterable[Change], now: RunRecord) -> list[str]:
    """Describe changes by the settings that a user spells, each setting once."""
    texts: dict[str, str] = {}
    for change in changes:
        setting, text = _spelled(change, now)
        # The names of two files say more than that their contents differ.
        if setting not in texts or not text.endswith(_CONTENTS):
            texts[setting] = text
    return list(texts.values())


def _spelled(change: Change, now: RunRecord) -> _SpelledChange:
    """Describe a change of a field of the record, ``part.field.key``, or of a fingerprint."""
    part, _, inner = change.name.partition(".")
    field, _, key = inner.partition(".")
    if change.name in FINGERPRINTED.values():
        return _SpelledChange(change.name, change.name)
    if part == "objective":
        return _SpelledChange("`objective`", "`objective`")
    if part == "data":
        return _spelled_data(change, field, key, now.data.get(field))
    setting = SPELLED.get(f"{part}.{field}" if field else part) or f"`{field or part}`"
    if (part, field) == ("loaded", "chat_template"):
        return _SpelledChange(setting, setting + _CONTENTS)
    if part == "lora" and None in (change.before, change.now):
        return _SpelledChange("`lora`", f"`lora`: {change.before is not None} -> {change.now is not None}")
    setting = " ".join(filter(None, (setting, key)))
    return _SpelledChange(setting, str(replace(change, name=setting)))


def _spelled_data(change: Change, part: str, key: str, source: Source | None) -> _SpelledChange:
    """Describe a change of the source of records; ``part`` and ``key`` as in :func:`_spelled`."""
    is_split = source is not None and source.eval_split is not None
    if is_split and key in ("eval_split", "split_by", "split_seed"):
        # A split that was recorded without this is one by record.
        absent = "record" if key == "split_by" else None
        before, after = (absent if value is None else value for value in (change.before, change.now))
        return _SpelledChange(f"`{key}`", str(Change(name=f"`{key}`", before=before, now=after)))
    setting = _data_setting(part, source)
    return _SpelledChange(setting, str(replace(change, name=setting)) if key == "file" else setting + _CONTENTS)


def _data_setting(part: str, source: Source | None) -> str:
    """Return the setting that names the records of a part: a file, several data sets, or an argument in Python."""
    if source is not None and source.file is None and part in ("train", "eval"):
        return f"`{part}_dataset`"
    return "`dataset`" if source is not None and "datasets" in source.other else f"`{part}_file`"


def _length(record: RunRecord) -> tuple[float | None, int | None]:
    training = record.training
    return (None, None) if training is None else (training.num_train_epochs, training.max_steps)


def _invariant_changes(before: RunRecord, now: RunRecord) -> Iterator[Change]:
    """Yield the changes of :data:`INVARIANT` parts and of fingerprints; parts that an old record lacks are skipped."""
    # A record of an earlier version lacks some options.
    complete = (
        record if record.jepa is None else replace(record, jepa=complete_objective(record.jepa))
        for record in (before, now)
    )
    old, new = map(to_json, complete)
    for part in INVARIANT:
        flat = [_flat(part, record.get(part)) for record in (old, new)]
        for name in flat[0] | flat[1]:
            first, second = (settings.get(name) for settings in flat)
            # Version 0.2.0 wrote no number where the weight of the router loss is the model's own.
            if first != second and not (name == "jepa.router_loss" and first is None):
                yield Change(name=name, before=first, now=second, mixed=True)
    fingerprints = [record.fingerprints or Fingerprints() for record in (before, now)]
    for attribute in fields(Fingerprints):
        first, second = (getattr(hashes, attribute.name) for hashes in fingerprints)
        if attribute.name in FINGERPRINTED and None not in (first, second) and first != second:
            yield Change(name=FINGERPRINTED[attribute.name], before=first, now=second, mixed=True)


def _flat(name: str, value: object) -> JsonObject:
    """Flatten a JSON value to one level of dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: leaf for inner, part in value.items() for key, leaf in _flat(f"{name}.{inner}", part).items()}


def launch_changes(before: RunRecord, now: RunRecord) -> list[Change]:
    """List the differences of the launch in ``now`` from the last one in ``before`` that trained a step."""
    *_, launch = now.launches
    trained = [earlier for earlier in before.launches if earlier.trained] or before.launches
    last = trained[-1] if trained and trained[-1].settings else None
    if last is None:
        # Version 0.2.0 recorded no launches: the settings of the last one are those of the record.
        last = Launch(settings=launch_settings(before), versions=before.versions, machine=before.machine)
    changes = [
        Change(name=name, before=last.settings[name], now=value, mixed=_mixed(name, launch, now))
        for name, value in launch.settings.items()
        if name in last.settings and last.settings[name] != value
    ]
    for kind, old, new in (("version", last.versions, launch.versions), ("machine", last.machine, launch.machine)):
        names = [name for name in new if name in old and old[name] != new[name]]
        changes += [Change(name=f"{name} ({kind})", before=old[name], now=new[name]) for name in names]
    return changes


def _mixed(name: str, launch: Launch, now: RunRecord) -> bool:
    """Return whether a change of a setting affects the weights."""
    if name in ("batch_size", "grad_accum"):
        # A step has the same records as long as the product with the number of processes is the same.
        return False
    if name not in ("max_steps", "num_train_epochs"):
        return True
    if name == "num_train_epochs" and (launch.settings.get("max_steps") or 0) > 0:
        return False
    # A longer run equals one that was as long from the start only if rate and term weights are constant.
    constant = launch.settings.get("lr_scheduler_type") == "constant"
    return not (constant and (now.jepa or {}).get("lbd_schedule", "constant") == "constant")
