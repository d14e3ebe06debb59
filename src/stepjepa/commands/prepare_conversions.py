"""``stepjepa prepare gsm8k``, ``spider`` and so on: published data sets become training records."""

from __future__ import annotations

import argparse
from functools import partial

from stepjepa.commands.preparation import Job, Preparation, add_source_and_target, open_job, write_records
from stepjepa.preparing.conversion import CONVERSIONS, Conversion

# A file without a header names its columns by the first row.
_LONGEST_NAME, _MOST_NAMES = 30, 12


def _add_arguments(conversion: Conversion, parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, f"rows with {conversion.rows}", conversion.datasets)


def _convert(job: Job, conversion: Conversion, **options: bool) -> int:
    records, counts = conversion.records(job.rows, limit=job.limit, path=job.source, bad=job.bad, **options)
    names = ", ".join(name[:_LONGEST_NAME] for name in counts.columns[:_MOST_NAMES])
    hint = f"; expected {conversion.rows}, got {names}" if names else ""
    write_records(job, records, counts.read, counts.dropped, hint=hint)
    return 0


def _run(conversion: Conversion, args: argparse.Namespace) -> int:
    return _convert(open_job(args), conversion)


def _add_gsm8k_arguments(parser: argparse.ArgumentParser) -> None:
    _add_arguments(CONVERSIONS["gsm8k"], parser)
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


def _run_gsm8k(args: argparse.Namespace) -> int:
    return _convert(
        open_job(args),
        CONVERSIONS["gsm8k"],
        steps=args.format == "steps",
        socratic=args.socratic == "keep",
        calculator=args.calculator == "keep",
    )


def _preparation(name: str, conversion: Conversion) -> Preparation:
    if name == "gsm8k":
        return Preparation(conversion.summary, _add_gsm8k_arguments, _run_gsm8k)
    return Preparation(conversion.summary, partial(_add_arguments, conversion), partial(_run, conversion))


PREPARED = {name: _preparation(name, conversion) for name, conversion in CONVERSIONS.items()}
