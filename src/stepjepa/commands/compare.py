"""``stepjepa compare``: methods against a baseline, with statistics."""

from __future__ import annotations

import argparse
import sys

from stepjepa.arguments import add_switch
from stepjepa.terminal import visible_lines

SUMMARY = "compare methods over seeds with a baseline: tests, intervals, tables, a picture"

EPILOG = """\
Runs that differ in nothing but their seeds are an arm; an arm and the baseline are paired by seed. Over seeds:
Student's paired t-test, one- and two-tailed, 95 % intervals, Holm's correction over all arms. Over examples: McNemar's
exact test for each seed, and over all seeds an exact permutation test whose units are the examples. Arms are grouped by
what is equal to the baseline: the optimizer steps, the FLOPs of training (within 2 %), or neither. Runs of other data,
or evaluated in another way, are refused."""

FORMATS = ("text", "markdown", "csv", "latex", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="DIR", help="run folders, each evaluated, or folders of sweeps")
    arms = parser.add_argument_group("what is compared")
    arms.add_argument("--evaluation", metavar="NAME", help="which one, where there are several: NAME.summary.json")
    arms.add_argument("--baseline", metavar="ARM", help="name of the arm to compare with (the regular one)")
    arms.add_argument(
        "--names", metavar="A,B", help="of the arms, in the order of their first runs (what differs between them)"
    )
    arms.add_argument(
        "--tails", choices=("one", "two"), default="one", help="which p is corrected for the number of arms (one)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=FORMATS, default="text", help="of the tables (text)")
    output.add_argument("--json", action="store_true", help="short for --format json")
    output.add_argument("--output_file", metavar="FILE", help="gets the tables instead of the terminal")
    output.add_argument("--plot", metavar="FILE", help="draw means, error bars and seeds: FILE.png or FILE.svg")
    add_switch(output, "--overwrite", help="replace --output_file and --plot (off)")


def run(args: argparse.Namespace) -> int:
    """Compare, print or write.

    Raises:
        UserError: a folder or a flag is wrong, or the runs can't be compared.
    """
    from pathlib import Path

    from stepjepa.errors import UserError
    from stepjepa.experiments.comparison import compare
    from stepjepa.experiments.comparison_plot import check_picture, write_picture
    from stepjepa.experiments.comparison_table import FORMATS as WRITERS
    from stepjepa.files import atomic_write, refuse_existing
    from stepjepa.pages.material import run_folders

    if args.json and args.format not in ("text", "json"):
        raise UserError(f"--json means --format json, and --format {args.format} is named too; leave one out")
    written = [Path(file) for file in (args.output_file, args.plot) if file is not None]
    if args.plot is not None:
        check_picture(args.plot)
    if len({file.resolve() for file in written}) < len(written):
        raise UserError("--output_file and --plot are one file; name another", path=args.plot)
    for file in written:
        if file.is_dir():
            raise UserError("is a folder; name a file in it", path=file)
        refuse_existing(file, args.overwrite)
    comparison = compare(
        run_folders(args.runs),
        evaluation=args.evaluation,
        names=[" ".join(name.split()) for name in args.names.split(",")] if args.names is not None else (),
        baseline=args.baseline,
        tails=args.tails,
    )
    read = {file.resolve() for arm in comparison.arms for run in arm.runs for file in run.files}
    for file in written:
        if file.resolve() in read:
            raise UserError("is what the comparison is made of; name another file", path=file)
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
