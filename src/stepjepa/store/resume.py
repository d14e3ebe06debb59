"""The check that a run is resumed with the settings that it was begun with."""

from collections.abc import Callable
from pathlib import Path

from stepjepa.base.errors import UserError
from stepjepa.base.typed_json import to_json
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import Launch, RunRecord, read_record, record_of

INVARIANT = ("model", "jepa", "lora", "loaded", "data", "order")
"""Parts of the record that must not change when a run is resumed."""


class FinishedError(UserError):
    """The run to resume is already finished."""


def earlier_launches(
    folder: Path, checkpoint: str | None, now: RunRecord, *, allow_changes: bool, say: Callable[[str], None]
) -> list[Launch]:
    """The launches of a run that is being resumed, after a check that its settings are those of ``now``.

    The checkpoint may be that of another run, whose settings are compared then. With ``allow_changes`` a change is said
    on one line instead. Other settings, such as the learning rate, may change.
    """
    own = (folder / RUN_FILE).is_file()
    before = read_record(folder) if own else record_of(checkpoint) if checkpoint else None
    if before is None:
        return []
    old, new = to_json(before), to_json(now)
    for part in INVARIANT:
        if old[part] == new[part]:
            continue
        both = isinstance(old[part], dict) and isinstance(new[part], dict)
        inner = [key for key in new[part] if old[part].get(key) != new[part][key]] if both else []
        words = ", ".join([part, *inner[:1]])
        if not allow_changes:
            raise UserError(
                f"the run was begun with other settings ({words}); pass the flags of run.json, or another --output_dir "
                "(--allow_changes resumes it all the same)",
                path=folder,
            )
        say(f"resumed with other settings: {words}")
    if own and before.status == "finished" and _length(before) == _length(now):
        raise FinishedError("the run is finished; there is nothing to resume", path=folder)
    return before.launches if own else []


def _length(record: RunRecord) -> tuple[float | None, int | None]:
    training = record.training
    return (None, None) if training is None else (training.num_train_epochs, training.max_steps)
