"""Train and evaluate the trials of a grid, on this machine or a cluster; a stopped sweep can be started again.

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
from stepjepa.base.terminal import duration
from stepjepa.store.folder import RUN_FILE
from stepjepa.store.record import versions
from stepjepa.study.evaluated_run import SUMMARY, SWEEP_FILE
from stepjepa.study.grid import Trial

# -P: as with the installed command, a file in the current folder must not shadow a module.
LAUNCHER = (sys.executable, "-P", "-m", "stepjepa")

EVALUATION = "test"
NEW, BEGUN, FAILED, FINISHED = "new", "begun", "failed", "finished"
"""States of a trial; a stopped or killed one is ``begun``. The next start runs every trial that is not finished."""

# Beginning of the reason of a trial whose settings or data were refused before the first step.
_REFUSED = "train failed with exit code 2: "

# Most changed settings that an error names.
_MOST_CHANGES = 4

# Seconds between SIGTERM and SIGKILL, in which a training saves a checkpoint.
_GRACE = 60.0

# Asks the kernel to kill this process when its parent ends, even by kill -9, and then executes the command.
# (A preexec_fn would do the same, but is not safe in a process with threads.)
_END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass
class SweepFolder:
    """The trials of a grid in one folder, and the state of each."""

    path: Path
    trials: Sequence[Trial]
    grid: JsonObject
    launcher: Sequence[str] = LAUNCHER  # program and arguments before ``train ...`` and ``evaluate ...``
    read_arguments: Callable[[list[str], Path], JsonObject] = lambda arguments, run: {}
    """Returns the settings of a run that 0.2.0 trained, from its recorded arguments and its folder."""

    def run_folder(self, trial: Trial) -> Path:
        """Return the folder of a trial's model and answers."""
        return self.path / trial.name

    def settings_file(self, trial: Trial) -> Path:
        """Return the file of a trial's training settings."""
        return self.path / f"{trial.name}.yaml"

    def write_settings(self, trial: Trial) -> None:
        """Write the settings of a trial's training for ``stepjepa train --config``."""
        import yaml

        with atomic_write(self.settings_file(trial)) as stream:
            yaml.safe_dump(trial.train, stream, sort_keys=False, allow_unicode=True, width=10**6)

    def log_file(self, trial: Trial) -> Path:
        """Return the file of the output of a trial's processes."""
        return self.path / f"{trial.name}.log"

    def command(self, trial: Trial, stage: str) -> list[str]:
        """Return the command line of ``train`` or ``evaluate``."""
        run = str(self.run_folder(trial))
        if stage == "train":
            settings = ["--config", str(self.settings_file(trial))]
            return [*self.launcher, stage, *settings, "--resume_from_checkpoint=auto", "--output_dir", run]
        paths = ["--model_path", run, "--output_file", f"{run}/{EVALUATION}.jsonl"]
        return [*self.launcher, stage, *trial.evaluate, *paths]

    def states(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Return the state of each trial by name; raise ``UserError`` if one has other flags or is of no sweep."""
        return {trial.name: self._state(trial) for trial in trials}

    def _state(self, trial: Trial) -> str:
        """Return the state of a trial; raise ``UserError`` if its folder holds another run."""
        run, record = self.run_folder(trial), self.read_record(trial)
        if not record:
            if run.exists() and (not run.is_dir() or any(run.iterdir())):
                raise UserError("is no run of this sweep; move it or name another `output_dir`", path=run)
            return NEW
        remedies = {"train": "change the grid back, or name another `output_dir`"}
        remedies["evaluate"] = (
            "change the grid back, or evaluate the trained runs again beside it: 'stepjepa evaluate ... --output_file "
            f"{run}/NAME.jsonl', which 'stepjepa compare --evaluation NAME' reads"
        )
        failed_early = record.get("status") == FAILED and not (run.exists() and any(run.iterdir()))
        same = {
            # A training or evaluation that failed before it wrote anything is corrected in the grid.
            "train": failed_early or self._trained_settings(record, run) in (None, trial.train),
            "evaluate": _by_flag(record.get("evaluate")) == _by_flag(trial.evaluate) or not self.has_answers(trial),
        }
        if changed := [stage for stage, is_same in same.items() if not is_same]:
            fault = f"was begun with other flags of 'stepjepa {changed[0]}' (they are in {run.name}.trial.json)"
            if changed[0] == "train":
                fault += f": {_changes(self._trained_settings(record, run) or {}, trial.train)}"
            raise UserError(f"{fault}; {remedies[changed[0]]}", path=run)
        if self.is_evaluated(trial):
            return FINISHED
        return FAILED if record.get("status") == FAILED else BEGUN

    def _trained_settings(self, record: Mapping[str, object], run: Path) -> JsonObject | None:
        """Return the settings that a trial was begun with; None if 0.2.0 began it and it has trained nothing."""
        recorded = record.get("train")
        if not isinstance(recorded, list):
            return recorded if isinstance(recorded, dict) else {}
        return self.read_arguments(recorded, run) if (run / RUN_FILE).is_file() else None

    def is_trained(self, trial: Trial) -> bool:
        """Return whether the training of a trial is finished."""
        return json_at(self.run_folder(trial) / RUN_FILE).get("status") == FINISHED

    def is_evaluated(self, trial: Trial) -> bool:
        """Return whether a trial is trained and evaluated."""
        return self.is_trained(trial) and bool(json_at(self.run_folder(trial) / f"{EVALUATION}{SUMMARY}"))

    def has_answers(self, trial: Trial) -> bool:
        """Return whether the evaluation of a trial has written a line."""
        answers = self.run_folder(trial) / f"{EVALUATION}.jsonl"
        return self.is_evaluated(trial) or (answers.is_file() and answers.stat().st_size > 0)

    def read_record(self, trial: Trial) -> JsonObject:
        """Return settings, flags and outcome of a trial; an empty dict if it was not begun."""
        return json_at(self.path / f"{trial.name}.trial.json")

    def failure(self, trial: Trial) -> str | None:
        """Return the reason why a trial that has ended is not finished, fit to be printed; None if it is finished."""
        record = self.read_record(trial)
        return None if record.get("status") == FINISHED else visible(str(record.get("reason", "unknown")))

    def record(self, trial: Trial, status: str, reason: str = "") -> None:
        """Write the status of a trial (``begun``, ``failed`` or ``finished``) and the reason."""
        content = {"name": trial.name, "status": status, "train": trial.train, "evaluate": trial.evaluate}
        write_json(self.path / f"{trial.name}.trial.json", content | ({"reason": reason} if reason else {}))

    def last_line(self, trial: Trial) -> str:
        """Return the last line of a trial's log that is no command line."""
        log = self.log_file(trial)
        lines = log.read_bytes()[-65536:].decode(errors="replace").split("\n") if log.exists() else []
        output = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("$ ")]
        return visible(output[-1][:300]) if output else "no output"


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the settings that changed, as ``name old -> new``."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    values = [[visible(str(each.get(name, "not set")))[:60] for each in (before, now)] for name in names]
    changes = [f"{name} {' -> '.join(pair)}" for name, pair in zip(names, values, strict=True)]
    more = [f"and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
    return ", ".join(changes[:_MOST_CHANGES] + more)


def _by_flag(arguments: object) -> set[str]:
    """Return each flag with its values; the order of the flags has no meaning."""
    words = map(str, arguments) if isinstance(arguments, list | tuple) else ()
    return {f"--{flag}" for flag in f" {' '.join(words)}".split(" --")[1:]}


class Engine(Protocol):
    """Runs trials: :class:`Local` on this machine, ``slurm.Slurm`` on a cluster."""

    pause: float  # seconds between two calls of ``ended``

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Start to run the unfinished trials of a folder, in this order."""

    def ended(self) -> list[Trial]:
        """Return the trials that have ended since the last call; their records hold the outcome."""

    def end(self, asked: Interruptions) -> None:
        """End the trials that still run: the sweep is done, or was interrupted."""


@dataclass
class Outcome:
    """Evaluated trials (of this or an earlier start), failed ones with the reason, the signal that ended the sweep."""

    finished: list[Trial]
    failed: dict[str, str]
    stopped: int = 0  # number of the signal; 0 if none ended the sweep

    def describe(self, count: int) -> list[str]:
        """Return lines on the trials, of ``count`` in all, that failed or did not run; equal failures share one."""
        lines = []
        for reason in dict.fromkeys(self.failed.values()):
            names = [name for name, other in self.failed.items() if other == reason]
            lines.append(f"failed: {', '.join(names)}: {reason}")
        unfinished = count - len(self.finished) - len(self.failed)
        if self.failed:
            remedy = "their logs are beside them; the same command retries"
            lines.append(f"{len(self.failed)} of {count} trials failed; {remedy}")
            if unfinished and not self.stopped:
                others = f"{unfinished} other {'trial was' if unfinished == 1 else 'trials were'} not run"
                lines.append(f"{others}, since every arm failed with this error: correct the grid or the data first")
        if self.stopped:
            lines.append(f"stopped with {unfinished} of {count} trials left; the same command continues it")
        return lines


def sweep(folder: SweepFolder, trials: Sequence[Trial], engine: Engine | None = None) -> Outcome:
    """Run the unfinished trials among ``trials``, by default on this machine, one after the other.

    The others are not begun once a trial of every combination was refused with the same error.

    Raises:
        UserError: another sweep is running in the folder, or see :meth:`SweepFolder.states`.
    """
    engine = Local() if engine is None else engine
    folder.path.mkdir(parents=True, exist_ok=True)
    with locked(folder.path), Interruptions() as interruptions:
        states, failed = folder.states(trials), dict[str, str]()
        waiting = [trial for trial in trials if states[trial.name] != FINISHED]
        # Seed by seed, so that a sweep that is stopped early can compare all arms.
        seeds = list(dict.fromkeys(trial.seed for trial in trials))
        waiting.sort(key=lambda trial: seeds.index(trial.seed))
        trial_list = [asdict(trial) for trial in folder.trials]
        write_json(folder.path / SWEEP_FILE, {"grid": folder.grid, "trials": trial_list, "versions": versions()})
        began, count = time.monotonic(), len(waiting)

        def end(trial: Trial) -> None:
            """Take a trial that ended off the list, and print its outcome and the time that the others may take."""
            waiting.remove(trial)
            if (reason := folder.failure(trial)) is not None:
                failed[trial.name] = reason
            outcome = FINISHED if reason is None else f"{reason} (log: {folder.log_file(trial)})"
            left = duration((time.monotonic() - began) * len(waiting) / (count - len(waiting)))
            outcome += f"; about {left} left" if waiting else ""
            print(f"[{len(trials) - len(waiting)}/{len(trials)}] {trial.name}: {outcome}", flush=True)

        try:
            engine.begin(folder, waiting)
            while waiting and not interruptions.count and not _is_refused_everywhere(trials, failed):
                for trial in engine.ended():
                    end(trial)
                time.sleep(engine.pause)
        finally:
            engine.end(interruptions)
    finished = [trial for trial in trials if trial not in waiting and trial.name not in failed]
    return Outcome(finished, failed, interruptions.first)


def _is_refused_everywhere(trials: Sequence[Trial], failed: Mapping[str, str]) -> bool:
    """Return whether a trial of each combination was refused, all for one reason, which its seed does not change."""
    reasons = set(failed.values())
    labels = {trial.label for trial in trials if trial.name in failed}
    return len(reasons) == 1 and reasons.pop().startswith(_REFUSED) and labels == {trial.label for trial in trials}


class Child:
    """A command in its own process group that writes to a log file and ends with this process."""

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
        # Returns the exit status (negative: the number of a signal), or None while it runs.
        self.ended = self._process.poll

    def send(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End the process and all that it started."""
        self.send(signal.SIGKILL)
        self._process.wait()


class _TrialRun:
    """A running trial, on this machine or in a job of a cluster: its training, then its evaluation."""

    def __init__(self, folder: SweepFolder, trial: Trial, environment: Mapping[str, str]) -> None:
        self.trial, self._folder, self._environment = trial, folder, environment
        folder.log_file(trial).parent.mkdir(parents=True, exist_ok=True)
        # Written before the run folder exists: the record shows that the folder belongs to this sweep.
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
        """Return whether the trial has ended, and record the outcome; start the evaluation after training."""
        code = self.child.ended()
        if code is None:
            return False
        if code == 0 and self._stage == "train":
            self._start("evaluate")
            return False
        if code == 0 and self._folder.is_evaluated(self.trial):
            self._folder.record(self.trial, FINISHED)
            return True
        # A program that cleans up after a signal reports it as exit code 128 + number, as a shell does.
        outcome = f"failed with exit code {code}" if code else "left no result"
        if (number := -code if code < 0 else code - 128) in signal.valid_signals():
            outcome = f"was ended by signal {number} ({signal.strsignal(number)})"
        self._folder.record(self.trial, FAILED, f"{self._stage} {outcome}: {self._folder.last_line(self.trial)}")
        return True


class Local:
    """Run trials in processes of this machine, ``jobs`` at a time, distributed over ``gpus``."""

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
        ended = []
        for slot in range(self.jobs):
            if slot in self._running:
                if self._running[slot].ended():
                    ended.append(self._running.pop(slot).trial)
            elif self._waiting:
                self._running[slot] = _TrialRun(self._folder, self._waiting.pop(0), self._environment(slot))
        return ended

    def _environment(self, slot: int) -> dict[str, str]:
        """Return the environment of the trial in a slot: its share of the cores, and one GPU if there are any."""
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", available))
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        return {"OMP_NUM_THREADS": str(max(1, cores // self.jobs)), **os.environ, **gpu}

    def end(self, asked: Interruptions | None = None) -> None:
        """See :class:`Engine`: end running trials by SIGTERM; after a minute, or a second interruption, by SIGKILL."""
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
    """Return the usable GPUs, as ``CUDA_VISIBLE_DEVICES`` would name them, without initialising CUDA."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
