"""The folder of a sweep: the settings, the state and the output of each trial.

sweep.json                     the grid, all its trials, versions
_slurm/                        files of submitit, where trials are jobs
<label>/seed82/                run folder, with the evaluation in test.jsonl
<label>/seed82.yaml            the settings of the training, as stepjepa train --config reads them
<label>/seed82.trial.json      settings and flags, and how the trial ended
<label>/seed82.log             output of its processes
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.errors import UserError, visible
from stepjepa.base.files import atomic_write, json_or_empty, write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.store.environment import versions
from stepjepa.store.folder import RUN_FILE, SUMMARY
from stepjepa.study.grid import Trial
from stepjepa.study.sweep_place import EVALUATION, SWEEP_FILE
from stepjepa.study.trial_record import BEGUN, FAILED, FINISHED, NEW, RECORD, read_trial_record, record_file

# -P: as with the installed command, a file in the current folder must not shadow a module.
LAUNCHER = (sys.executable, "-P", "-m", "stepjepa")

# Words of a command line whose spelling has no meaning: a number with a fraction, one with underscores, true and false.
_FLOAT = re.compile(r"(?<![\w.])[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?(?![\w.])")
_GROUPED = re.compile(r"(?<==)[0-9]+(?:_[0-9]+)+(?= )")
_SWITCH = re.compile(r"(?<==)(?:True|False)(?= )")

_FOREIGN = "was not written by this sweep, and would be written over; move it or name another `output_dir`"

# Most changed settings that an error names.
_MOST_CHANGES = 4


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
        """Return the command line of a ``stage`` of a trial: ``train`` or ``evaluate``."""
        run = str(self.run_folder(trial))
        if stage == "train":
            settings = ["--config", str(self.settings_file(trial))]
            # Trackers such as W&B and MLflow would name every trial at random.
            name = [] if "run_name" in trial.train else [f"--run_name={trial.name}"]
            return [*self.launcher, stage, *settings, *name, "--resume_from_checkpoint=auto", "--output_dir", run]
        paths = ["--model_path", run, "--output_file", f"{run}/{EVALUATION}.jsonl"]
        return [*self.launcher, stage, *trial.evaluate, *paths]

    def states(self, trials: Sequence[Trial]) -> dict[str, str]:
        """Return the state of each trial by name.

        Raises:
            UserError: a trial was begun with other flags, or its folder, or the whole one, holds a run of no sweep, or
                a file that the sweep would write over.
        """
        if (self.path / RUN_FILE).is_file():
            raise UserError("is the folder of a run; name a folder for the sweep alone", path=self.path)
        sweep = self.path / SWEEP_FILE
        if sweep.exists() and not json_or_empty(sweep).keys() >= {"grid", "trials"}:
            raise UserError(_FOREIGN, path=sweep)
        return {trial.name: self._state(trial) for trial in trials}

    def _state(self, trial: Trial) -> str:
        """Return the state of a trial; raise ``UserError`` if its folder holds another run."""
        run, record = self.run_folder(trial), self.read_record(trial)
        if not record:
            if run.exists() and (not run.is_dir() or any(run.iterdir())):
                raise UserError("is no run of this sweep; move it or name another `output_dir`", path=run)
            for file in (self.settings_file(trial), self.log_file(trial), record_file(self.path, trial.name)):
                if file.exists():
                    raise UserError(_FOREIGN, path=file)
            return NEW
        self._check_same_training(trial, record)
        self._check_same_evaluation(trial, record)
        if self.is_evaluated(trial):
            return FINISHED
        return FAILED if record.get("status") == FAILED else BEGUN

    def _check_same_training(self, trial: Trial, record: Mapping[str, object]) -> None:
        """Raise ``UserError`` if a trial was begun with other settings of its training than the grid has now."""
        run = self.run_folder(trial)
        if not (run.exists() and any(run.iterdir())):
            return  # it was stopped or failed before it wrote anything, or was removed: the grid may be changed
        begun = self._trained_settings(record, run)
        if begun is not None and begun != trial.train:
            fault = f"was begun with other flags of 'stepjepa train' (they are in {run.name}.trial.json)"
            remedy = "change the grid back, move the folder away to train it anew, or name another `output_dir`"
            raise UserError(f"{fault}: {_changes(begun, trial.train)}; {remedy}", path=run)

    def _check_same_evaluation(self, trial: Trial, record: Mapping[str, object]) -> None:
        """Raise ``UserError`` if a trial has answers of an evaluation with other flags than the grid has now."""
        run, begun, now = self.run_folder(trial), _by_flag(record.get("evaluate")), _by_flag(trial.evaluate)
        if begun != now and self.has_answers(trial):
            fault = f"was begun with other flags of 'stepjepa evaluate' (they are in {run.name}.trial.json)"
            remedy = (
                "change the grid back, or evaluate the trained runs again beside it: 'stepjepa evaluate ... "
                f"--output_file {run}/NAME.jsonl', which 'stepjepa compare --evaluation NAME' reads"
            )
            raise UserError(f"{fault}: {_changed_flags(begun, now)}; {remedy}", path=run)

    def _trained_settings(self, record: Mapping[str, object], run: Path) -> JsonObject | None:
        """Return the settings that a trial was begun with; None if 0.2.0 began it and it has trained nothing."""
        recorded = record.get("train")
        if not isinstance(recorded, list):
            return recorded if isinstance(recorded, dict) else {}
        return self.read_arguments(recorded, run) if (run / RUN_FILE).is_file() else None

    def is_trained(self, trial: Trial) -> bool:
        """Return whether the training of a trial is finished."""
        return json_or_empty(self.run_folder(trial) / RUN_FILE).get("status") == FINISHED

    def is_evaluated(self, trial: Trial) -> bool:
        """Return whether a trial is trained and evaluated."""
        return self.is_trained(trial) and bool(json_or_empty(self.run_folder(trial) / f"{EVALUATION}{SUMMARY}"))

    def other_versions(self, trials: Sequence[Trial]) -> list[str]:
        """Return the versions with which trials were begun, where those installed are others."""
        now, others = versions(), dict[str, None]()
        for trial in trials:
            begun = json_or_empty(self.run_folder(trial) / RUN_FILE).get("versions")
            for name, version in begun.items() if isinstance(begun, dict) else ():
                if name != "platform" and version != now.get(name):
                    others[visible(f"{name} {version} (now {now.get(name, 'not there')})")] = None
        return list(others)

    def finished_outside_grid(self) -> list[str]:
        """Return the names of finished trials whose arm, values or seed the grid does not have any more."""
        names = {trial.name for trial in self.trials}
        records = (file.relative_to(self.path).as_posix() for file in sorted(self.path.glob(f"*/*{RECORD}")))
        others = [name for name in (record.removesuffix(RECORD) for record in records) if name not in names]
        return [
            visible(name) for name in others if json_or_empty(self.path / name / RUN_FILE).get("status") == FINISHED
        ]

    def has_answers(self, trial: Trial) -> bool:
        """Return whether the evaluation of a trial has written a line."""
        answers = self.run_folder(trial) / f"{EVALUATION}.jsonl"
        return self.is_evaluated(trial) or (answers.is_file() and answers.stat().st_size > 0)

    def read_record(self, trial: Trial) -> JsonObject:
        """Return settings, flags and outcome of a trial; an empty dict if it was not begun."""
        return read_trial_record(self.path, trial.name)

    def failure(self, trial: Trial) -> str | None:
        """Return the reason why a trial that has ended is not finished, fit to be printed; None if it is finished."""
        record = self.read_record(trial)
        return None if record.get("status") == FINISHED else visible(str(record.get("reason", "unknown")))

    def record(self, trial: Trial, status: str, reason: str = "") -> None:
        """Write the status of a trial (``begun``, ``failed`` or ``finished``) and the reason."""
        content = {"name": trial.name, "status": status, "train": trial.train, "evaluate": trial.evaluate}
        write_json(record_file(self.path, trial.name), content | ({"reason": reason} if reason else {}))

    def last_line(self, trial: Trial) -> str:
        """Return the last line of a trial's log that is no command line."""
        log = self.log_file(trial)
        lines = log.read_bytes()[-65536:].decode(errors="replace").split("\n") if log.exists() else []
        output = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("$ ")]
        return visible(output[-1][:300]) if output else "no output"


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the settings that changed, as ``name old -> new``."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    values = [[visible(str(settings.get(name, "not set")))[:60] for settings in (before, now)] for name in names]
    changes = [f"{name} {' -> '.join(pair)}" for name, pair in zip(names, values, strict=True)]
    more = [f"and {len(changes) - _MOST_CHANGES} more"] if len(changes) > _MOST_CHANGES else []
    return ", ".join(changes[:_MOST_CHANGES] + more)


def _changed_flags(before: set[str], now: set[str]) -> str:
    """Return the flags that only one of two command lines has, as ``before -> now``."""
    sides = [" ".join(sorted(flags)) or "not set" for flags in (before - now, now - before)]
    return visible(" -> ".join(side[:120] for side in sides))


def _by_flag(arguments: object) -> set[str]:
    """Return each flag with its values; the order of the flags and the spelling of their values have no meaning."""
    words = map(str, arguments) if isinstance(arguments, list | tuple) else ()
    line = _FLOAT.sub(lambda number: str(float(number[0])), f" {' '.join(words)} ")
    line = _GROUPED.sub(lambda number: str(int(number[0])), line)
    line = _SWITCH.sub(lambda switch: switch[0].lower(), line)
    return {f"--{flag.rstrip()}" for flag in line.split(" --")[1:]}
