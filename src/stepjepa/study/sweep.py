"""Train and evaluate the trials of a grid, on this machine or a cluster; a sweep can be stopped and started again.

sweep.json                     the grid, all its trials, versions
_slurm/                        files of submitit, where trials are jobs
<label>/seed82/                run folder, with the evaluation in test.jsonl
<label>/seed82.yaml            the settings of the training, as stepjepa train --config reads them
<label>/seed82.trial.json      settings and flags, and how the trial ended
<label>/seed82.log             output of its processes
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from stepjepa.base.errors import UserError, visible
from stepjepa.base.files import atomic_write, json_at, locked, write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.base.signals import Interruptions
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import versions
from stepjepa.study.evaluated_run import SUMMARY, SWEEP_FILE
from stepjepa.study.grid import Trial

# -P: as for the installed command, no file in the current folder takes the place of a module.
LAUNCHER = (sys.executable, "-P", "-m", "stepjepa")

EVALUATION = "test"
NEW, BEGUN, FAILED, FINISHED = "new", "begun", "failed", "finished"
"""States of a trial; one that was stopped or killed is ``begun``. The next start goes on with all but the last."""

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


@dataclass
class SweepFolder:
    """The trials of a grid in one folder, and what has been done of each."""

    path: Path
    trials: Sequence[Trial]
    grid: JsonObject
    launcher: Sequence[str] = LAUNCHER  # program and first arguments, which ``train ...`` and ``evaluate ...`` follow
    read_arguments: Callable[[list[str], Path], JsonObject] = lambda arguments, run: {}
    """Returns the settings of a trained run of 0.2.0, of the arguments that were recorded of it and its folder."""

    def run_folder(self, trial: Trial) -> Path:
        """Where a trial's model and answers are."""
        return self.path / trial.name

    def settings_file(self, trial: Trial) -> Path:
        """Where the settings of a trial's training are."""
        return self.path / f"{trial.name}.yaml"

    def write_settings(self, trial: Trial) -> None:
        """Write the settings of a trial's training for ``stepjepa train --config``."""
        import yaml

        with atomic_write(self.settings_file(trial)) as stream:
            yaml.safe_dump(trial.train, stream, sort_keys=False, allow_unicode=True, width=10**6)

    def log_file(self, trial: Trial) -> Path:
        """What a trial's processes have written."""
        return self.path / f"{trial.name}.log"

    def command(self, trial: Trial, stage: str) -> list[str]:
        """The command line of ``train`` or ``evaluate``."""
        run = str(self.run_folder(trial))
        if stage == "train":
            settings = ["--config", str(self.settings_file(trial))]
            return [*self.launcher, stage, *settings, "--resume_from_checkpoint=auto", "--output_dir", run]
        where = ["--model_path", run, "--output_file", f"{run}/{EVALUATION}.jsonl"]
        return [*self.launcher, stage, *trial.evaluate, *where]

    def states(self, trials: Sequence[Trial]) -> dict[str, str]:
        """The state of each trial, by name; ``UserError`` if one was made with other flags, or not by a sweep."""
        return {trial.name: self._state(trial) for trial in trials}

    def _state(self, trial: Trial) -> str:
        run, record = self.run_folder(trial), self.read_record(trial)
        if not record:
            if run.exists() and (not run.is_dir() or any(run.iterdir())):
                raise UserError("is no run of this sweep; move it or name another --output_dir", path=run)
            return NEW
        same = {
            "train": self._trained_settings(record, run) in (None, trial.train),
            "evaluate": _by_flag(record.get("evaluate")) == _by_flag(trial.evaluate),
        }
        if changed := [stage for stage, is_same in same.items() if not is_same]:
            fault = f"was begun with other flags of 'stepjepa {changed[0]}' (they are in {run.name}.trial.json)"
            raise UserError(f"{fault}; change the grid back, or name another --output_dir", path=run)
        if self.is_evaluated(trial):
            return FINISHED
        return FAILED if record.get("status") == FAILED else BEGUN

    def _trained_settings(self, record: Mapping[str, object], run: Path) -> JsonObject | None:
        """Return the settings that a trial was begun with; None for one of 0.2.0 that has trained nothing."""
        recorded = record.get("train")
        if not isinstance(recorded, list):
            return recorded if isinstance(recorded, dict) else {}
        return self.read_arguments(recorded, run) if (run / RUN_FILE).is_file() else None

    def is_trained(self, trial: Trial) -> bool:
        """Whether a training is finished."""
        return json_at(self.run_folder(trial) / RUN_FILE).get("status") == FINISHED

    def is_evaluated(self, trial: Trial) -> bool:
        """Whether a trial is trained and evaluated."""
        return self.is_trained(trial) and bool(json_at(self.run_folder(trial) / f"{EVALUATION}{SUMMARY}"))

    def read_record(self, trial: Trial) -> JsonObject:
        """The flags of a trial and how it ended; empty where it was not begun."""
        return json_at(self.path / f"{trial.name}.trial.json")

    def record(self, trial: Trial, status: str, reason: str = "") -> None:
        """Write down that a trial is ``begun``, ``failed`` or ``finished``, and the reason."""
        known = {"name": trial.name, "status": status, "train": trial.train, "evaluate": trial.evaluate}
        write_json(self.path / f"{trial.name}.trial.json", known | ({"reason": reason} if reason else {}))

    def last_line(self, trial: Trial) -> str:
        """The last line that a trial has written."""
        log = self.log_file(trial)
        lines = log.read_bytes()[-65536:].decode(errors="replace").split("\n") if log.exists() else []
        said = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("$ ")]
        return visible(said[-1][:300]) if said else "no output"


