"""Run trials as jobs of a SLURM cluster, through submitit: each job trains and evaluates one trial."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError, one_line
from stepjepa.base.json_object import JsonObject
from stepjepa.base.signals import Interruptions
from stepjepa.study.grid import Trial
from stepjepa.study.local import Local
from stepjepa.study.sweep_folder import SweepFolder
from stepjepa.study.trial_record import BEGUN, FAILED, FINISHED

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

CLUSTER = "STEPJEPA_SUBMITIT_CLUSTER"
"""Environment variable that names submitit's executor, by default ``slurm``. The tests set ``local``, which runs jobs
as processes of this machine."""

# A trial is one process on one node, and `jobs` says how many run at a time.
_SET_HERE = ("nodes", "ntasks_per_node", "tasks_per_node", "array_parallelism")

# Lines of the script of a job, in front of its command and behind it; words for ``srun``.
_LISTS = ("setup", "teardown", "srun_args")


def read_options(arguments: Sequence[str]) -> JsonObject:
    """Parse arguments such as ``partition=gpu`` to parameters of submitit's ``AutoExecutor``, which checks them.

    A value is parsed as JSON if it can be; a text is a list of one line, or the words of ``srun_args``. Names of SLURM
    get the prefix ``slurm_``; ``timeout_min`` is required.

    Raises:
        UserError: submitit is not installed, an argument is wrong or set by the sweep, or there is no time limit.
    """
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise UserError("`engine slurm` needs submitit, which is not installed; pip install submitit") from None
    options: JsonObject = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        name = key.replace("-", "_").removeprefix("slurm_")
        if not equals:
            raise UserError(f"slurm: expected KEY=VALUE, got '{argument}'; write partition=gpu, say")
        if name in _SET_HERE:
            raise UserError(f"slurm: {name} is set by the sweep; `jobs N` says how many trials run at a time")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        typed = name in AutoExecutor._typed_parameters()
        options[name if typed else f"slurm_{name}"] = _checked(name, value, text)
    if "timeout_min" not in options:
        raise UserError("slurm: name the time limit of one trial in minutes, as in `slurm timeout_min=240`")
    if "cpus_per_task" in options:
        # Since SLURM 22.05, srun does not inherit this from sbatch.
        srun_args = options.setdefault("slurm_srun_args", [])
        if not any(word.startswith(("--cpus-per-task", "-c")) for word in srun_args):
            srun_args.append(f"--cpus-per-task={options['cpus_per_task']}")
    return options


def _checked(name: str, value: object, text: str) -> object:
    """Return the value of an option; one text becomes a list where submitit, which checks no such value, takes lists.

    It would take the letters of a text for words of the command line of ``srun``.
    """
    if name in _LISTS and isinstance(value, str):
        value = shlex.split(value) if name == "srun_args" else [value]
    if name in _LISTS and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise UserError(f"slurm: {name}: expected a text or a JSON list of texts, got '{text}'")
    if name == "additional_parameters" and not isinstance(value, dict):
        raise UserError(f"slurm: {name}: expected a JSON object of options of sbatch, got '{text}'")
    return value


class TrialJob:
    """The function that a job runs: one trial. submitit requeues it before its time limit."""

    def __init__(self, folder: SweepFolder, trial: Trial) -> None:
        self._folder, self._trial, self._engine = folder, trial, Local()

    def __call__(self) -> None:
        """Train and evaluate."""
        if self._folder.states([self._trial])[self._trial.name] == FINISHED:
            return
        with Interruptions() as interruptions:
            self._engine.begin(self._folder, [self._trial])
            try:
                while not self._engine.ended() and not interruptions.count:
                    time.sleep(0.1)
            finally:
                self._engine.end(interruptions)
        if interruptions.count:
            raise SystemExit(128 + interruptions.first)

    def checkpoint(self) -> DelayedSubmission:
        """Requeue the job; submitit calls this before the time limit. Training resumes from the last checkpoint."""
        from submitit.helpers import DelayedSubmission

        self._engine.end()
        return DelayedSubmission(TrialJob(self._folder, self._trial))


class Slurm:
    """Runs trials as jobs of one array; see ``sweep.Engine``.

    Args:
        folder: of the sweep; all nodes must see it.
        options: from :func:`read_options`.
        jobs: maximum number of trials at a time; None for no limit.

    Raises:
        UserError: submitit refuses an option.
    """

    pause = 1.0

    def __init__(self, folder: SweepFolder, options: Mapping[str, object], jobs: int | None = None) -> None:
        from submitit import AutoExecutor

        # The name of an arm can't begin with an underscore.
        self._folder, self._files = folder, folder.path / "_slurm"
        self._watched: dict[Trial, Job[None]] = {}
        cluster = os.environ.get(CLUSTER, "slurm")
        parameters = {"name": "stepjepa", **options, **({} if jobs is None else {"slurm_array_parallelism": jobs})}
        # -P as in LAUNCHER: a file in the working folder of the jobs must not shadow a module.
        python = {f"{cluster}_python": f"{shlex.quote(sys.executable)} -P"}
        try:
            self._executor = AutoExecutor(folder=self._files, cluster=cluster, **python)
            self._executor.update_parameters(**parameters)
        except (ValueError, TypeError, NameError, AssertionError, RuntimeError) as error:
            raise UserError(f"slurm: {one_line(error)}") from None

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Submit the trials; ``UserError`` if jobs of an earlier start may still run them."""
        import submitit

        if not trials:
            return
        job_class = submitit.SlurmJob if self._executor.cluster == "slurm" else submitit.LocalJob
        ids = [file.name.removesuffix("_submitted.pkl") for file in self._files.glob("*_submitted.pkl")]
        if running := [job.job_id for job in [job_class(self._files, job_id) for job_id in ids] if not job.done()]:
            fault = f"jobs of an earlier start have not ended ({', '.join(sorted(running)[:5])}); wait, or scancel them"
            raise UserError(f"{fault}; if the cluster has lost them, remove the folder", path=self._files)
        for trial in trials:
            # A failed trial that is submitted again is not failed any more.
            if folder.read_record(trial):
                folder.record(trial, BEGUN)
        absolute = SweepFolder(folder.path.resolve(), [], {}, folder.launcher)
        try:
            jobs = self._executor.submit_array([TrialJob(absolute, trial) for trial in trials])
        except (RuntimeError, OSError) as error:
            raise UserError(f"the jobs were refused ({one_line(error)}); change `slurm`") from None
        self._watched = dict(zip(trials, jobs, strict=True))
        print(f"slurm: {counted(len(jobs), 'job')} submitted, from {jobs[0].job_id}; logs in {self._files}", flush=True)

    def ended(self) -> list[Trial]:
        """Return the trials that have ended; one whose job ended without a result is recorded as failed."""
        ended = []
        for trial, job in list(self._watched.items()):
            # Ask for the job first: once it is done, its last record is written.
            done, status = job.done(), self._folder.read_record(trial).get("status")
            if done and status not in (FINISHED, FAILED):
                reason = f"job {job.job_id} ended ({job.state}) before the trial did: {self._folder.last_line(trial)}"
                self._folder.record(trial, FAILED, reason)
            if done or status in (FINISHED, FAILED):
                ended.append(trial)
                del self._watched[trial]
        return ended

    def end(self, interruptions: Interruptions) -> None:
        """Cancel the jobs that are left if the sweep was asked to end, or gave up since all would fail for one reason.

        They continue if only the terminal was closed, or an error of this process ends the sweep.
        """
        asked = interruptions.count and interruptions.first != signal.SIGHUP
        gave_up = not interruptions.count and sys.exception() is None
        if self._watched and (asked or gave_up):
            for job in self._watched.values():
                job.cancel(check=False)
            print(f"slurm: {counted(len(self._watched), 'job')} cancelled", flush=True)
