"""``stepjepa prepare gsm8k``, ``spider`` and so on: published data sets become training records."""

from __future__ import annotations

import argparse
from functools import partial

from stepjepa.commands.preparation import Preparation, add_source_and_target, open_job, write_records
from stepjepa.preparing.conversion import CONVERSIONS, Conversion, convert_rows

# A file without a header names its columns by the first row.
_LONGEST_NAME, _MOST_NAMES = 30, 12


def _add_arguments(conversion: Conversion, parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, f"rows with {conversion.rows}", conversion.datasets)
    if conversion is CONVERSIONS["gsm8k"]:
        group = parser.add_argument_group("solution")
        group.add_argument(
            "--format",
            choices=("plain", "steps"),
            default="plain",
            help="plain: as it is; steps: a blank line between its lines, so that each is a step (plain)",
        )
        group.add_argument(
            "--socratic",
            choices=("keep", "strip"),
            default="keep",
            help="the question in front of each line of the socratic variant, 'question ** answer' (keep)",
        )
        group.add_argument(
            "--calculator", choices=("keep", "strip"), default="keep", help="annotations such as <<48/2=24>> (keep)"
        )


def _run(conversion: Conversion, args: argparse.Namespace) -> int:
    job = open_job(args)
    options = {}
    if conversion is CONVERSIONS["gsm8k"]:
        options = {name: getattr(args, name) == "keep" for name in ("socratic", "calculator")}
        options["steps"] = args.format == "steps"
    convert = conversion.converter(**options)
    records, counts = convert_rows(job.rows, convert, limit=job.limit, path=job.source, bad=job.bad)
    names = ", ".join(name[:_LONGEST_NAME] for name in counts.columns[:_MOST_NAMES])
    write_records(job, records, counts, hint=f"; expected {conversion.rows}, got {names}" if names else "")
    return 0


PREPARED = {
    name: Preparation(conversion.summary, partial(_add_arguments, conversion), partial(_run, conversion))
    for name, conversion in CONVERSIONS.items()
}