def _by_flag(arguments: object) -> set[str]:
    """Return each flag with its values; the order of the flags has no meaning."""
    words = map(str, arguments) if isinstance(arguments, list | tuple) else ()
    return {f"--{flag}" for flag in f" {' '.join(words)}".split(" --")[1:]}


class Engine(Protocol):
    """Runs trials: :class:`Local` on this machine, ``slurm.Slurm`` on a cluster."""

    pause: float  # seconds between two calls of ``ended``

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Take the unfinished trials of a folder, in the order in which to begin them."""

    def ended(self) -> list[Trial]:
        """Those that have ended since the last call; their records say how."""

    def end(self, asked: Interruptions) -> None:
        """The sweep ends, because all is done or because it was asked to."""


@dataclass
class Outcome:
    """Trials that are evaluated, now or before; the others with the reason; the signal that ended the sweep, or 0."""

    finished: list[Trial]
    failed: dict[str, str]
    stopped: int = 0


def sweep(folder: SweepFolder, trials: Sequence[Trial], engine: Engine | None = None) -> Outcome:
    """Run the unfinished ones of some trials, by default on this machine, one after the other.

    Raises:
        UserError: another sweep is running in the folder, or see :meth:`SweepFolder.states`.
    """
    engine = Local() if engine is None else engine
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path), Interruptions() as asked:
        states, failed = folder.states(trials), dict[str, str]()
        left = [trial for trial in trials if states[trial.name] != FINISHED]
        # Seed by seed, so that a sweep that is stopped early has all arms to compare.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        left.sort(key=lambda trial: seeds.index(trial.seed))
        told = [asdict(trial) for trial in folder.trials]
        write_json(folder.path / SWEEP_FILE, {"grid": folder.grid, "trials": told, "versions": versions()})
        try:
            engine.begin(folder, left)
            while left and not asked.count:
                for trial in engine.ended():
                    left.remove(trial)
                    said, record = FINISHED, folder.read_record(trial)
                    if record.get("status") != FINISHED:
                        failed[trial.name] = visible(str(record.get("reason", "unknown")))
                        said = f"{failed[trial.name]} (log: {folder.log_file(trial)})"
                    print(f"[{len(trials) - len(left)}/{len(trials)}] {trial.name}: {said}", flush=True)
                time.sleep(engine.pause)
        finally:
            engine.end(asked)
    finished = [trial for trial in trials if trial not in left and trial.name not in failed]
    return Outcome(finished, failed, asked.first)


class Child:
    """A command in a process group of its own, whose output goes to a log file and which ends with this process."""

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> None:
        if sys.platform.startswith("linux"):
            command = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        # The exit status, a signal's number negated; None while it runs.
        self.ended = self._process.poll

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and all that it started."""
        self.send(signal.SIGKILL)
        self._process.wait()


