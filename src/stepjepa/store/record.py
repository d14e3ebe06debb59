"""The run record, ``run.json``: model, data, settings, launches and results; typed, and checked on reading.

Records of earlier versions are read, too; fields that they lack are None or empty.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import read_json_object, write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import duration
from stepjepa.base.typed_json import Origin, at_least, from_json, omitted_if_none, to_json, unknown_fields
from stepjepa.config.jepa import DEFAULTS
from stepjepa.store.folder import CONFIG_FILE, PROMPTS_FILE, RUN_FILE, run_folder_of

if TYPE_CHECKING:
    from transformers import TrainingArguments

REMEDY = "restore it, or train again into another folder"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Settings that determine the order in which records are trained."""

    seed: int | None = None
    data_seed: int | None = None
    records_per_micro_step: int | None = at_least(1, default=None)
    gradient_accumulation_steps: int | None = None
    train_sampling_strategy: str | None = None
    group_by: str | None = omitted_if_none()  # the field by which records are grouped
    other: JsonObject = unknown_fields()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of records: a file, a mixture of data sets, or objects passed in Python."""

    file: str | None = omitted_if_none()  # its name; None for records in memory
    records: int | None = omitted_if_none()
    sha256: str | None = omitted_if_none()  # of the file, or of the records of a mixture
    sha256_of_first_mib: str | None = omitted_if_none()  # of streamed files (0.1.0)
    bytes: int | None = omitted_if_none()  # of streamed files (0.1.0)
    eval_split: float | None = omitted_if_none()  # share of the file that is held out
    split_by: str | None = omitted_if_none()  # ``question`` where that holds out other records than ``record`` would
    split_seed: int | None = omitted_if_none()
    other: JsonObject = unknown_fields()  # invalid lines; the parts of a mixture


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapter that was trained."""

    rank: int | None = at_least(1, None)  # None for an adapter of another type than LoRA
    alpha: int | None = None
    other: JsonObject = unknown_fields()


@dataclass(frozen=True, kw_only=True)
class Training:
    """``transformers.TrainingArguments``, as its ``to_dict`` writes them."""

    other: JsonObject = unknown_fields()
    max_steps: int | None = None
    num_train_epochs: float | None = None
    load_best_model_at_end: bool = False
    seed: int | None = None
    data_seed: int | None = None

    @classmethod
    def of(cls, arguments: "TrainingArguments") -> "Training":
        """Make the record of ``transformers.TrainingArguments``."""
        values = json.loads(json.dumps(arguments.to_dict(), default=str))
        return from_json(cls, values, Origin("TrainingArguments", "pass another value"))


