"""Trials as jobs of a SLURM cluster: each job trains and evaluates one, and the sweep watches.

What keeps a trial from being at work twice: its record names a token, the sweep writes a new one before it hands a job
in, and a job whose token is not there any more does nothing. So a sweep that is killed while it hands jobs in may hand
them in again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepjepa.errors import UserError
from stepjepa.experiments.cluster import Cluster, queue
from stepjepa.experiments.grid import Trial
from stepjepa.experiments.processes import trial_environment
from stepjepa.experiments.sweep_folder import FAILED, FINISHED, INTERRUPTED, RUNNING, SUBMITTED, SweepFolder
from stepjepa.experiments.trial_run import Ending, TrialRun, end_all
from stepjepa.files import write_json
from stepjepa.signals import Interruptions

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

# Seconds between two looks at the records, and between two questions to the queue, which many share.
_LOOK, _ASK = 1.0, 30.0

# Seconds in which a cancelled job has ended; SLURM kills what is still there after 30.
_ENDS_WITHIN = 90.0


class TrialJob:
    """What a job does: see :class:`TrialRun`. Before its time is up it is put back into the queue, to go on later.

    Args:
        folder: of the sweep.
        trial: which.
        token: that the trial's record must name.
    """

    def __init__(self, folder: SweepFolder, trial: Trial, token: str) -> None:
        self._folder, self._trial, self._token = folder, trial, token
        self._run: TrialRun | None = None

    def __call__(self) -> str:
        """Train and evaluate; returns what became of the trial."""
        from submitit import JobEnvironment

        if self._folder.read_record(self._trial).get("token") != self._token:
            return "given to another job"
        environment = trial_environment(0, 1, ())
        if "SLURM_CPUS_PER_TASK" in os.environ:
            environment["OMP_NUM_THREADS"] = os.environ["SLURM_CPUS_PER_TASK"]
        with Interruptions() as asked:
            try:
                self._run = TrialRun(
                    self._folder, self._trial, environment, token=self._token, job=JobEnvironment().job_id
                )
            except UserError as error:
                self._folder.record(self._trial, INTERRUPTED, token=self._token, reason=str(error))
                return INTERRUPTED
            ending = None
            try:
                while (ending := self._run.ended()) is None and not asked.count:
                    time.sleep(0.1)
            finally:
                if ending is None:
                    end_all([self._run], lambda: asked.count > 1)
        if ending is None:
            # Cancelled, or preempted and perhaps put back into the queue.
            self._run.write(SUBMITTED)
            raise SystemExit(128 + asked.first)
        return ending.status

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit when the time is nearly up; the training goes on from its last checkpoint."""
        from submitit.helpers import DelayedSubmission

        if self._run is not None:
            end_all([self._run], lambda: False)
            self._run.write(SUBMITTED)
        return DelayedSubmission(TrialJob(self._folder, self._trial, self._token))


@dataclass
class _Watched:
    """A trial that a job has been handed in for.

    Attributes:
        trial: which.
        token: see :class:`TrialJob`.
        job: its id.
        missed: how often the queue was asked and had it no more.
    """

    trial: Trial
    token: str
    job: str
    missed: int = 0


