"""``stepjepa sweep``: train and evaluate every combination of a grid."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stepjepa.base.counting import counted, listed
from stepjepa.base.files import existing_file
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note
from stepjepa.cli.commands import Command, parse
from stepjepa.cli.flags import settings_of_earlier_run
from stepjepa.cli.parser import as_arguments
from stepjepa.config.option import FROM_ONE, check_effects, option
from stepjepa.config.run import RunConfig
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.models.names import check_base
from stepjepa.store.record import read_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepjepa.study.grid import Grid, Trial
    from stepjepa.study.sweep import Engine, Outcome
    from stepjepa.study.sweep_folder import SweepFolder

EPILOG = """\
The file is YAML:
  train: {train_file: train.jsonl, model_name: preset:tiny}  # flags of train
  evaluate: {test_file: test.jsonl}                          # of evaluate
  arms:               # their flags win; null removes one; a list is a grid
    regular: {regular: true}
    step-jepa: {step_jepa: true, jepa_loss_type: infonce, lbd: [0.1, 0.5]}
  seeds: [82, 23, 37, 84, 4]
  baseline: regular   # this one is added if it is missing

Each trial has a run folder, DIR/ARM_lbd0.5/seed82, with a log beside
it. The same command continues a sweep: it skips finished trials and resumes the
others. With --engine slurm the trials are one job array of submitit."""


@dataclass(kw_only=True)
class SweepFlags:
    """The grid, and how its trials are run."""

    config: str = option(help="YAML file with the grid", metavar="FILE", path=True)
    output_dir: str = option(help="folder of all run folders", metavar="DIR", path=True)
    seeds: list[int] | None = option(None, "seeds, instead of those of the file")
    jobs: int | None = option(None, "trials at a time (1, or one for each GPU; with SLURM its limit)", allowed=FROM_ONE)
    only: str | None = option(
        None, "run only these arms, combinations, trials or seeds: 'regular,82' is one trial", metavar="NAME,..."
    )
    dry_run: bool = option(False, "show what would be run, and write nothing")
    engine: Literal["local", "slurm"] = option("local", "run trials on this machine, or as jobs of a cluster")
    slurm: list[str] | None = option(
        None, "resources of a job, by names of submitit or sbatch", metavar="KEY=VALUE", only_with="engine slurm"
    )


def _read_train(flags: JsonObject, notes: dict[str, None]) -> JsonObject:
    """Return the settings that flags of ``stepjepa train`` mean; they are equal for spellings of equal meaning.

    ``notes`` gets the notes on flags without effect, or of another meaning here: the logs of trials, which start from
    the settings, do not have them. Arms share most of them.
    """
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        config: RunConfig = parse("train", [*as_arguments(flags), "--output_dir=."]).run
    notes |= dict.fromkeys(line for line in printed.getvalue().splitlines() if line.startswith("note: "))
    for name in ("train_file", "eval_file", "data_file", "chat_template"):
        if getattr(config, name) is not None:
            existing_file(getattr(config, name), f"--{name}")
    if config.model_name is not None:
        check_base(config.model_name)
    return _without_folder(config)


def _without_folder(config: RunConfig) -> JsonObject:
    return {name: value for name, value in config.to_flat().items() if name != "output_dir"}


def _read_earlier(arguments: list[str], folder: Path) -> JsonObject:
    """Return the settings of a trained run of 0.2.0."""
    return _without_folder(RunConfig.from_flat(settings_of_earlier_run(arguments, read_record(folder).jepa or {})))


def _read_evaluate(flags: JsonObject) -> list[str]:
    """Return flags of ``stepjepa evaluate`` as arguments; raise ``UserError`` for those that it would refuse."""
    arguments = as_arguments(flags)
    args = parse("evaluate", [*arguments, "--model_path=.", "--output_file=."])
    existing_file(args.test_file, "--test_file")
    if args.linear_map is not None:
        existing_file(args.linear_map, "--linear_map")
    names = EvaluationSettings.flat_names()
    values = {name: value for name, value in vars(args).items() if name in names}
    # Any file that may be written; each trial has its own.
    EvaluationSettings.from_flat({**values, "output_file": f"{args.test_file}.answers.jsonl"})
    return arguments


def _changed_settings(settings: JsonObject) -> str:
    """Return the settings of a trial that are not the defaults."""
    defaults = RunConfig().to_flat()
    return ", ".join(f"{name} {value}" for name, value in settings.items() if defaults.get(name) != value)


def run(args: argparse.Namespace) -> int:
    """Expand and check the grid, run the trials that are left and show the table."""
    from stepjepa.study.grid import KEYS, expand, read_grid, select
    from stepjepa.study.sweep import sweep
    from stepjepa.study.sweep_folder import SweepFolder

    check_effects(vars(args), SweepFlags)
    grid = read_grid(args.config, args.seeds)
    notes: dict[str, None] = {}
    trials = expand(grid, partial(_read_train, notes=notes), _read_evaluate)
    chosen = select(trials, args.only)
    folder = SweepFolder(
        Path(args.output_dir), trials, {name: getattr(grid, name) for name in KEYS}, read_arguments=_read_earlier
    )
    states = folder.states(chosen)
    engine = _engine(args, folder)
    for line in notes:
        print(line, file=sys.stderr)
    _announce(folder, grid, chosen, states)
    if args.dry_run:
        for trial in chosen:
            print(f"\n{trial.name} ({states[trial.name]}): {_changed_settings(trial.train)}")
            for stage in ("train", "evaluate"):
                print(f"  $ {shlex.join(folder.command(trial, stage))}")
        return 0
    return _conclude(folder, sweep(folder, chosen, engine), len(chosen))


def _announce(folder: SweepFolder, grid: Grid, chosen: Sequence[Trial], states: Mapping[str, str]) -> None:
    """Print the number of trials in each state, the baseline, and the log to follow."""
    from stepjepa.study.trial_record import FINISHED

    trials = folder.trials
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
    narrowed = f", {len(chosen)} of them chosen" if len(chosen) < len(trials) else ""
    combinations = counted(len({trial.label for trial in trials}), "combination")
    sizes = f"{counted(len(trials), 'trial')} ({combinations}, {counted(len(grid.seeds), 'seed')})"
    print(f"sweep: {sizes}{narrowed}: {counts}")
    print(f"baseline: {grid.baseline}\nlogs: {folder.path}/ARM/seedN.log", flush=True)
    left = any(state != FINISHED for state in states.values())
    if left and (others := folder.other_versions(folder.trials)):
        note(f"trials were begun with {', '.join(others)}; 'stepjepa compare' will say so of the runs that differ")
    if others := folder.finished_outside_grid():
        trials_there = f"{counted(len(others), 'finished trial')} not in the grid ({listed(others, 4)})"
        note(f"the folder also has {trials_there}, which 'stepjepa compare' leaves out unless they are named, too")
    if first := next((trial for trial in chosen if states[trial.name] != FINISHED), None):
        log = shlex.quote(str(folder.log_file(first)))
        print(f"a line appears when a trial ends; meanwhile: tail -F {log}", flush=True)


def _engine(args: argparse.Namespace, folder: SweepFolder) -> Engine:
    from stepjepa.study.local import Local, visible_gpus
    from stepjepa.study.slurm import Slurm, read_options

    if args.engine == "slurm":
        return Slurm(folder, read_options(args.slurm or ()), args.jobs)
    gpus = visible_gpus()
    return Local(args.jobs or max(1, len(gpus)), gpus)


def _conclude(folder: SweepFolder, outcome: Outcome, count: int) -> int:
    """Print the table, the failures and the next command; return the exit code."""
    from stepjepa.study.run_report import report, report_text
    from stepjepa.study.sweep_place import EVALUATION

    try:
        if trials := outcome.finished:
            table = report([folder.run_folder(trial) for trial in trials], [trial.name for trial in trials], EVALUATION)
            print(f"\n{report_text(table)}")
    finally:
        # Also where there is no table, as after a change of the test file.
        for line in outcome.describe(count):
            print(line)
    if outcome.finished and not outcome.stopped:
        print(f"next: stepjepa compare {shlex.quote(str(folder.path))}")
    return 128 + outcome.stopped if outcome.stopped else int(bool(outcome.failed))


SWEEP = Command(run, flags=((SweepFlags, "sweep"),), epilog=EPILOG)
