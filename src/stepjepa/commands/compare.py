"""``stepjepa compare`` and ``stepjepa report``: arms against a baseline, runs in a table or on a page."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepjepa.commands import Command
from stepjepa.errors import UserError
from stepjepa.files import atomic_write, refuse_existing
from stepjepa.options import option, refuse_both, refuse_without_effect
from stepjepa.terminal import visible_lines


@dataclass
class CompareFlags:
    """What is compared, and where the tables go."""

    runs: list[str] = option(help="evaluated run folders, or folders of sweeps", positional=True, metavar="DIR")
    evaluation: str | None = option(None, "which one, if a run has several: NAME.summary.json", metavar="NAME")
    baseline: str | None = option(None, "name of the arm to compare with (the regular one)", metavar="ARM")
    names: str | None = option(None, "names of the arms, in the order of their first runs", metavar="A,B")
    tails: Literal["one", "two"] = option("one", "one- or two-tailed p, to be corrected for the number of arms")
    format: Literal["text", "markdown", "json"] = option("text", "format of the tables")
    json: bool = option(False, "short for --format json")
    output_file: str | None = option(None, "write the tables to this file", metavar="FILE")
    plot: str | None = option(None, "draw means, error bars and seeds: FILE.png or FILE.svg", metavar="FILE")
    overwrite: bool = option(False, "replace --output_file and --plot")


def compare(args: argparse.Namespace) -> Any:
    """Compare the runs; print the tables or write them to files."""
    from stepjepa.compare.plot import check_picture, write_picture
    from stepjepa.compare.tables import FORMATS

    if args.json and args.format not in ("text", "json"):
        raise UserError(f"--json means --format json, and --format {args.format} is named too; leave one out")
    written = [file for file in (args.output_file, args.plot) if file is not None]
    if args.plot is not None:
        check_picture(args.plot)
    for file in written:
        refuse_existing(file, args.overwrite)
    comparison = _comparison(args)
    text = FORMATS["json" if args.json else args.format](comparison)
    if args.output_file is not None:
        with atomic_write(args.output_file) as stream:
            stream.write(text)
    elif not args.json:
        print(visible_lines(text), end="")
    if args.plot is not None:
        write_picture(comparison, args.plot)
    if written:
        print(f"written: {', '.join(written)}", file=sys.stderr if args.output_file is None else sys.stdout)
    return json.loads(text) if args.json and args.output_file is None else 0


def _comparison(args: argparse.Namespace) -> Any:
    """Compare the runs, named by ``--names``, by the arms of their sweep, or by the settings in which they differ."""
    from stepjepa.compare.comparison import compare
    from stepjepa.compare.evaluated_run import SUMMARY, find_run_folders

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


@dataclass
class ReportFlags:
    """Which runs, and the page."""

    runs: list[str] = option(help="run folders, or folders of sweeps", positional=True, metavar="RUN")
    json: bool = option(False, "the table for machines")
    output_file: str | None = option(None, "write a page", metavar="FILE.html")
    title: str | None = option(None, "of the page (the names of the runs)", only_with="output_file")
    analysis: str | None = option(
        None, "of 'stepjepa analyze' (the first one in a folder of the runs)", metavar="DIR", only_with="output_file"
    )
    baseline: str | None = option(None, "arm to compare with (the regular one)", only_with="output_file", metavar="ARM")
    overwrite: bool = option(False, "replace --output_file", only_with="output_file")


def report(args: argparse.Namespace) -> Any:
    """Print the table or write the page."""
    refuse_without_effect(vars(args), ReportFlags)
    refuse_both(args, ("json", "output_file"))
    if args.output_file is not None:
        return _write_page(args)
    from stepjepa.compare.evaluated_run import find_run_folders
    from stepjepa.compare.tables import report, report_text

    rows = report([each.folder for each in find_run_folders(args.runs)])
    if not args.json:
        print(visible_lines(report_text(rows)))
    return rows


def _write_page(args: argparse.Namespace) -> int:
    from stepjepa.compare.logged_run import read_runs
    from stepjepa.compare.page import write_page
    from stepjepa.inspection.analysis import JSON_FILE

    target, analysis = Path(args.output_file), args.analysis and Path(args.analysis)
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError("--output_file is an HTML page; end its name in .html", path=target)
    refuse_existing(target, args.overwrite)
    if analysis and not (analysis / JSON_FILE).is_file():
        raise UserError(f"holds no {JSON_FILE}; name an output folder of 'stepjepa analyze'", path=analysis)
    size = write_page(read_runs(args.runs), target, title=args.title, baseline=args.baseline, analysis=analysis)
    print(f"written: {visible_lines(str(target))} ({size / 1e6:.1f} MB); open it in a browser")
    return 0


COMPARE = Command(
    compare,
    flags=((CompareFlags, "what is compared"),),
    epilog="Runs that differ only in their seeds form an arm; each arm is paired with the baseline by seed.",
)
REPORT = Command(report, flags=((ReportFlags, "runs"),))