class Slurm:
    """Trials as jobs.

    Args:
        cluster: where.
        look: seconds between two looks at the records.
        ask: seconds between two questions to the queue.
    """

    places = None

    def __init__(self, cluster: Cluster, look: float = _LOOK, ask: float = _ASK) -> None:
        self._cluster, self._look, self._ask = cluster, look, ask
        self._looked, self._asked = 0.0, time.monotonic()
        self._watched: dict[str, _Watched] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial], lock: int | None) -> None:
        """See :class:`Engine`: jobs of an earlier start that are still there are watched, the others handed in.

        Raises:
            UserError: the queue can't be asked, jobs are refused, or cancelled ones don't end.
        """
        self._folder = folder
        jobs = jobs_of(folder, trials)
        states = self._cluster.states(jobs.values()) if jobs else {}
        there = {name: job for name, job in jobs.items() if not self._cluster.is_over(states.get(job))}
        left = []
        ending = []
        for trial in trials:
            record = folder.read_record(trial)
            if trial.name not in there:
                left.append(trial)
            elif record.get("token"):
                self._watched[trial.name] = _Watched(trial, record["token"], there[trial.name])
            else:
                left.append(trial)
                ending.append(there[trial.name])
        if self._watched:
            print(f"slurm: {_count(self._watched)} of an earlier start still there", flush=True)
        if ending:
            print(f"slurm: {_count(ending)} cancelled earlier still ending; waiting", flush=True)
            self._wait_for(ending)
        if left:
            self._submit(left)

    def _submit(self, trials: Sequence[Trial]) -> None:
        tokens = [uuid.uuid4().hex for _ in trials]
        before = [self._folder.read_record(trial) for trial in trials]
        functions = []
        for trial, token in zip(trials, tokens, strict=True):
            # Before there is a job that could look for it.
            self._folder.record(trial, SUBMITTED, token=token)
            alone = SweepFolder(self._folder.path.resolve(), [trial], {}, self._folder.launcher)
            functions.append(TrialJob(alone, trial, token))
        try:
            found = self._cluster.submit(functions)
        except UserError:
            for trial, record in zip(trials, before, strict=True):
                self._folder.restore(trial, record)
            raise
        _note_jobs(self._folder, dict(zip(tokens, found, strict=True)))
        for trial, token, job in zip(trials, tokens, found, strict=True):
            self._watched[trial.name] = _Watched(trial, token, job)
        print(
            f"slurm: {_count(found)} handed in ({found[0]}{f' to {found[-1]}' if len(found) > 1 else ''}); their "
            f"own words are in {self._folder.jobs_folder}",
            flush=True,
        )

    def _wait_for(self, jobs: Sequence[str], patience: float = _ENDS_WITHIN) -> None:
        """Until cancelled jobs have ended."""
        until = time.monotonic() + patience
        while jobs:
            states = self._cluster.states(jobs)
            jobs = [job for job in jobs if not self._cluster.is_over(states.get(job))]
            if jobs and time.monotonic() > until:
                raise UserError(f"cancelled jobs don't end ({', '.join(jobs)}); look at squeue, and try again later")
            time.sleep(self._look if jobs else 0)

    @property
    def busy(self) -> int:
        """See :class:`Engine`."""
        return len(self._watched)

    def at_work(self) -> list[Trial]:
        """See :class:`Engine`."""
        records = [(each, self._folder.read_record(each.trial)) for each in self._watched.values()]
        return [
            each.trial
            for each, record in records
            if record.get("token") == each.token and record.get("status") == RUNNING
        ]

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`."""
        if time.monotonic() < self._looked + self._look:
            return []
        found = {name: ending for name, each in self._watched.items() if (ending := self._ending(each)) is not None}
        if time.monotonic() > self._asked + self._ask:
            found = self._lost() | found
            self._asked = time.monotonic()
        self._looked = time.monotonic()
        return [(self._watched.pop(name).trial, ending) for name, ending in found.items()]

    def _ending(self, watched: _Watched) -> Ending | None:
        """What the job has written down, if that is final; a trial that was interrupted may go on in the same job."""
        record = self._folder.read_record(watched.trial)
        if record.get("token") != watched.token or record.get("status") not in (FINISHED, FAILED):
            return None
        return Ending(record["status"], record.get("reason", ""), record.get("seconds"))

    def _lost(self) -> dict[str, Ending]:
        """Jobs that have ended before their trials: out of memory, out of time, cancelled by somebody else."""
        try:
            states = self._cluster.states([each.job for each in self._watched.values()])
        except UserError:
            # A controller that is overloaded for a while is no reason to give up.
            return {}
        found = {}
        for name, each in self._watched.items():
            state = states.get(each.job)
            each.missed = each.missed + 1 if self._cluster.is_over(state) else 0
            # Its last words may be on their way here, over the network.
            if each.missed > 1 and self._ending(each) is None:
                words = self._folder.last_line(each.trial) if self._folder.log_file(each.trial).exists() else "no log"
                words = self._folder.read_record(each.trial).get("reason", words)
                reason = f"job {each.job} ended ({state or 'unknown to SLURM'}) before the trial did: {words}"
                self._folder.record(each.trial, INTERRUPTED, reason=reason, job=each.job)
                found[name] = Ending(INTERRUPTED, reason)
        return found

    def end(self, asked: Interruptions) -> None:
        """See :class:`Engine`: jobs are cancelled, but go on where it is only the terminal that is gone."""
        if not self._watched or not asked.count:
            return
        jobs = [each.job for each in self._watched.values()]
        if asked.first == signal.SIGHUP:
            # To a terminal that is gone nothing can be said.
            with contextlib.suppress(OSError):
                print(f"slurm: {_count(jobs)} left to go on; the same command watches again", flush=True)
            return
        for each in self._watched.values():
            # Without a token: it is no longer theirs.
            self._folder.record(each.trial, INTERRUPTED, reason="cancelled with the sweep", job=each.job)
        self._cluster.cancel(jobs)
        print(f"slurm: {_count(jobs)} cancelled", flush=True)


def _count(jobs: Sized) -> str:
    return f"{len(jobs)} job{'s' if len(jobs) > 1 else ''}"


def _note_jobs(folder: SweepFolder, jobs: dict[str, str]) -> None:
    """Which job has which token; written by the sweep alone, while jobs write the records."""
    write_json(folder.jobs_folder / "jobs.json", {**_noted_jobs(folder), **jobs})


def _noted_jobs(folder: SweepFolder) -> dict[str, str]:
    try:
        found = json.loads((folder.jobs_folder / "jobs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    jobs = found if isinstance(found, dict) else {}
    return {token: job for token, job in jobs.items() if isinstance(job, str)}


def jobs_of(folder: SweepFolder, trials: Sequence[Trial]) -> dict[str, str]:
    """The jobs last handed in for trials that are not finished, be they there still or not: ids by names of trials."""
    noted, found = _noted_jobs(folder), {}
    for trial in trials:
        record = folder.read_record(trial)
        job = record.get("job") or noted.get(record.get("token", ""))
        if job is not None and record.get("status") in (SUBMITTED, RUNNING, INTERRUPTED):
            found[trial.name] = job
    return found


def refuse_jobs(folder: SweepFolder, trials: Sequence[Trial]) -> None:
    """Refuse to begin trials on this machine that a cluster is at work on.

    Raises:
        UserError: there is one.
    """
    jobs = jobs_of(folder, trials)
    if not jobs:
        return
    try:
        states = queue()
    except UserError:
        # Not a machine from which jobs are handed in; the lock of the log still keeps two apart.
        return
    for name, job in jobs.items():
        if not Cluster.is_over(states.get(job)):
            raise UserError(
                f"{name} is in SLURM's queue as job {job}; go on with --engine slurm, or scancel it", path=folder.path
            )
