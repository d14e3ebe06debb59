"""Trials as jobs of a SLURM cluster, through submitit: each job trains and evaluates one, and the sweep watches.

A job whose trial is finished already does nothing, and the lock of its log keeps a trial from running twice at a time:
so a sweep that is killed while it submits jobs may submit them again.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.errors import UserError
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.sweep import trial_environment
from stepjepa.experiments.sweep_folder import FAILED, FINISHED, INTERRUPTED, SweepFolder
from stepjepa.experiments.trial_run import Ending, TrialRun, end_all
from stepjepa.files import write_json
from stepjepa.signals import Interruptions

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

CLUSTER = "STEPJEPA_SUBMITIT_CLUSTER"
"""Environment variable that names another of submitit's executors than ``slurm``: the tests set ``local``, which runs
jobs as processes of this machine."""

# A trial is one process on one node, and --jobs says how many run at a time.
_SET_HERE = ("nodes", "ntasks_per_node", "tasks_per_node", "array_parallelism", "map_count", "use_srun", "num_gpus")
_TIME = ("timeout_min", "time")

# How often a job whose time is up is put back into the queue: the one option of the executor's constructor.
_REQUEUES = "slurm_max_num_timeout"

# Seconds between two looks at the records, and that a job waits for one that is being cancelled.
_LOOK, _CANCELLED_WITHIN = 1.0, 90.0


def read_options(arguments: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` arguments as parameters of submitit's ``AutoExecutor``, named as there or as ``sbatch`` names them.

    Args:
        arguments: ``partition=gpu``, ``slurm_partition=gpu``, ``time=4:00:00``, ``mem_gb=32``; a value that is JSON is
            read as such, anything else is text.

    Returns:
        Generic names as they are, those of SLURM with ``slurm_`` before them; ``timeout_min`` is always there.

    Raises:
        UserError: submitit is not installed, an argument has no ``=``, a name is unknown, there twice or not for the
            user to set, a value is of the wrong kind, or no time limit is named.
    """
    auto, slurm = _executors()
    generic = auto._typed_parameters()
    names = sorted({*generic, *slurm._valid_parameters(), _REQUEUES.removeprefix("slurm_")} - set(_SET_HERE))
    options: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        name = key.strip().replace("-", "_").removeprefix("slurm_")
        if not equals:
            raise UserError(f"--slurm: expected KEY=VALUE, got '{argument}'; write partition=gpu, say")
        if name in _SET_HERE:
            instead = "; --jobs N says how many run at a time" if name == "array_parallelism" else ""
            raise UserError(f"--slurm: {name} is set by the sweep itself; leave it out{instead}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"--slurm: submitit has no parameter '{name}'; {hint}")
        value = _minutes(text) if name in _TIME else _value(text)
        full = "timeout_min" if name in _TIME else name if name in generic else f"slurm_{name}"
        if full in options:
            raise UserError(f"--slurm: {name} is there twice; name it once")
        if name in generic and not isinstance(value, (int, float) if generic[name] is float else generic[name]):
            raise UserError(f"--slurm: {name} needs a value of type {generic[name].__name__}, got '{text}'")
        options[full] = value
    if "timeout_min" not in options:
        raise UserError(
            "--slurm: name the time limit of one trial, as in --slurm time=4:00:00; submitit's own is 5 minutes"
        )
    if "cpus_per_task" in options:
        # From SLURM 22.05 on, srun no longer takes this over from sbatch.
        options.setdefault("slurm_srun_args", [f"--cpus-per-task={options['cpus_per_task']}"])
    return options


def _executors() -> tuple[Any, Any]:
    try:
        from submitit import AutoExecutor, SlurmExecutor
    except ImportError:
        raise UserError(
            "--engine slurm submits jobs through submitit, which is not installed; pip install submitit"
        ) from None
    return AutoExecutor, SlurmExecutor


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _minutes(text: str) -> int:
    """A time limit as sbatch takes it: ``90``, ``90:00``, ``1:30:00``, ``1-12``, ``1-12:30`` or ``1-12:30:00``."""
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        raise UserError(f"--slurm: a time limit is minutes or [DAYS-]HOURS:MINUTES:SECONDS, got '{text}'")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [0, *parts, 0][:3]
    found = int(days or 0) * 1440 + hours * 60 + minutes + -(-seconds // 60)
    if not found:
        raise UserError(f"--slurm: a time limit of nothing leaves no time to train, got '{text}'")
    return found


class TrialJob:
    """What a job does: see :class:`TrialRun`. Before its time is up it is put back into the queue."""

    def __init__(self, folder: SweepFolder, trial: Trial) -> None:
        self._folder, self._trial = folder, trial
        self._run: TrialRun | None = None

    def __call__(self) -> str:
        """Train and evaluate; returns what became of the trial."""
        from submitit import JobEnvironment

        if self._folder.state(self._trial) == FINISHED:
            return FINISHED
        environment = trial_environment(0, 1, ())
        if "SLURM_CPUS_PER_TASK" in os.environ:
            environment["OMP_NUM_THREADS"] = os.environ["SLURM_CPUS_PER_TASK"]
        ending = None
        with Interruptions() as asked:
            self._run = TrialRun(
                self._folder,
                self._trial,
                environment,
                job=JobEnvironment().job_id,
                patience=_CANCELLED_WITHIN,
            )
            try:
                while (ending := self._run.ended()) is None and not asked.count:
                    time.sleep(0.1)
            finally:
                if ending is None:
                    end_all([self._run], lambda: asked.count > 1)
        if ending is None:
            # Cancelled, or preempted and perhaps put back into the queue.
            raise SystemExit(128 + asked.first)
        return ending.status

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit when the time is nearly up; the training resumes from its last checkpoint."""
        from submitit.helpers import DelayedSubmission

        if self._run is not None:
            end_all([self._run], lambda: False)
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
        if cluster == "slurm" and not all(map(shutil.which, ("sbatch", "srun", "sacct", "scancel"))):
            raise UserError("--engine slurm: no sbatch here; start it where jobs are submitted, or use --engine local")
        given = {"name": "stepjepa", **options}
        # As LAUNCHER: no file in the folder that jobs start in takes the place of a module.
        constructed = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
        if _REQUEUES in given:
            constructed[_REQUEUES] = given.pop(_REQUEUES)
        if jobs is not None:
            given["slurm_array_parallelism"] = jobs
        try:
            self._executor = _executors()[0](folder=folder.jobs_folder, cluster=cluster, **constructed)
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
            UserError: jobs are refused.
        """
        import submitit

        noted = self._noted_jobs()
        job_class = submitit.SlurmJob if self._executor.cluster == "slurm" else submitit.LocalJob
        known = {t.name: job_class(folder.jobs_folder, noted[t.name]) for t in trials if t.name in noted}
        for number, (name, job) in enumerate(known.items()):
            # All are asked for at once, by the first.
            if not job.done(force_check=not number) and job.state != "UNKNOWN":
                self._watched[name] = next(trial for trial in trials if trial.name == name), job
        if self._watched:
            print(f"slurm: {_count(self._watched)} of an earlier start still there", flush=True)
        left = [trial for trial in trials if trial.name not in self._watched]
        if not left:
            return
        alone = [SweepFolder(folder.path.resolve(), [trial], {}, folder.launcher) for trial in left]
        for trial in left:
            if folder.read_record(trial).get("status") == FAILED:
                # Tried again; what is written from now on is the job's.
                folder.record(trial, INTERRUPTED)
        try:
            jobs = self._executor.submit_array(list(map(TrialJob, alone, left)))
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"the jobs were refused ({_one_line(error)}); change --slurm, or --engine local runs them here"
            ) from None
        self._watched |= {trial.name: (trial, job) for trial, job in zip(left, jobs, strict=True)}
        self._note_jobs({**noted, **{trial.name: job.job_id for trial, job in zip(left, jobs, strict=True)}})
        first, last = jobs[0].job_id, jobs[-1].job_id
        print(f"slurm: {_count(jobs)} submitted ({first} to {last}), logs in {folder.jobs_folder}", flush=True)

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`."""
        if time.monotonic() < self._looked + _LOOK:
            return []
        found = []
        for trial, job in list(self._watched.values()):
            # In this order: what a job writes last is there when it is done.
            done, record = job.done(), self._folder.read_record(trial)
            if record.get("status") in (FINISHED, FAILED):
                found.append((trial, Ending(record["status"], record.get("reason", ""), record.get("seconds"))))
            elif done and self._folder.is_evaluated(trial):
                found.append((trial, Ending(FINISHED)))
            elif done:
                log = self._folder.log_file(trial)
                output = self._folder.last_line(trial) if log.exists() else "no log"
                reason = f"job {job.job_id} ended ({job.state}) before the trial did: {output}"
                self._folder.record(trial, INTERRUPTED, reason=reason, job=job.job_id)
                found.append((trial, Ending(INTERRUPTED, reason)))
        for trial, _ in found:
            del self._watched[trial.name]
        self._looked = time.monotonic()
        return found

    def end(self, asked: Interruptions) -> None:
        """See :class:`Engine`: jobs are cancelled, but continue where only the terminal is gone."""
        if not self._watched or not asked.count or asked.first == signal.SIGHUP:
            return
        for _, job in self._watched.values():
            job.cancel(check=False)
        self._note_jobs({name: job for name, job in self._noted_jobs().items() if name not in self._watched})
        print(f"slurm: {_count(self._watched)} cancelled", flush=True)

    def _note_jobs(self, jobs: dict[str, str]) -> None:
        """Write the ids of jobs by the names of their trials; the sweep alone writes this file."""
        write_json(self._folder.jobs_folder / "jobs.json", jobs)

    def _noted_jobs(self) -> dict[str, str]:
        try:
            found = json.loads((self._folder.jobs_folder / "jobs.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return {n: job for n, job in found.items() if isinstance(job, str)} if isinstance(found, dict) else {}


def _count(jobs: Any) -> str:
    return f"{len(jobs)} job{'s' if len(jobs) > 1 else ''}"


def _one_line(error: BaseException) -> str:
    # Of a command that failed, submitit puts what it said last.
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip(" -\t\n")]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or [type(error).__name__])[0][:300]
