"""``stepjepa rerun``: repeat the training run of a folder and check whether the weights are the same."""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path

from stepjepa.base.errors import UserError, visible
from stepjepa.base.files import locked
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import log_to_stderr
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import settings_of_earlier_run
from stepjepa.cli.parser import as_arguments
from stepjepa.config.option import option
from stepjepa.config.run import RunConfig
from stepjepa.running.repeat import SILENT, changes_since, check_trusted, is_record, recorded_settings
from stepjepa.store.folder import CONFIG_FILE, RUN_FILE, check_is_folder, open_run_folder
from stepjepa.store.record import read_record, read_run


@dataclass
class RerunFlags:
    """The run to repeat, and allowed differences."""

    folder: str = option(help="run folder", positional=True, metavar="RUN", path=True)
    output_dir: str | None = option(None, "folder of the new run; empty or new (RUN-rerun)", metavar="DIR", path=True)
    resume_from_checkpoint: str | None = option(
        None,
        "resume a repetition that was stopped: its checkpoint folder, last, or auto (last if any)",
        metavar="DIR",
        path="or name",
    )
    allow_changes: bool = option(False, "repeat the run although data or model have changed")
    trust_folder: bool = option(False, "run code that the folder names: of its model, task, terms, layout, kernel")
    train_file: str | None = option(None, "where the training file is now, if it was moved", metavar="FILE", path=True)
    eval_file: str | None = option(None, "where the held-out file is now", metavar="FILE", path=True)
    data_file: str | None = option(None, "where the file that is split is now", metavar="FILE", path=True)
    model_name: str | None = option(None, "where the model is now", metavar="NAME", path="or name")


def run(args: argparse.Namespace) -> int:
    """Check what has changed, train again and compare the weights."""
    from stepjepa.running.finished import print_finished
    from stepjepa.running.run import run as train

    folder = Path(args.folder).absolute()
    old, new = read_run(folder), Path(args.output_dir or f"{folder}-rerun").absolute()
    check_is_folder(new)
    # Locked: another process may be writing a checkpoint there, which would be taken for the remains of a killed one.
    with locked(new) if is_main_process() else nullcontext():
        open_run_folder(str(new), args.resume_from_checkpoint)
    settings = _settings_of(folder, old, trusted=args.trust_folder)
    moved = {name: getattr(args, name) for name in ("train_file", "eval_file", "data_file", "model_name")}
    moved = {name: str(Path(path).absolute()) if Path(path).exists() else path for name, path in moved.items() if path}
    settings |= {**moved, "output_dir": str(new), "resume_from_checkpoint": args.resume_from_checkpoint}
    # Moved files may need trust, too: a model of the hub instead of one in a folder.
    check_trusted(settings, trusted=args.trust_folder)
    directory = Path(str(old.get("directory", "")))
    # Training runs in the folder where the run was started, if it still exists: custom terms may be there.
    with chdir(directory if directory.is_dir() else Path.cwd()):
        config = RunConfig.from_flat(settings)
        config.check_required()
        try:
            changes, differences = changes_since(old, config)
        except (KeyError, TypeError, AttributeError):
            message = "is damaged: expected 'data', 'loaded', 'versions' and 'machine' of a run; restore it"
            raise UserError(message, path=folder / RUN_FILE) from None
        if changes and not args.allow_changes:
            raise UserError(f"{'; '.join(changes)}; restore what it was, or pass --allow_changes", path=folder)
        command, record = as_arguments(config.to_flat()), read_record(folder)
        resumed = [f"the run was {change}" for change in record.changes(mixed=True)]
        if resumed:
            differences.append(f"{'; '.join(resumed)}; it is repeated with the settings of its last launch")
        differences += [f"the run was {change}" for change in record.changes(mixed=False)]
        if is_main_process():
            lines = [f"stepjepa train {shlex.join(command)}", *(f"note: {line}" for line in (*changes, *differences))]
            print(*map(visible, lines), sep="\n", flush=True)
        log_to_stderr(logging.WARNING)
        finished = train(config, command=["train", *command]).record
        if is_main_process():
            print_finished(config, finished)
    return _compare(folder, new, old, [*changes, *resumed]) if is_main_process() else 0


def _settings_of(folder: Path, old: JsonObject, *, trusted: bool) -> JsonObject:
    """Return the recorded settings of a run by the names of their flags; for a run of 0.2.0, from its arguments."""
    if is_record(folder / CONFIG_FILE):
        return recorded_settings(folder / CONFIG_FILE, trusted=trusted)
    arguments = old.get("arguments")
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        raise UserError(f"there is no {CONFIG_FILE}, and run.json holds no 'arguments'; train again", path=folder)
    return settings_of_earlier_run(arguments, old.get("jepa") or {}) | SILENT


def _compare(folder: Path, new: Path, old: JsonObject, reasons: Sequence[str]) -> int:
    """Print whether the weights are equal; return exit code 1 if they differ for none of these ``reasons``."""
    from stepjepa.store.fingerprint import equal_weights

    equal = equal_weights(folder, new)
    if old.get("status") != "finished" or "exported_from" in old or equal is None:
        print(f"weights: nothing to compare with, since {folder} holds no weights of a finished run")
        return 0
    if equal:
        print(f"weights: equal to those of {folder}, bit for bit")
    else:
        why = f": {visible('; '.join(reasons))}" if reasons else ""
        print(f"weights: differ from those of {folder}{why}", file=sys.stderr)
    return 0 if equal or reasons else 1


RERUN = Command(
    run,
    flags=((RerunFlags, "rerun"),),
    several=True,
    epilog="Reports and uploads nothing. Exit code 1 if nothing has changed and the weights still differ.",
)