class _TrialRun:
    """A running trial: first its training, then its evaluation; the same on this machine and in a job of a cluster."""

    def __init__(self, folder: SweepFolder, trial: Trial, environment: Mapping[str, str]) -> None:
        self.trial, self._folder, self._environment = trial, folder, environment
        folder.log_file(trial).parent.mkdir(parents=True, exist_ok=True)
        # Before the run folder is there, so that the folder can be told to be ours.
        folder.record(trial, BEGUN)
        folder.write_settings(trial)
        self._start("evaluate" if folder.is_trained(trial) else "train")

    def _start(self, stage: str) -> None:
        command = self._folder.command(self.trial, stage)
        with self._folder.log_file(self.trial).open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self._stage, self.child = stage, Child(command, log, self._environment)

    def ended(self) -> bool:
        """Whether it has ended; its record then says how."""
        code = self.child.ended()
        if code is None:
            return False
        if code == 0 and self._stage == "train":
            self._start("evaluate")
            return False
        if code == 0 and self._folder.is_evaluated(self.trial):
            self._folder.record(self.trial, FINISHED)
            return True
        # A program that cleans up before it ends gives the signal by its exit code, as a shell would.
        how = f"failed with exit code {code}" if code else "left no result"
        if (number := -code if code < 0 else code - 128) in signal.valid_signals():
            how = f"was ended by signal {number} ({signal.strsignal(number)})"
        self._folder.record(self.trial, FAILED, f"{self._stage} {how}: {self._folder.last_line(self.trial)}")
        return True


class Local:
    """Trials in processes of this machine, ``jobs`` at a time, spread over the GPUs that are named."""

    pause = 0.05

    def __init__(self, jobs: int = 1, gpus: Sequence[str] = ()) -> None:
        self.jobs, self.gpus = jobs, gpus
        self._waiting: list[Trial] = []
        self._running: dict[int, _TrialRun] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """See :class:`Engine`."""
        self._folder, self._waiting = folder, list(trials)

    def ended(self) -> list[Trial]:
        """See :class:`Engine`; also begins trials in the free slots."""
        found = []
        for slot in range(self.jobs):
            if slot in self._running:
                if self._running[slot].ended():
                    found.append(self._running.pop(slot).trial)
            elif self._waiting:
                self._running[slot] = _TrialRun(self._folder, self._waiting.pop(0), self._environment(slot))
        return found

    def _environment(self, slot: int) -> dict[str, str]:
        """Of the trial in a slot: its share of the cores, and one GPU where there are any."""
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", available))
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        return {"OMP_NUM_THREADS": str(max(1, cores // self.jobs)), **os.environ, **gpu}

    def end(self, asked: Interruptions | None = None) -> None:
        """See :class:`Engine`: ends what is still running by SIGTERM, after a minute or a second request by SIGKILL."""
        children = [run.child for run in self._running.values()]
        for child in children:
            child.send(signal.SIGTERM)
        until = time.monotonic() + _GRACE
        while any(child.ended() is None for child in children) and time.monotonic() < until:
            time.sleep(0.02)
            if asked is not None and asked.count > 1:
                break
        for child in children:
            child.kill()


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` would name them; found without loading CUDA."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
