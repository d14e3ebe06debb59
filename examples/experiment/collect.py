"""From the run folders of a sweep to a small file of figures that can be committed.

    python examples/experiment/collect.py runs/experiment/synth      # adds to examples/experiment/figures/synth.json
    python examples/experiment/collect.py runs/experiment/synth --missing
    python examples/experiment/collect.py runs/experiment/synth --evaluation untouched    # figures/synth-untouched.json

Trials that are in the file already stay as they are, so that an experiment may be run on several machines, some trials
on each. ``--missing`` names those that are neither finished nor in the file, for ``stepjepa sweep --only``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from run_figures import Figures, from_folder, read_figures, write_figures

from stepjepa.base.errors import UserError
from stepjepa.base.files import json_or_empty, read_json_object
from stepjepa.store.folder import RUN_FILE, SUMMARY
from stepjepa.study.trial_record import FINISHED

PUBLISHED = "test"  # as a sweep calls its evaluation
FIGURES = Path(__file__).resolve().parent / "figures"


def trials(sweep: Path) -> list[tuple[str, str, str]]:
    """Name, label and seed of every trial of a sweep.

    Raises:
        UserError: the folder is none of a sweep.
    """
    content = read_json_object(sweep / "sweep.json", "sweep", "name a folder that 'stepjepa sweep' has made")
    return [(each["name"], each["label"], str(each["seed"])) for each in content["trials"]]


def finished(sweep: Path, name: str, evaluation: str) -> bool:
    """Whether a trial is trained and evaluated."""
    record = sweep / f"{name}.trial.json"
    if not (sweep / name / f"{evaluation}{SUMMARY}").exists():
        return False
    return record.exists() and read_json_object(record, "trial", "run it again").get("status") == FINISHED


def trained(folder: Path) -> bool:
    """Whether the training of a run folder is finished; it need not be evaluated."""
    return json_or_empty(folder / RUN_FILE).get("status") == FINISHED


def collect(sweep: Path, file: Path, evaluation: str) -> tuple[list[Figures], list[str]]:
    """Collect the figures of the runs of a sweep.

    Args:
        sweep: its folder.
        file: of figures; may be missing.
        evaluation: name of the evaluation in each run folder.

    Returns:
        Figures of all trials, those of the file first, and the names of the trials that are missing.
    """
    known = read_figures(file) if file.exists() else []
    keys = {each.key for each in known}
    missing = []
    for name, label, seed in trials(sweep):
        if (label, seed) in keys:
            continue
        if finished(sweep, name, evaluation):
            known.append(from_folder(sweep / name, label, evaluation))
        else:
            missing.append(name)
    return known, missing


def main(argv: list[str] | None = None) -> int:
    """Collect, or say what is missing; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="folders of sweeps")
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="DIR", help="where the files are")
    parser.add_argument("--evaluation", default=PUBLISHED, help="its file's name in the run folders (%(default)s)")
    parser.add_argument("--missing", action="store_true", help="print what is missing, and write nothing")
    args = parser.parse_args(argv)
    try:
        for sweep in args.sweeps:
            name = sweep.resolve().name
            file = args.figures / f"{name if args.evaluation == PUBLISHED else f'{name}-{args.evaluation}'}.json"
            known, missing = collect(sweep, file, args.evaluation)
            if args.missing:
                print(",".join(missing))
            elif known:
                write_figures(file, known)
                print(f"{file}: {len(known)} runs, {len(missing)} missing")
    except UserError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
