"""Run trials in processes of this machine, as ``slurm`` does on a cluster."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from stepjepa.base.processes import usable_cores
from stepjepa.base.signals import Interruptions
from stepjepa.study.grid import Trial
from stepjepa.study.sweep_folder import SweepFolder
from stepjepa.study.trial_record import BEGUN, FAILED, FINISHED

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

    def exit_code(self) -> int | None:
        """Return the exit code, negative for the number of a signal; None while the process runs."""
        return self._process.poll()

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
        code = self.child.exit_code()
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
    """Runs trials in processes of this machine.

    Args:
        jobs: number of trials at a time.
        gpus: the GPUs that they share, as ``CUDA_VISIBLE_DEVICES`` names them; empty for the environment's.
    """

    pause = 0.05

    def __init__(self, jobs: int = 1, gpus: Sequence[str] = ()) -> None:
        self.jobs, self.gpus = jobs, gpus
        self._waiting: list[Trial] = []
        self._running: dict[int, _TrialRun] = {}

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """See ``sweep.Engine``."""
        self._folder, self._waiting = folder, list(trials)

    def ended(self) -> list[Trial]:
        """See ``sweep.Engine``; also begins trials in the free slots."""
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
        cores = int(os.environ.get("SLURM_CPUS_PER_TASK", usable_cores()))
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[slot % len(self.gpus)]} if self.gpus else {}
        return {"OMP_NUM_THREADS": str(max(1, cores // self.jobs)), **os.environ, **gpu}

    def end(self, interruptions: Interruptions | None = None) -> None:
        """See ``sweep.Engine``: end running trials by SIGTERM; after a minute, or a second interruption, by SIGKILL."""
        children = [run.child for run in self._running.values()]
        for child in children:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(child.exit_code() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.02)
            if interruptions is not None and interruptions.count > 1:
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
