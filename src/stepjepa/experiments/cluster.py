"""SLURM, through submitit: what is asked of it, how jobs are handed in, what they are doing, how they are cancelled.

``submitit`` is an optional dependency and imported only here, when a cluster is asked for.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepjepa.errors import UserError

CLUSTER = "STEPJEPA_SUBMITIT_CLUSTER"
"""Environment variable that names another of submitit's executors than ``slurm``: the tests set ``local``, which runs
jobs as processes of this machine."""

# States in which a job is over; a job in any other is waiting, at work, or on its way to one of these.
_OVER = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "REVOKED")
)

# A trial is one process on one node, and --jobs says how many run at a time.
_OURS = ("nodes", "ntasks_per_node", "tasks_per_node", "array_parallelism", "map_count", "use_srun", "num_gpus")

_MINUTES = ("timeout_min", "time")

# How often a job whose time is up is put back into the queue: the one option that the executor is made with.
_TIMES = "slurm_max_num_timeout"


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as parameters of submitit's ``AutoExecutor``, named as there or as ``sbatch`` names them.

    Args:
        words: ``partition=gpu``, ``slurm_partition=gpu``, ``time=4:00:00``, ``mem_gb=32``, ``gpus_per_node=1``; a value
            that is JSON is read as such, anything else is text.

    Returns:
        Generic names as they are, those of SLURM with ``slurm_`` before them; ``timeout_min`` in minutes, always
        there.

    Raises:
        UserError: submitit is not installed, a word has no ``=``, a name is unknown, there twice or not for the user
            to set, a value is of the wrong kind, or no time limit is named.
    """
    AutoExecutor, SlurmExecutor = _executors()  # noqa: N806  # classes
    generic, special = AutoExecutor._typed_parameters(), SlurmExecutor._valid_parameters()
    names = sorted({*generic, *special, _TIMES.removeprefix("slurm_")} - set(_OURS))
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_").removeprefix("slurm_")
        if not equals:
            raise UserError(f"--slurm: expected KEY=VALUE, got '{word}'; write partition=gpu, say")
        if name in _OURS:
            raise UserError(f"--slurm: {name} is set by the sweep itself; leave it out{_instead(name)}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"--slurm: submitit has no parameter '{name}'; {hint}")
        value = _minutes(text) if name in _MINUTES else _value(text)
        full = "timeout_min" if name in _MINUTES else name if name in generic else f"slurm_{name}"
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
            "--engine slurm hands jobs in through submitit, which is not installed; pip install submitit"
        ) from None
    return AutoExecutor, SlurmExecutor


def _instead(name: str) -> str:
    return "; --jobs N says how many run at a time" if name == "array_parallelism" else ""


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
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
    found = int(days or 0) * 1440 + hours * 60 + minutes + -(-seconds // 60)
    if not found:
        raise UserError(f"--slurm: a time limit of nothing leaves no time to train, got '{text}'")
    return found


class Cluster:
    """Jobs of one sweep.

    Args:
        folder: for what submitit writes; seen from all nodes.
        options: see :func:`read_options`.
        jobs: how many run at a time; None leaves it to submitit.

    Raises:
        UserError: there is no SLURM here, or submitit does not take the options.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], jobs: int | None = None) -> None:
        AutoExecutor, _ = _executors()  # noqa: N806  # a class
        self._name = os.environ.get(CLUSTER, "slurm")
        if self._name == "slurm" and not all(map(shutil.which, ("sbatch", "srun", "squeue", "scancel"))):
            raise UserError("--engine slurm: no sbatch here; start it where jobs are handed in, or use --engine local")
        constructed = {name: value for name, value in options.items() if name == _TIMES}
        # As LAUNCHER: no file in the folder that jobs start in takes the place of a module.
        constructed[f"{self._name}_python"] = f"{shlex.quote(sys.executable)} -P"
        given = {name: value for name, value in options.items() if name != _TIMES}
        if jobs is not None:
            given["slurm_array_parallelism"] = jobs
        try:
            self._executor = AutoExecutor(folder=folder, cluster=self._name, **constructed)
            self._executor.update_parameters(**{"name": "stepjepa", **given})
        except (ValueError, TypeError, NameError, AssertionError, RuntimeError) as error:
            raise UserError(f"--slurm: {_one_line(error)}") from None
        self._jobs: dict[str, Any] = {}

    def submit(self, functions: Sequence[Callable[[], Any]]) -> list[str]:
        """Hand jobs in, as one array; returns their ids.

        Raises:
            UserError: the cluster refuses them.
        """
        try:
            found = self._executor.submit_array(functions)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"the jobs were refused ({_one_line(error)}); change --slurm, or --engine local runs them here"
            ) from None
        self._jobs |= {job.job_id: job for job in found}
        return [job.job_id for job in found]

    def states(self, ids: Iterable[str]) -> dict[str, str]:
        """What jobs are doing, in SLURM's words; those that nothing is known of any more are left out.

        Raises:
            UserError: the queue can't be asked now.
        """
        if self._name == "slurm":
            known = queue()
            return {job: known[job] for job in ids if job in known}
        return {job: "RUNNING" for job in ids if not self._is_over(job)}

    def _is_over(self, job: str) -> bool:
        """Of a job that is a process of this machine."""
        if job in self._jobs:
            return bool(self._jobs[job].done())
        try:
            os.kill(int(job), 0)
        except ProcessLookupError:
            return True
        return False

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs, waiting or at work; one that is over already is no error."""
        if self._name == "slurm":
            for start in range(0, len(ids), 100):
                subprocess.run(["scancel", *ids[start : start + 100]], check=False, capture_output=True)
            return
        for job in ids:
            if not self._is_over(job):
                os.kill(int(job), signal.SIGINT)

    @staticmethod
    def is_over(state: str | None) -> bool:
        """Whether a state is one that a job ends in; None is that of a job which SLURM has forgotten."""
        return state is None or state in _OVER


def queue() -> dict[str, str]:
    """All jobs of this user that SLURM knows, also those that ended in the last minutes: their states by their ids.

    Raises:
        UserError: the queue can't be asked now.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unanswered(_one_line(error)) from None
    if done.returncode:
        raise _unanswered(" ".join(done.stderr.split()) or "squeue failed")
    return dict(line.split()[:2] for line in done.stdout.splitlines() if len(line.split()) >= 2)


def _unanswered(reason: str) -> UserError:
    return UserError(f"SLURM's queue can't be asked ({reason}); the same command goes on later")


def _one_line(error: BaseException) -> str:
    # Of a command that failed, submitit puts what it said last.
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip(" -\t\n")]
    said = [line for line in lines if "error:" in line]
    return (said or lines or [type(error).__name__])[0][:300]
