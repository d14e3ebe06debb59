"""``stepjepa report``: show runs side by side, in a table or on an HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from stepjepa.options import add_switch
from stepjepa.terminal import print_json, visible_lines

SUMMARY = "show runs: one table, or one HTML page with everything to look at"

EPILOG = """\
Prints a table of the evaluated runs. With --output_file FILE.html it writes one
file that opens by double click and loads nothing: comparison of the arms,
settings, accuracy, losses, similarities and ranks over steps, errors, answers,
records. Unfinished and unevaluated runs are included with what they have. The
folder of a sweep stands for its finished trials."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of sweeps")
    parser.add_argument("--json", action="store_true", help="the table for machines")
    page = parser.add_argument_group("page")
    page.add_argument("--output_file", metavar="FILE.html", help="gets the page")
    page.add_argument("--title", metavar="TEXT", help="of the page (the names of the runs)")
    page.add_argument("--analysis", metavar="DIR", help="of 'stepjepa analyze' (the first one in a folder of the runs)")
    page.add_argument("--baseline", metavar="ARM", help="name of the arm to compare with (the regular one)")
    add_switch(page, "--overwrite", help="replace --output_file (off)")


def run(args: argparse.Namespace) -> int:
    """Print the table or write the page.

    Raises:
        UserError: a folder or a flag is wrong, or the runs can't stand in one table.
    """
    if args.output_file is not None:
        return _write(args)
    from stepjepa.errors import UserError
    from stepjepa.experiments.report import as_text, report
    from stepjepa.pages.runs import find_run_folders, run_names

    for flag in ("title", "baseline", "analysis", "overwrite"):
        if getattr(args, flag):
            raise UserError(f"--{flag} is for a page; add --output_file FILE.html, or leave it out")
    folders = [each.folder for each in find_run_folders(args.runs)]
    rows = [{**row, "run": name} for row, name in zip(report(folders), run_names(folders), strict=True)]
    if args.json:
        print_json(rows)
    else:
        print(visible_lines(as_text(rows)))
    return 0


def _write(args: argparse.Namespace) -> int:
    from stepjepa.errors import UserError
    from stepjepa.files import refuse_existing
    from stepjepa.inspection.analysis import JSON_FILE
    from stepjepa.pages.page import write_page
    from stepjepa.pages.runs import read_runs

    target = Path(args.output_file)
    if args.json:
        raise UserError("--json prints the table, and --output_file writes the page; leave one of them out")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError("--output_file is an HTML page; end its name in .html", path=target)
    refuse_existing(target, args.overwrite)
    analysis = None if args.analysis is None else Path(args.analysis)
    if analysis is not None and not (analysis / JSON_FILE).is_file():
        raise UserError(f"holds no {JSON_FILE}; name an output folder of 'stepjepa analyze'", path=analysis)
    runs = read_runs(args.runs)
    size = write_page(runs, target, title=args.title, baseline=args.baseline, analysis=analysis)
    print(f"written: {visible_lines(str(target))} ({size / 1e6:.1f} MB); open it in a browser")
    return 0