@dataclass(frozen=True, kw_only=True)
class Fingerprints:
    """Hashes of the data and of the base weights of a run; the files that they were read from do not count."""

    records: str | None = None  # the tokenised training records in order: tokens, labels, views
    eval_records: str | None = None  # the same of the held-out records
    texts: str | None = None  # token ids and order of the main texts of the training records, without predictor tokens
    weights: str | None = None  # the base weights as loaded, without the rows of tokens that training adds


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting in which a launch differs from the one before."""

    name: str
    before: Any = None
    now: Any = None
    mixed: bool = False  # it affects the weights, so the run is no clean seed of its arm

    def __str__(self) -> str:
        # Shortened, control characters escaped: ``learning_rate: 2e-05 -> 0.0001``.
        before, now = (shown("none" if value is None else str(value))[1:-1] for value in (self.before, self.now))
        return f"{self.name}: {before} -> {now}"


FURTHER_CALL = "schedule"
"""Name of the change of a further call of ``train``, whose checkpoints are numbered from 1 again."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of the run: by a command, or by a call of ``JepaTrainer.train``.

    Version 0.2.0 wrote only ``seconds`` and ``to_step``.
    """

    seconds: float = 0.0
    from_step: int | None = None  # steps that came before it
    to_step: int = at_least(0, default=0)  # the last one that is saved, or at which it ended
    settings: JsonObject = field(default_factory=dict)  # optimizer, rate, schedule, decay, batch, precision
    versions: JsonObject = field(default_factory=dict)
    machine: JsonObject = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        """Whether a step of it is part of the run."""
        return self.to_step > (self.from_step or 0)

    @property
    def is_further_call(self) -> bool:
        """Whether it is a further call of ``train`` by the same trainer, with a schedule of its own."""
        return any(change.name == FURTHER_CALL for change in self.changes)

    def __repr__(self) -> str:
        begin = "" if self.from_step is None else f"steps {self.from_step} "
        changed = "".join(f"; {change.name} {change.before} -> {change.now}" for change in self.changes)
        return f"Launch({begin}to {self.to_step} in {duration(self.seconds)}{changed})"


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a finished run."""

    steps: int = at_least(0)
    best_step: int | None = omitted_if_none()  # of the checkpoint that became the model; None: the last weights
    tokens: float | None = None
    flops: float | None = None
    last_log: JsonObject = field(default_factory=dict)
    train_seconds: float | None = None
    seconds: float | None = None
    evaluation: JsonObject = unknown_fields()  # ``eval_*`` of an evaluation of the trained weights


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of ``run.json``.

    Attributes:
        status: ``running``, ``finished``, ``interrupted`` or ``failed``.
        error: the error that ended a failed run.
        command: as it was typed; None for a run from Python.
        arguments: the same with configuration files expanded, without flags of a single launch.
        directory: relative paths in ``arguments`` start from it.
        model: the folder or hub id that was trained.
        model_fingerprint: hash of the files of a folder, or commit of a hub id.
        machine: hardware and threads.
        versions: of stepjepa and of the libraries that it runs on.
        jepa: ``JepaConfig.to_dict``, of the version that trained.
        objective: terms that were passed in Python instead of those of ``jepa``.
        loaded: dtype, template and attention of the loaded model.
        encoding: ``used``, ``tree`` or ``rows``, and ``because``, the reason.
        lora: settings of the adapter; None without one.
        training: ``transformers.TrainingArguments``.
        order: the order of the records.
        data: by part, the file of records: train and eval, or data, which is split.
        system_prompts: the most frequent ones; None stands for records without one.
        counts: numbers of training records, turns and pairs, and of those that are skipped.
        eval_counts: the same numbers of the held-out records.
        tokens: number of tokens by kind.
        template: facts about the chat template, and the parts of the records that it does not render.
        parameters: number of parameters, and of those that are trained.
        same_flop: with ``same_flop``, the steps that use the FLOPs of a regular run.
        fingerprints: hashes of the tokenised records and of the base weights.
        launches: the launches of the run, resumed ones included.
        results: of a finished run.
        exported_from: the run or checkpoint folder that was exported.
        other: fields that this version does not know.
    """

    status: str | None = None
    error: str | None = omitted_if_none()
    command: list[str] | None = None
    arguments: list[str] | None = None
    directory: str | None = None
    model: str | None = None
    model_fingerprint: str | None = None
    machine: JsonObject = field(default_factory=dict)
    versions: JsonObject = field(default_factory=dict)
    jepa: JsonObject | None = None
    objective: JsonObject | None = omitted_if_none()
    loaded: JsonObject = field(default_factory=dict)
    encoding: JsonObject | None = None
    lora: Lora | None = None
    training: Training | None = None
    order: Order | None = None
    data: dict[str, Source | None] = field(default_factory=dict)
    system_prompts: list[str | None] | None = None
    counts: JsonObject | None = None
    eval_counts: JsonObject | None = None
    tokens: JsonObject | None = None
    template: JsonObject | None = None
    parameters: JsonObject | None = None
    same_flop: JsonObject | None = None
    fingerprints: Fingerprints | None = None
    launches: list[Launch] = field(default_factory=list)
    results: Results | None = None
    exported_from: str | None = omitted_if_none()
    other: JsonObject = unknown_fields()

    def finished(self, results: Results) -> "RunRecord":
        """Return the record of the same run, finished, with its results."""
        return replace(self, status="finished", error=None, results=results)

    def changes(self, *, mixed: bool) -> Iterator[str]:
        """Yield a text for each change between launches; ``mixed`` selects those that affect the weights or the others.

        A launch none of whose steps is part of the run has changed nothing; the first one may have changes of the run
        whose checkpoint it resumed.
        """
        for number, launch in enumerate(self.launches):
            for change in launch.changes:
                if change.mixed is mixed and (launch.trained or number == 0):
                    yield f"resumed at step {launch.from_step or 0} with another {change}"


def read_run(folder: str | os.PathLike[str]) -> JsonObject:
    """Read the JSON object in ``run.json``, unchecked; ``UserError`` if there is none, or no valid JSON."""
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise UserError(f"is no run folder (no {RUN_FILE} in it); check the path", path=Path(folder))
    return read_json_object(path, "file of a run", REMEDY)


def read_record(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the record of a run folder; ``UserError``, which names the field, if it is missing or damaged."""
    origin = origin_of(folder)
    record = from_json(RunRecord, read_run(folder), origin)
    if record.jepa is not None:
        check_objective(record.jepa, origin)
    return record


