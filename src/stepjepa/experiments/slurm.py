"""Trials as jobs of a SLURM cluster, through submitit: each job trains and evaluates one, and the sweep watches."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.sweep import Ending, Local
from stepjepa.experiments.sweep_folder import FAILED, FINISHED, INTERRUPTED, SweepFolder
from stepjepa.files import read_json_object, write_json
from stepjepa.signals import Interruptions

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

CLUSTER = "STEPJEPA_SUBMITIT_CLUSTER"
"""Environment variable that names another of submitit's executors than ``slurm``: the tests set ``local``, which runs
jobs as processes of this machine."""

# A trial is one process on one node, and --jobs says how many run at a time.
_SET_HERE = ("nodes", "ntasks_per_node", "tasks_per_node", "array_parallelism")

# How often a job whose time is up is put back into the queue: the one option of the executor's constructor.
_REQUEUES = "slurm_max_num_timeout"

# Seconds between two looks at the jobs.
_LOOK = 1.0


def read_options(arguments: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` arguments as parameters of submitit's ``AutoExecutor``, which checks them.

    Args:
        arguments: ``partition=gpu``, ``slurm_partition=gpu``, ``time=4:00:00``, ``mem_gb=32``; a value that is JSON is
            read as such, anything else is text.

    Returns:
        Generic names as they are, those of SLURM with ``slurm_`` before them; ``timeout_min`` is always there.

    Raises:
        UserError: submitit is not installed, an argument is wrong or set by the sweep, or there is no time limit.
    """
    generic = _auto_executor()._typed_parameters()
    options: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        name = key.replace("-", "_").removeprefix("slurm_")
        if not equals:
            raise UserError(f"--slurm: expected KEY=VALUE, got '{argument}'; write partition=gpu, say")
        if name in _SET_HERE:
            raise UserError(f"--slurm: {name} is set by the sweep; --jobs N says how many trials run at a time")
        if name in ("time", "timeout_min"):
            options["timeout_min"] = _minutes(text)
        else:
            options[name if name in generic else f"slurm_{name}"] = _value(text)
    if "timeout_min" not in options:
        raise UserError(
            "--slurm: name the time limit of one trial, as in --slurm time=4:00:00; submitit's own is 5 minutes"
        )
    if "cpus_per_task" in options:
        # From SLURM 22.05 on, srun no longer takes this over from sbatch.
        options.setdefault("slurm_srun_args", [f"--cpus-per-task={options['cpus_per_task']}"])
    return options


def _auto_executor() -> Any:
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise UserError(
            "--engine slurm submits jobs through submitit, which is not installed; pip install submitit"
        ) from None
    return AutoExecutor


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _minutes(text: str) -> int:
    """A time limit as sbatch takes it: ``90``, ``90:00``, ``1:30:00``, ``1-12``, ``1-12:30`` or ``1-12:30:00``."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise UserError(f"--slurm: a time limit is minutes or [DAYS-]HOURS:MINUTES:SECONDS, got '{text}'")
    days, first, second, third = found.groups()
    # Without days, what stands before one colon or none is minutes.
    hours, minutes, seconds = (first, second, third) if days or third else (0, first, second)
    return int(days or 0) * 1440 + int(hours) * 60 + int(minutes or 0) + -(-int(seconds or 0) // 60)


class TrialJob:
    """What a job does: see :class:`TrialRun`. Before its time is up it is put back into the queue."""

    def __init__(self, folder: SweepFolder, trial: Trial) -> None:
        self._folder, self._trial = folder, trial
        self._engine = Local()

    def __call__(self) -> str:
        """Train and evaluate; returns the state of the trial."""
        if self._folder.state(self._trial) != FINISHED:
            with Interruptions() as asked:
                self._engine.begin(self._folder, [self._trial])
                try:
                    while self._engine.busy and not asked.count:
                        self._engine.ended()
                        time.sleep(0.1)
                finally:
                    self._engine.end(asked)
            if asked.count:
                raise SystemExit(128 + asked.first)
        return self._folder.state(self._trial)

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit when the time is nearly up; the training resumes from its last checkpoint."""
        from submitit.helpers import DelayedSubmission

        self._engine.end()
        return DelayedSubmission(TrialJob(self._folder, self._trial))


