"""Train and evaluate the trials of a grid, on this machine or a cluster; a stopped sweep can be started again."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from stepjepa.base.files import DISK_REMEDIES, check_writable, locked, write_json
from stepjepa.base.signals import Interruptions
from stepjepa.base.terminal import duration
from stepjepa.store.environment import versions
from stepjepa.store.folder import check_is_folder
from stepjepa.study.grid import Trial
from stepjepa.study.local import Local
from stepjepa.study.sweep_folder import SweepFolder
from stepjepa.study.sweep_place import SWEEP_FILE
from stepjepa.study.trial_record import FINISHED

# What systems call a disk that no trial can write to.
_DISK_ERRORS = {os.strerror(number): remedy for number, remedy in DISK_REMEDIES.items()}

# Beginning of the reason of a trial whose settings or data were refused before the first step.
_REFUSED = "train failed with exit code 2: "


class Engine(Protocol):
    """Runs trials: :class:`~stepjepa.study.local.Local` on this machine, ``slurm.Slurm`` on a cluster."""

    pause: float  # seconds between two calls of ``ended``

    def begin(self, folder: SweepFolder, trials: Sequence[Trial]) -> None:
        """Start to run the unfinished trials of a folder, in this order."""

    def ended(self) -> list[Trial]:
        """Return the trials that have ended since the last call; their records hold the outcome."""

    def end(self, interruptions: Interruptions) -> None:
        """End the trials that still run: the sweep is done, or was interrupted."""


@dataclass
class Outcome:
    """The outcome of a sweep: evaluated trials, of this or an earlier start, and failed ones with the reason."""

    finished: list[Trial]
    failed: dict[str, str]
    stopped: int = 0  # number of the signal; 0 if none ended the sweep
    not_run: str = ""  # why the other trials were not run

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
                lines.append(f"{others}, since {self.not_run}")
        if self.stopped:
            lines.append(f"stopped with {unfinished} of {count} trials left; the same command continues it")
        return lines


def sweep(folder: SweepFolder, trials: Sequence[Trial], engine: Engine | None = None) -> Outcome:
    """Run the unfinished trials among ``trials``.

    The others are not begun once a disk is full, or a trial of every combination was refused with the same error.

    Args:
        folder: of the sweep, with all its trials.
        trials: those to run.
        engine: runs them; None for one after the other on this machine.

    Returns:
        The finished and the failed trials.

    Raises:
        UserError: another sweep is running in the folder, or see :meth:`SweepFolder.states`.
    """
    engine = Local() if engine is None else engine
    check_is_folder(folder.path)
    check_writable(folder.path)
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
            """Remove an ended trial from the list; print its outcome, and the time left if the sweep goes on."""
            waiting.remove(trial)
            if (reason := folder.failure(trial)) is not None:
                failed[trial.name] = reason
            outcome = FINISHED if reason is None else f"{reason} (log: {folder.log_file(trial)})"
            goes_on = waiting and not interruptions.count and not _common_cause(trials, failed)
            left = duration((time.monotonic() - began) * len(waiting) / (count - len(waiting)))
            outcome += f"; about {left} left" if goes_on else ""
            print(f"[{len(trials) - len(waiting)}/{len(trials)}] {trial.name}: {outcome}", flush=True)

        try:
            engine.begin(folder, waiting)
            while waiting and not interruptions.count and not _common_cause(trials, failed):
                for trial in engine.ended():
                    end(trial)
                time.sleep(engine.pause)
        finally:
            engine.end(interruptions)
    finished = [trial for trial in trials if trial not in waiting and trial.name not in failed]
    return Outcome(finished, failed, interruptions.first, _common_cause(trials, failed))


def _common_cause(trials: Sequence[Trial], failed: Mapping[str, str]) -> str:
    """Return why all other trials would fail, too, and what to do about it; an empty text if they may not.

    A disk is full, or a trial of each combination was refused, all for one reason, which its seed does not change.
    """
    reasons = set(failed.values())
    for words, remedy in _DISK_ERRORS.items():
        if any(f": {words};" in reason for reason in reasons):
            return f"every trial would meet it: {remedy}"
    labels = {trial.label for trial in trials if trial.name in failed}
    if len(reasons) == 1 and reasons.pop().startswith(_REFUSED) and labels == {trial.label for trial in trials}:
        return "every arm failed with this error: correct the grid or the data first"
    return ""
