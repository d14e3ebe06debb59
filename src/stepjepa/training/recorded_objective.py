"""The objective of a training as ``run.json`` has it, also beside a model that is saved outside of the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.config.jepa import JepaConfig
from stepjepa.store.environment import versions
from stepjepa.store.folder import RUN_FILE, run_folder_of
from stepjepa.store.record import RunRecord, read_record

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from stepjepa.batch.dataset import Prepared
    from stepjepa.training.passed_names import PassedNames


class _Objective(Protocol):
    """The part of an ``Objective`` that a record has."""

    @property
    def terms(self) -> Mapping[str, Any]: ...

    @property
    def names(self) -> Iterable[str]: ...


class RecordedTrainer(Protocol):
    """Attributes of a ``JepaTrainer`` that the record of its objective is made of."""

    args: TrainingArguments
    jepa: JepaConfig
    passed: PassedNames
    prepared: Prepared | None

    @property
    def objective(self) -> _Objective: ...


def jepa_as_trained(trainer: RecordedTrainer) -> JsonObject:
    """Return the settings of the objective, with the weight of the router loss that is used as a number."""
    settings, router = trainer.jepa.to_dict(), trainer.objective.terms.get("router_loss")
    return settings | ({} if router is None else {"router_loss": router.weight})


def record_elsewhere(trainer: RecordedTrainer, folder: Path) -> RunRecord | None:
    """Return the record to write beside a model in ``folder``; None if a run's own is there, as in the run folder.

    Raises:
        UserError: another run was trained in the folder, with other settings.
    """
    # A checkpoint is read with the record of its run.
    if run_folder_of(folder).resolve() == Path(str(trainer.args.output_dir)).resolve():
        return None
    summary = None if trainer.prepared is None else trainer.prepared.summary
    record = RunRecord(
        jepa=json.loads(json.dumps(jepa_as_trained(trainer))),
        versions=versions(),
        objective={"terms": [*trainer.objective.names]} if trainer.passed.has_objective else None,
        system_prompts=None if summary is None else summary.system_prompts,
    )
    earlier = read_record(folder) if (folder / RUN_FILE).is_file() else RunRecord()
    if not earlier.launches:
        return record
    if earlier.jepa != record.jepa:
        raise UserError("holds a run with other settings; name another folder", path=folder)
    return None