def origin_of(folder: str | os.PathLike[str]) -> Origin:
    """Return the file and the remedy that errors about fields of a run's record name."""
    return Origin(Path(folder) / RUN_FILE, REMEDY)


def check_objective(jepa: JsonObject, origin: Origin) -> None:
    """Raise ``UserError`` for an option of ``JepaConfig`` that is of another type than its default.

    Options whose default is None may have any simple type; a run of another version may have other options.

    Args:
        jepa: the recorded options, by name.
        origin: where they were read, for the error.
    """
    if "mode" not in jepa:
        raise origin.inside("jepa").missing("mode", "a text")
    kinds = {str: (str, "a text"), bool: (bool, "true or false"), int: (int | float, "a number")}
    kinds[float] = kinds[int]
    for name, value in jepa.items():
        kind, expected = kinds.get(type(DEFAULTS.get(name)), (object, ""))
        if not isinstance(value, kind) or (expected == "a number" and isinstance(value, bool)):
            raise origin.inside("jepa").wrong(name, value, expected)


def complete_objective(jepa: JsonObject) -> JsonObject:
    """Add options that an earlier version lacked, with the values that reproduce its behaviour."""
    # The InfoNCE of earlier versions had all other pairs as negatives.
    negatives = "all" if jepa.get("jepa_loss_type") == "infonce" else DEFAULTS["infonce_negatives"]
    return DEFAULTS | {"infonce_negatives": negatives} | jepa


def record_of(model_path: str | os.PathLike[str]) -> RunRecord | None:
    """Read the record of the run that trained a model (a run folder, or a checkpoint in one); None for other models."""
    # A folder with a run record of its own may have the name of a checkpoint.
    places = (Path(model_path), run_folder_of(model_path))
    return next((read_record(place) for place in places if (place / RUN_FILE).is_file()), None)


def trained_objective(model_path: str | os.PathLike[str]) -> JsonObject | None:
    """Read the ``JepaConfig`` that a model was trained with, as a dict; None if there is no record of it."""
    record = record_of(model_path)
    return None if record is None else record.jepa


def write_record(folder: Path, record: RunRecord) -> None:
    """Write ``run.json``, from the main process only."""
    if is_main_process():
        write_json(folder / RUN_FILE, json.loads(json.dumps(to_json(record), default=str)))


def remove_start(folder: Path) -> None:
    """Remove the files of a launch that trained nothing, so that the folder can be used again."""
    if is_main_process():
        (folder / RUN_FILE).unlink(missing_ok=True)
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        (folder / PROMPTS_FILE).unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()
