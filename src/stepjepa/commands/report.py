"""``stepjepa report``: runs side by side."""

from __future__ import annotations

import argparse
import json

from stepjepa.terminal import visible_lines

SUMMARY = "put evaluated runs side by side in one table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run folders."""
    parser.add_argument("runs", nargs="+", metavar="DIR", help="run folders with an evaluation in each")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from stepjepa.experiments.report import as_markdown, report

    rows = report(args.runs)
    print(json.dumps(rows, indent=2) if args.json else visible_lines(as_markdown(rows)))
    return 0
