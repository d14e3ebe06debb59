"""``stepjepa compare``: methods against a baseline, with statistics."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from stepjepa.options import add_switch
from stepjepa.terminal import visible_lines

if TYPE_CHECKING:
    from stepjepa.experiments.comparison import Comparison

SUMMARY = "compare methods over seeds with a baseline: tests, intervals, tables, a picture"

EPILOG = """\
Runs that differ only in their seeds form an arm; each arm is paired with the
baseline by seed. Over seeds: Student's paired t-test, one- and two-tailed, 95 %
intervals, Holm's correction over all arms. Over examples: McNemar's exact test
for each seed, and an exact permutation test over all seeds. Arms are grouped by
what they share with the baseline: the number of optimizer steps, the FLOPs of
training (within 2 %), or neither. Runs with other data or another evaluation
are refused."""

FORMATS = ("text", "markdown", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="DIR", help="run folders, each evaluated, or folders of sweeps")
    arms = parser.add_argument_group("what is compared")
    arms.add_argument(
        "--evaluation", metavar="NAME", help="evaluation to compare, if a run has several: NAME.summary.json"
    )
    arms.add_argument("--baseline", metavar="ARM", help="name of the arm to compare with (the regular one)")
    arms.add_argument(
        "--names", metavar="A,B", help="names of the arms, in the order of their first runs (the settings that differ)"
    )
    arms.add_argument(
        "--tails",
        choices=("one", "two"),
        default="one",
        help="one- or two-tailed p, to be corrected for the number of arms (one)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=FORMATS, default="text", help="format of the tables (text)")
    output.add_argument("--json", action="store_true", help="short for --format json")
    output.add_argument("--output_file", metavar="FILE", help="write the tables to this file")
    output.add_argument("--plot", metavar="FILE", help="draw means, error bars and seeds: FILE.png or FILE.svg")
    add_switch(output, "--overwrite", help="replace --output_file and --plot (off)")


def run(args: argparse.Namespace) -> int:
    """Compare the runs; print the tables or write them to files.

    Raises:
        UserError: a folder or a flag is wrong, or the runs can't be compared.
    """
    from pathlib import Path

    from stepjepa.errors import UserError
    from stepjepa.experiments.plot import check_picture, write_picture
    from stepjepa.experiments.tables import FORMATS as WRITERS
    from stepjepa.files import atomic_write, refuse_existing

    if args.json and args.format not in ("text", "json"):
        raise UserError(f"--json means --format json, and --format {args.format} is named too; leave one out")
    written = [Path(file) for file in (args.output_file, args.plot) if file is not None]
    if args.plot is not None:
        check_picture(args.plot)
    if len({file.resolve() for file in written}) < len(written):
        raise UserError("--output_file and --plot are one file; name another", path=args.plot)
    for file in written:
        refuse_existing(file, args.overwrite)
    comparison = _compare(args)
    read = {file.resolve() for arm in comparison.arms for run in arm.runs for file in run.files}
    for file in written:
        if file.resolve() in read:
            raise UserError("is an input of this comparison; name another file", path=file)
    text = WRITERS["json" if args.json else args.format](comparison)
    if args.output_file is None:
        print(visible_lines(text), end="")
    else:
        with atomic_write(args.output_file) as stream:
            stream.write(text)
    if args.plot is not None:
        write_picture(comparison, args.plot)
    if written:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr if args.output_file is None else sys.stdout)
    return 0


def _compare(args: argparse.Namespace) -> Comparison:
    """Compare the runs, named by ``--names``, by the arms of their sweep, or by the settings in which they differ."""
    from stepjepa.errors import UserError
    from stepjepa.experiments.comparison import compare
    from stepjepa.experiments.evaluated_run import SUMMARY, find_run_folders

    places = find_run_folders(args.runs)
    # An unfinished sweep has trained runs without an evaluation: skip them. Runs named one by one must have one.
    waiting = [place for place in places if place.arm is not None and not any(place.folder.glob(f"*{SUMMARY}"))]
    places = [place for place in places if place not in waiting]
    if waiting:
        more = "" if len(waiting) == 1 else f" and {len(waiting) - 1} more"
        print(f"note: {visible_lines(str(waiting[0].folder))}{more}: not evaluated yet, left out", file=sys.stderr)
    if not places:
        raise UserError("none of its runs is evaluated yet; go on with the sweep", path=waiting[0].folder.parents[1])
    names = [] if args.names is None else [" ".join(name.split()) for name in args.names.split(",")]
    return compare(places, names=names, evaluation=args.evaluation, baseline=args.baseline, tails=args.tails)
