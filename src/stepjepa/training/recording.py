"""The run record of a ``JepaTrainer``: written when training begins, at every checkpoint, and at the end."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, json_or_empty
from stepjepa.base.processes import is_main_process
from stepjepa.base.signals import Stopped
from stepjepa.base.terminal import note, spelled
from stepjepa.batch.dataset import Prepared
from stepjepa.config.run import RunConfig
from stepjepa.models.fingerprint import weights_fingerprint
from stepjepa.store.folder import (
    BOARD_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    RUN_FILE,
    check_is_of_last_call,
    checkpoint_fault,
    checkpoints,
    foreign_error,
    foreign_file,
    open_run_folder,
    set_checkpoints_aside,
)
from stepjepa.store.hub import write_card
from stepjepa.store.metric_names import UNNAMED, named_metric
from stepjepa.store.prompts import write_trained_prompts
from stepjepa.store.record import (
    FURTHER_CALL,
    Change,
    Fingerprints,
    Launch,
    Results,
    RunRecord,
    remove_start,
    write_record,
)
from stepjepa.store.resume import launch_settings, resumed_launches
from stepjepa.training.interface import TrainerInterface
from stepjepa.training.optimizers import own_settings

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


Value = TypeVar("Value")


def _broadcast(value: Value) -> Value:
    """Return the value of the main process, in every process; a collective call."""
    values = [value]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _fingerprint_of_sets(sets: Mapping[str, Prepared]) -> str | None:
    """Hash held-out records as tokens, with the names of their sets if they have any; None for none."""
    hashes = {name: prepared.dataset.fingerprints().records for name, prepared in sets.items()}
    if not hashes or UNNAMED in hashes:
        return hashes.get(UNNAMED)
    return hashlib.sha256(repr([*hashes.items()]).encode()).hexdigest()


_MADE_LATER = {"optimizer": "optimizer", "schedule": "lr_scheduler"}
"""What Trainer makes when training begins, unless a trainer has it already -> its attribute."""


class Recorder(TrainerCallback):
    """Writes ``run.json``, ``run.yaml`` and ``trained_prompts.json`` of a trainer into its run folder.

    Attributes:
        record: the run record as it was written last; None before training.
        steps_before: optimizer steps of earlier calls of ``train`` in the same run.
        began_metrics: whether the trainer has begun the file of metrics, by an evaluation before any training.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer
        self._described: RunRecord | None = None
        self._config: RunConfig | None = None
        self._fingerprints: Fingerprints | None = None
        self._started: float | None = None
        self._launched, self._own = 0.0, dict.fromkeys(_MADE_LATER, False)
        self._earlier_call = 0  # number of the one whose checkpoints are in the way of those of a further call; 0: none
        self.record: RunRecord | None = None
        self.steps_before = 0
        self.began_metrics = False

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(str(self._trainer.args.output_dir))

    def describe(self, record: RunRecord, config: RunConfig | None, started: float | None = None) -> None:
        """Set the description of the run whose launch will be recorded.

        Args:
            record: the run record, without launches and results.
            config: what ``run.yaml`` says; None for a run that no file can describe.
            started: ``time.monotonic()`` at the start of the run, by default that of its launch.
        """
        self._described, self._config, self._started = record, config, started

    # -- a launch ------------------------------------------------------------------------------------------------------

    def open(self, resume: str | bool | None) -> str | None:
        """Check the run folder before a launch, and return the checkpoint to resume from, or None.

        Args:
            resume: a checkpoint folder; True or ``last`` for the last complete one, ``auto`` for the last one if there
                is any.

        Raises:
            UserError: the folder holds the record of another run, a file of the user's own that the launch would write
                over, or no checkpoint to resume from.
        """
        if resume in (None, False):
            # Other processes may look at another disk, or later, when the record of this run is there.
            if _broadcast(self.record is None and (self.folder / RUN_FILE).is_file()):
                raise UserError(
                    f"holds the record of {self._run_and_remedy()}name another output_dir", path=self.folder
                )
            self._check_foreign(None)
            return None
        if resume is True or str(resume).lower() in ("last", "true", "auto"):
            choice = "last" if resume is True else str(resume)
            return open_run_folder(str(self.folder), choice, self._say, saves=self._saves, own=self._own_files)[1]
        check_is_of_last_call(Path(str(resume)), self.folder)
        # As in Trainer, newer checkpoints may exist.
        if fault := checkpoint_fault(Path(str(resume)), read_all=True):
            raise UserError(f"is not a complete checkpoint ({fault}); name another one, or 'last'", path=str(resume))
        self._check_foreign(str(resume))
        return str(resume)

    @property
    def _saves(self) -> bool:
        """Whether the run saves checkpoints and the model."""
        return bool(self._trainer.args.save_strategy != SaveStrategy.NO)

    @property
    def _own_files(self) -> list[str]:
        """Names of the files that the trainer has written before any training."""
        return [METRICS_FILE] if self.began_metrics else []

    def _check_foreign(self, checkpoint: str | None) -> None:
        """Raise ``UserError`` in every process for a file of the user's own that the launch would write over."""
        foreign = None
        if self.record is None:
            foreign = foreign_file(self.folder, saves=self._saves, checkpoint=checkpoint, own=self._own_files)
        if foreign := _broadcast(foreign):
            raise foreign_error(foreign)

    def _run_and_remedy(self) -> str:
        """Describe the run in the folder, and how a new trainer resumes it, as the beginning of a remedy."""
        if checkpoints(self.folder):
            return "a run; train(resume_from_checkpoint=True) resumes it, or "
        if json_or_empty(self.folder / RUN_FILE).get("status") == "finished":
            return "a finished run without checkpoints; "
        return "a run without checkpoints; train(resume_from_checkpoint='auto') begins it again, or "

    @contextmanager
    def launch(
        self, checkpoint: str | None, *, resumes: bool, allow_changes: bool = False, refuse_finished: bool = False
    ) -> Iterator[None]:
        """Record a launch; the block trains.

        A run that fails is recorded as failed. If the launch took no step, the record in the folder is left unchanged.

        Args:
            checkpoint: from :meth:`open` or ``open_run_folder``.
            resumes: whether to resume a run; without a checkpoint it begins again.
            allow_changes: resume although data, their order or the objective have changed.
            refuse_finished: raise ``FinishedError`` for a run that is finished; Trainer trains it no further.

        Raises:
            UserError: the run to resume has other settings.
        """
        started, first = time.monotonic(), self.record is None
        path = self.folder / RUN_FILE
        before = path.read_bytes() if path.is_file() else None
        logs = self._log_files()
        now = self._describe()
        if first:
            # Those of its arguments are made later.
            self._own = {name: getattr(self._trainer, of) is not None for name, of in _MADE_LATER.items()}
        settings = launch_settings(now) | own_settings(self._trainer, **self._own)
        now = replace(now, launches=[Launch(settings=settings, versions=now.versions, machine=now.machine)])
        if resumes:
            choices = {"allow_changes": allow_changes, "refuse_finished": refuse_finished}
            steps = 0 if checkpoint is None else self._trainer.resume.steps_before(Path(checkpoint))
            launches = resumed_launches(self.folder, checkpoint, now, say=self._say, steps_before=steps, **choices)
            now = replace(now, launches=launches)
            self.steps_before, self._earlier_call = steps or 0, 0
        elif not first:
            now = self._further_call(now)
        self._started = self._started or started
        self._write(now)
        try:
            yield
        except (Stopped, KeyboardInterrupt):
            self._update_launch(self._trainer.state.global_step)
            self._write(replace(self.record or now, status="interrupted"))
            raise
        except Exception as error:
            self._record_failure(error, before, logs)
            raise

    def _describe(self) -> RunRecord:
        """Return the record of the run that begins, without its launches."""
        if self._described is None:
            raise ValueError("expected a described run; call Recorder.describe first")
        prepared = self._trainer.prepared
        if self._fingerprints is None:
            self._fingerprints = self._fingerprint()
        # Data that were passed as tokens may have no records.
        summary = None if prepared is None else prepared.summary
        prompts = self._described.system_prompts if summary is None else summary.system_prompts
        return replace(self._described, status="running", fingerprints=self._fingerprints, system_prompts=prompts)

    def _fingerprint(self) -> Fingerprints:
        """Compute the fingerprints of data and base weights on the main process, and broadcast them."""
        trainer, result = self._trainer, Fingerprints()
        if is_main_process():
            records, texts = trainer.prepared.dataset.fingerprints() if trainer.prepared else (None, None)
            result = Fingerprints(
                records=records,
                texts=texts,
                eval_records=_fingerprint_of_sets(trainer.held_out),
                weights=weights_fingerprint(trainer.model, trainer.processing_class),
            )
        # Other processes may hold no weights yet, and all must agree whether the run may be resumed.
        return _broadcast(result)

    def _further_call(self, now: RunRecord) -> RunRecord:
        """Return the record of a further call of ``train``: it continues with the weights and restarts the schedule."""
        assert self.record is not None
        *_, launch = now.launches
        self.steps_before = self.record.launches[-1].to_step
        # A call that saved none leaves those of the call before it.
        further = (launch.is_further_call and launch.trained for launch in self.record.launches)
        self._earlier_call = self._earlier_call or 1 + sum(further)
        begun = f"begun anew at step {self.steps_before}"
        change = Change(name=FURTHER_CALL, before="as it was", now=begun, mixed=True)
        return replace(now, launches=[*self.record.launches, replace(launch, changes=[change])])

    def set_checkpoints_aside(self) -> None:
        """Rename the checkpoints of the call of ``train`` before, once a further one saves: its numbers begin at 1."""
        call, self._earlier_call = self._earlier_call, 0
        if call and (moved := set_checkpoints_aside(self.folder, call)):
            names = ", ".join(path.name for path in moved)
            note(f"the checkpoints of the call of train before are {names} now; checkpoint-N are those of this one")

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self, record: RunRecord) -> None:
        self.record = record
        write_record(self.folder, record)

    def _say(self, line: str) -> None:
        if self._trainer.is_world_process_zero():
            print(spelled(line), flush=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Record the first step of the launch, and write the files that belong to the record."""
        self._launched = time.monotonic()
        self._update_launch(state.global_step, begins=True)
        if self.record is None or self._config is None:
            return
        self._write(self.record)
        if not is_main_process():
            return
        with atomic_write(self.folder / CONFIG_FILE) as stream:
            stream.write(self._config.to_yaml())
        prepared = self._trainer.prepared
        if prepared is not None and prepared.summary is not None:
            write_trained_prompts(self.folder, prepared.summary.questions)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Record the steps of the launch so far: it may be killed."""
        if self.record is not None:
            self._update_launch(state.global_step)
            self._write(self.record)

    def _update_launch(self, step: int, *, begins: bool = False) -> None:
        """Set the last step and the seconds of the current launch; with ``begins`` its first step, too."""
        if self.record is None:
            return
        *earlier, launch = self.record.launches
        step += self.steps_before
        seconds = time.monotonic() - self._launched if self._launched else 0.0
        launch = replace(launch, to_step=step, seconds=seconds)
        launch = replace(launch, from_step=step) if begins else launch
        self.record = replace(self.record, launches=[*earlier, launch])

    def finish(self, *, save: bool, evaluation: dict[str, float] | None = None) -> RunRecord:
        """Save the trained model into the run folder if asked for, and record the run as finished, with its results.

        Args:
            save: save the model, too.
            evaluation: metrics of the trained weights; None for those of :meth:`evaluation`.
        """
        trainer, state = self._trainer, self._trainer.state
        assert self.record is not None
        self._update_launch(state.global_step)
        if save:
            trainer.save_model(_internal_call=True)
        metrics = self.evaluation() if evaluation is None else evaluation
        best = self._best_step()
        launches = self.record.launches
        record = self.record.finished(
            Results(
                steps=launches[-1].to_step,
                best_step=None if best is None else best + self.steps_before,
                tokens=trainer.meter.num_tokens,
                flops=state.total_flos,
                last_log=next((line for line in reversed(state.log_history) if "lm_loss" in line), {}),
                train_seconds=sum(launch.seconds for launch in launches),
                seconds=time.monotonic() - (self._started or time.monotonic()),
                evaluation={name: value for name, value in metrics.items() if name.startswith("eval_")},
            )
        )
        if save and is_main_process():
            write_card(self.folder, run=record)
        # Written last: a run that is marked as finished is not resumed, even if files are missing.
        self._write(record)
        return record

    def evaluation(self) -> dict[str, float]:
        """Return the held-out metrics of the trained weights, which are the last ones or those of the best checkpoint.

        Empty if these weights were not evaluated.
        """
        trainer, state, best = self._trainer, self._trainer.state, self._best_step()
        step = state.global_step if best is None else best
        # An evaluation of an earlier launch is in the history that a checkpoint has, a line for each set of records.
        losses = {f"eval_{named_metric(name, 'lm_loss')}" for name in trainer.held_out}
        logged = [line for line in state.log_history if line["step"] == step and losses & line.keys()]
        return trainer.evaluated.get(step) or {name: value for line in logged for name, value in line.items()}

    def _best_step(self) -> int | None:
        """Return the step whose checkpoint was loaded at the end; None if the last weights are the model."""
        state = self._trainer.state
        is_loaded = self._trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
        return state.best_global_step if is_loaded else None

    def _log_files(self) -> set[Path]:
        """Return the files of logs in the run folder: of metrics, and TensorBoard's."""
        return {*(self.folder / BOARD_FOLDER).glob("*"), *self.folder.glob(METRICS_FILE)}

    def _record_failure(self, error: Exception, before: bytes | None, logs: set[Path]) -> None:
        """Record that the run failed; if this launch took no step, restore ``before``, the earlier run.json.

        ``logs`` are the files of logs that were there before, of an evaluation, or the user's own.
        """
        trainer, folder = self._trainer, self.folder
        for callback in trainer.callback_handler.callbacks:
            # TensorBoard's writer thread would write on into a folder that is removed.
            if getattr(callback, "tb_writer", None) is not None:
                callback.tb_writer.close()
        with suppress(OSError):
            if self.trained or (isinstance(error, OSError) and before is None):
                assert self.record is not None
                self._update_launch(trainer.state.global_step)
                self._write(replace(self.record, status="failed", error=str(error)))
            elif before is not None:
                if is_main_process():
                    with atomic_write(folder / RUN_FILE, "wb") as stream:
                        stream.write(before)
            else:
                for file in self._log_files() - logs:
                    file.unlink(missing_ok=True)
                board = folder / BOARD_FOLDER
                if board.is_dir() and not any(board.iterdir()):
                    board.rmdir()
                remove_start(folder)
            if not self.trained and before is None:
                self.record = None

    @property
    def trained(self) -> bool:
        """Whether this launch has taken an optimizer step."""
        return bool(self._trainer.state.global_step > getattr(self._trainer, "_initial_global_step", math.inf))
