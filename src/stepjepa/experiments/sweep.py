"""Train and evaluate the trials of a grid, on this machine or a cluster; a sweep can be stopped and started again."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, NamedTuple, Protocol

from stepjepa.experiments.grid import Trial
from stepjepa.experiments.report import as_text, report
from stepjepa.experiments.sweep_folder import (
    EVALUATED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RESTARTED,
    RESUMED,
    RUNNING,
    SweepFolder,
)
from stepjepa.files import locked
from stepjepa.signals import Interruptions

# A trial that one of these ended has not failed: it continues at the next start.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Seconds that a process may take to end by itself: a training saves a checkpoint.
_GRACE = 60.0

# Has the kernel kill a process when its parent ends, even by kill -9, and then becomes the command.
# (A preexec_fn would do the same, but is not safe in a process with threads.)
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class Ending(NamedTuple):
    """How a trial ended: ``finished``, ``failed`` or ``interrupted``, and the reason on one line."""

    status: str
    reason: str = ""


class Engine(Protocol):
    """Runs trials: :class:`Local` on this machine, ``slurm.Slurm`` on a cluster."""

    @property
    def busy(self) -> int:
        """How many have not ended, running or waiting."""

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Take the unfinished trials of a folder, in the order in which to begin them."""

    def ended(self) -> list[tuple[Trial, Ending]]:
        """Those that have ended since the last call, which is not long ago."""

    def end(self, asked: Interruptions) -> None:
        """The sweep ends, because all is done or because it was asked to."""


@dataclass
class Outcome:
    """What became of the trials.

    Attributes:
        finished: those that are trained and evaluated, now or before.
        failed: those that are not, each with the reason, on one line.
        stopped: the signal that ended the sweep, 0 if none did.
    """

    finished: list[Trial] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: int = 0


def sweep(
    folder: SweepFolder, trials: Sequence[Trial], engine: Engine | None = None, *, retry_failed: bool = False
) -> Outcome:
    """Run the unfinished ones of some trials.

    Args:
        folder: of the sweep.
        trials: which.
        engine: runs them; by default this machine, one after the other.
        retry_failed: run those again that failed.

    Raises:
        UserError: another sweep is running in the folder, or see :meth:`SweepFolder.state`.
    """
    engine = Local() if engine is None else engine
    folder.states(trials)
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path, "stepjepa sweep"), Interruptions() as asked:
        states = folder.states(trials)
        outcome = Outcome([trial for trial in trials if states[trial.name] == FINISHED])
        if not retry_failed:
            outcome.failed = {t.name: folder.reason(t) for t in trials if states[t.name] == FAILED}
        left = [trial for trial in trials if trial not in outcome.finished and trial.name not in outcome.failed]
        # Seed by seed, so that a sweep that is stopped early has all arms to compare.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        folder.write_grid()
        try:
            engine.begin(folder, sorted(left, key=lambda trial: seeds.index(trial.seed)))
            while engine.busy and not asked.count:
                for trial, ending in engine.ended():
                    if ending.status == FINISHED:
                        outcome.finished.append(trial)
                        said = "finished"
                    else:
                        outcome.failed[trial.name] = ending.reason
                        said = f"{ending.reason} (log: {folder.log_file(trial)})"
                    count = len(outcome.finished) + len(outcome.failed)
                    print(f"[{count}/{len(trials)}] {trial.name}: {said}", flush=True)
                time.sleep(0.05)
        finally:
            engine.end(asked)
    outcome.stopped = asked.first
    outcome.finished.sort(key=list(trials).index)
    return outcome


def table(folder: SweepFolder, trials: Sequence[Trial]) -> str:
    """Finished trials as ``stepjepa report`` shows them, under their names.

    Raises:
        UserError: they were evaluated on different files.
    """
    rows = report([folder.run_folder(trial) for trial in trials])
    return as_text([{**row, "run": trial.name} for row, trial in zip(rows, trials, strict=True)])