class Slurm:
    """Trials as jobs of one array.

    Args:
        folder: of the sweep; seen from all nodes.
        options: see :func:`read_options`.
        jobs: how many run at a time; None leaves it to submitit.

    Raises:
        UserError: there is no SLURM here, or submitit does not take the options.
    """

    def __init__(self, folder: SweepFolder, options: Mapping[str, Any], jobs: int | None = None) -> None:
        cluster = os.environ.get(CLUSTER, "slurm")
        missing = [name for name in ("sbatch", "srun", "sacct", "scancel") if not shutil.which(name)]
        if cluster == "slurm" and missing:
            remedy = "start it where jobs are submitted, or use --engine local"
            raise UserError(f"--engine slurm: no {', '.join(missing)} here; {remedy}")
        given = {"name": "stepjepa", **options}
        # As LAUNCHER: no file in the folder that jobs start in takes the place of a module.
        constructed = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
        if _REQUEUES in given:
            constructed[_REQUEUES] = given.pop(_REQUEUES)
        if jobs is not None:
            given["slurm_array_parallelism"] = jobs
        try:
            self._executor = _auto_executor()(folder=folder.jobs_folder, cluster=cluster, **constructed)
            self._executor.update_parameters(**given)
        except (ValueError, TypeError, NameError, AssertionError, RuntimeError) as error:
            raise UserError(f"--slurm: {_one_line(error)}") from None
        self._folder, self._looked = folder, 0.0
        self._watched: dict[str, tuple[Trial, Any]] = {}

    @property
    def busy(self) -> int:
        """See :class:`Engine`."""
        return len(self._watched)

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """See :class:`Engine`: jobs of an earlier start that are still there are watched, the others submitted.

        Raises:
            UserError: the cluster refuses the jobs.
        """
        import submitit

        job_class = submitit.SlurmJob if self._executor.cluster == "slurm" else submitit.LocalJob
        ids_file = folder.jobs_folder / "jobs.json"
        ids = read_json_object(ids_file, "list of jobs", "move it away") if ids_file.exists() else {}
        known = [(trial, job_class(folder.jobs_folder, ids[trial.name])) for trial in trials if trial.name in ids]
        for number, (trial, job) in enumerate(known):
            # The first asks the cluster for all of them.
            if not job.done(force_check=not number) and job.state != "UNKNOWN":
                self._watched[trial.name] = trial, job
        if self._watched:
            print(f"slurm: {len(self._watched)} jobs of an earlier start are watched", flush=True)
        left = [trial for trial in trials if trial.name not in self._watched]
        if not left:
            return
        for trial in left:
            if folder.read_record(trial).get("status") == FAILED:
                folder.record(trial, INTERRUPTED)
        place = SweepFolder(folder.path.resolve(), [], {}, folder.launcher)
        try:
            jobs = self._executor.submit_array([TrialJob(place, trial) for trial in left])
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"the jobs were refused ({_one_line(error)}); change --slurm, or --engine local runs them here"
            ) from None
        self._watched |= {trial.name: (trial, job) for trial, job in zip(left, jobs, strict=True)}
        write_json(ids_file, ids | {name: job.job_id for name, (_, job) in self._watched.items()})
        print(f"slurm: {len(jobs)} jobs submitted, from {jobs[0].job_id}; logs in {folder.jobs_folder}", flush=True)

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`."""
        if time.monotonic() < self._looked + _LOOK:
            return []
        found = []
        for trial, job in list(self._watched.values()):
            # In this order: what a job writes last is there when it is done.
            done, record = job.done(), self._folder.read_record(trial)
            if record.get("status") in (FINISHED, FAILED):
                found.append((trial, Ending(record["status"], record.get("reason", ""))))
            elif done:
                output = self._folder.last_line(trial)
                reason = f"job {job.job_id} ended ({job.state}) before the trial did: {output}"
                self._folder.record(trial, INTERRUPTED, reason)
                found.append((trial, Ending(INTERRUPTED, reason)))
        for trial, _ in found:
            del self._watched[trial.name]
        self._looked = time.monotonic()
        return found

    def end(self, asked: Interruptions) -> None:
        """See :class:`Engine`: jobs are cancelled, but continue where only the terminal is gone."""
        if self._watched and asked.count and asked.first != signal.SIGHUP:
            for _, job in self._watched.values():
                job.cancel(check=False)
            print(f"slurm: {len(self._watched)} jobs cancelled", flush=True)


def _one_line(error: BaseException) -> str:
    # Of a command that failed, submitit puts what it said last.
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip(" -\t\n")]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or [type(error).__name__])[0][:300]
