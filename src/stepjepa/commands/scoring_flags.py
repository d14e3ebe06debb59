"""The flags of ``evaluate`` and ``score`` that say what is right."""

from __future__ import annotations

import argparse

from stepjepa.arguments import add_switch
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import AUTO, FALLBACK, TASKS


def add_scoring_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """``--task`` and the settings of tasks."""
    group = parser.add_argument_group("scoring")
    group.add_argument(
        "--task",
        default=AUTO,
        metavar="NAME",
        help=f"one of {', '.join(TASKS)}, or module:Class of your own; auto goes by the records ({AUTO})",
    )
    group.add_argument(
        "--scoring",
        choices=("own", "reference"),
        default="own",
        help="reference: the rules of the published evaluation, slips included, beside our own (own)",
    )
    add_switch(group, "--startswith", "--statswith", help="count an answer by how it begins: prefix is the headline")
    default = TaskOptions()
    group.add_argument("--spider_path", metavar="DIR", help="databases of Spider, <DIR>/<name>/<name>.sqlite")
    group.add_argument(
        "--missing_databases",
        choices=("error", "skip"),
        default="error",
        help="skip: leave out, and count, records whose database is not there (error)",
    )
    add_switch(group, "--last_number", help="also score the last number of an answer that marks none (off)")
    group.add_argument(
        "--time_limit",
        type=float,
        default=default.time_limit,
        metavar="SEC",
        help=f"for running a query or comparing two regular expressions ({default.time_limit:g})",
    )
    group.add_argument(
        "--memory_limit",
        type=int,
        default=default.memory_limit,
        metavar="MIB",
        help=f"for the same ({default.memory_limit})",
    )
    group.add_argument("--workers", type=int, metavar="N", help="processes for the same (one per core, 8 at most)")
    return group


def describe_task(asked: str, found: str) -> str:
    """A line that says how answers are scored, and why so.

    Args:
        asked: what ``--task`` said.
        found: the name of the task.
    """
    if asked != AUTO:
        return f"task: {found} (as asked for)"
    # Also where it is scored by the published rules, which its name says then.
    return f"task: {found} ({'nothing more special was ' if found.startswith(FALLBACK) else ''}recognised)"


def task_options(args: argparse.Namespace) -> TaskOptions:
    """The settings of tasks that the flags describe.

    Raises:
        UserError: a number is out of range.
    """
    return TaskOptions(
        spider_path=args.spider_path,
        missing_databases=args.missing_databases,
        last_number=args.last_number,
        time_limit=args.time_limit,
        memory_limit=args.memory_limit,
        workers=args.workers,
    )