class Child:
    """A command in a process group of its own, whose output goes to a log file and which ends with this process.

    Args:
        command: program and arguments.
        log: open for appending.
        environment: of the process.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> None:
        wrapper = []
        if sys.platform.startswith("linux"):
            wrapper = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())]
        self._process = subprocess.Popen(
            [*wrapper, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )

    def ended(self) -> int | None:
        """The exit status, a signal's number negated; None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait for its end."""
        self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class TrialRun:
    """A running trial: first its training, then its evaluation; the same on this machine and in a job of a cluster."""

    def __init__(self, folder: SweepFolder, trial: Trial, environment: Mapping[str, str]) -> None:
        self.trial, self._folder, self._environment = trial, folder, environment
        folder.log_file(trial).parent.mkdir(parents=True, exist_ok=True)
        step = folder.next_step(trial)
        # Before the run folder is there, so that the folder can be told to be ours.
        folder.record(trial, RUNNING)
        if step == RESTARTED:
            folder.set_aside(trial)
        more = ("--resume_from_checkpoint", "last") if step == RESUMED else ()
        self._start("evaluate" if step == EVALUATED else "train", *more)

    def _start(self, stage: str, *more: str) -> None:
        command = [*self._folder.command(self.trial, stage), *more]
        with self._folder.log_file(self.trial).open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._stage, self.child = stage, Child(command, log, self._environment)

    def ended(self) -> Ending | None:
        """How it ended; None while it runs."""
        code = self.child.ended()
        if code is None:
            return None
        if code == 0 and self._stage == "train":
            self._start("evaluate")
            return None
        ending = self._ending(code)
        self._folder.record(self.trial, ending.status, ending.reason)
        return ending

    def _ending(self, code: int) -> Ending:
        if code == 0 and self._folder.is_evaluated(self.trial):
            return Ending(FINISHED)
        # A program that cleans up before it ends gives the signal by its exit code, as a shell would.
        number = -code if code < 0 else code - 128
        if code < 0 or number in _FROM_OUTSIDE:
            how = f"was ended by signal {number} ({signal.strsignal(number)})"
        else:
            how = f"failed with exit code {code}" if code else "left no result"
        reason = f"{self._stage} {how}: {self._folder.last_line(self.trial)}"
        return Ending(INTERRUPTED if number in _FROM_OUTSIDE else FAILED, reason)


class Local:
    """Trials in processes of this machine.

    Args:
        jobs: how many run at a time.
        gpus: names of the GPUs to spread them over.
    """

    def __init__(self, jobs: int = 1, gpus: Sequence[str] = ()) -> None:
        self._jobs, self._gpus = jobs, gpus
        self._waiting: deque[Trial] = deque()
        self._running: dict[int, TrialRun] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """See :class:`Engine`."""
        self._folder = folder
        self._waiting.extend(trials)

    @property
    def busy(self) -> int:
        """See :class:`Engine`."""
        return len(self._waiting) + len(self._running)

    def ended(self) -> list[tuple[Trial, Ending]]:
        """See :class:`Engine`; also begins trials in the free slots."""
        found = []
        for slot in range(self._jobs):
            if slot not in self._running and self._waiting:
                environment = trial_environment(slot, self._jobs, self._gpus)
                self._running[slot] = TrialRun(self._folder, self._waiting.popleft(), environment)
            elif slot in self._running and (ending := self._running[slot].ended()) is not None:
                found.append((self._running.pop(slot).trial, ending))
        return found

    def end(self, asked: Interruptions | None = None) -> None:
        """See :class:`Engine`: ends what is still running by SIGTERM, after a minute or a second request by SIGKILL."""
        children = [run.child for run in self._running.values()]
        for child in children:
            child.send(signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while any(child.ended() is None for child in children) and time.monotonic() < until:
            if asked is not None and asked.count > 1:
                break
            time.sleep(0.02)
        for child in children:
            # What a process started must not outlive it.
            child.send(signal.SIGKILL)
            child.wait()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` would name them; found without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a driver that does not answer: no GPU that could be used
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def trial_environment(slot: int, jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of the trial in a slot of ``jobs``: its share of the cores, and one GPU where there are any."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = int(os.environ.get("SLURM_CPUS_PER_TASK", available))
    result = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
    if gpus:
        result["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return result
