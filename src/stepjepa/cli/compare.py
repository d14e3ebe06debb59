"""``stepjepa compare`` and ``stepjepa report``: arms against a baseline, runs in a table or on a page."""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, check_output_file, claimed_output
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import note, spelled, visible_lines
from stepjepa.cli.commands import Command
from stepjepa.cli.parser import check_exclusive
from stepjepa.config.option import check_effects, option


@dataclass
class CompareFlags:
    """The runs to compare, and the output of the tables."""

    runs: list[str] = option(
        help="evaluated run folders, or folders of sweeps", positional=True, metavar="DIR", path=True
    )
    evaluation: str | None = option(
        None, "the evaluation to read, where a run has several: NAME.summary.json", metavar="NAME"
    )
    baseline: str | None = option(None, "name of the arm to compare with (the regular one)", metavar="ARM")
    tails: Literal["one", "two"] = option("one", "one- or two-tailed p, to be corrected for the number of arms")
    mixed_runs: bool = option(
        False,
        "count runs resumed with another rate, optimizer, batch ...; else they are kept out of the statistics",
    )
    details: bool = option(
        False, "print every table: scores, losses, tests over seeds and over examples; else the first"
    )
    format: Literal["text", "markdown", "json"] = option("text", "format of the tables")
    json: bool = option(False, "short for --format json")
    output_file: str | None = option(None, "write the tables to this file", metavar="FILE", path=True)
    plot: str | None = option(None, "draw means, error bars and seeds: FILE.png or FILE.svg", metavar="FILE", path=True)
    overwrite: bool = option(False, "replace --output_file and --plot", only_with="output_file or plot")


def compare_runs(args: argparse.Namespace) -> JsonObject | int:
    """Compare the runs; print the tables or write them to a file; draw a picture."""
    from stepjepa.study.comparison import compare
    from stepjepa.study.plot import picture
    from stepjepa.study.tables import FORMATS, as_text

    _check_output(args)
    choices = {name: getattr(args, name) for name in ("evaluation", "baseline", "tails", "mixed_runs")}
    comparison = compare(args.runs, **choices)
    text = spelled(as_text(comparison, details=True) if args.details else FORMATS[args.format](comparison))
    if args.output_file is not None:
        with claimed_output(args.output_file, args.overwrite), atomic_write(args.output_file) as stream:
            stream.write(text)
        print(f"written: {args.output_file}")
    elif not args.json:
        print(visible_lines(text), end="")
        if args.format == "text" and not args.details:
            print("more figures: the same command with --details", file=sys.stderr)
    if args.plot is not None:
        with claimed_output(args.plot, args.overwrite), atomic_write(args.plot, "wb") as stream:
            stream.write(picture(comparison, Path(args.plot).suffix.lower()[1:]))
        print(f"written: {args.plot}", file=sys.stderr)
    return json.loads(text) if args.json and args.output_file is None else 0


def _check_output(args: argparse.Namespace) -> None:
    """Raise ``UserError`` for flags of the output that contradict each other, or a file that can't be written.

    ``--json`` and ``--format json`` become both.
    """
    from stepjepa.study.plot import check_picture

    check_effects(vars(args), CompareFlags)
    if args.json and args.format not in ("text", "json"):
        raise UserError(f"--json means --format json, and --format {args.format} is named too; leave one out")
    if args.json:
        args.format = "json"
    args.json = args.format == "json"
    if args.details and args.format != "text":
        raise UserError(f"--details does nothing with --format {args.format}, which has every table; leave it out")
    if args.plot is not None:
        check_picture(args.plot)
    if args.plot and args.output_file and Path(args.plot).resolve() == Path(args.output_file).resolve():
        raise UserError("is both --output_file and --plot; name another", path=args.plot)
    for file in filter(None, (args.output_file, args.plot)):
        check_output_file(file, args.overwrite)


@dataclass
class ReportFlags:
    """The runs to report, and the page."""

    runs: list[str] = option(help="run folders, or folders of sweeps", positional=True, metavar="RUN", path=True)
    evaluation: str | None = option(
        None, "the evaluation to read, where a run has several: NAME.summary.json", metavar="NAME"
    )
    json: bool = option(False, "print the table as JSON")
    output_file: str | None = option(
        None, "write a page of everything about the runs to this file", metavar="FILE.html", path=True
    )
    analysis: str | None = option(
        None,
        "folder of 'stepjepa analyze' (the first one in a folder of the runs)",
        metavar="DIR",
        path=True,
        only_with="output_file",
    )
    baseline: str | None = option(None, "arm to compare with (the regular one)", only_with="output_file", metavar="ARM")
    mixed_runs: bool = option(
        False, "count runs resumed with other settings, as in 'stepjepa compare'", only_with="output_file"
    )
    overwrite: bool = option(False, "replace --output_file", only_with="output_file")


def report(args: argparse.Namespace) -> list[JsonObject] | int:
    """Print the table or write the page."""
    check_effects(vars(args), ReportFlags)
    check_exclusive(args, ("json", "output_file"))
    check_exclusive(args, ("evaluation", "output_file"))
    if args.output_file is not None:
        from stepjepa.study.page.page import write_page

        choices = {name: getattr(args, name) for name in ("overwrite", "baseline", "analysis", "mixed_runs")}
        write_page(args.runs, args.output_file, **choices)
        return 0
    from stepjepa.study.run_folders import find_run_folders, notes_on_missing_trials, without_waiting_trials
    from stepjepa.study.run_report import report, report_text

    runs = without_waiting_trials(find_run_folders(args.runs))
    for missing in notes_on_missing_trials(args.runs):
        note(missing)
    rows = report([run.folder for run in runs], evaluation=args.evaluation)
    if not args.json:
        print(visible_lines(report_text(rows)))
    return rows


COMPARE = Command(
    compare_runs,
    flags=((CompareFlags, "what is compared"),),
    epilog="Runs that differ only in their seeds form an arm; each arm is paired with the baseline by seed.",
)
REPORT = Command(report, flags=((ReportFlags, "runs"),))
