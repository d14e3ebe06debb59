"""``stepjepa score``: score answers that another program generated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stepjepa.evaluation.settings import ScoreSettings
from stepjepa.options import add_options, from_args, option
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import AUTO, FALLBACK
from stepjepa.terminal import lines_to_stderr, print_json, visible_lines

SUMMARY = "score answers that another program generated"


@dataclass
class JsonFlags:
    """How the summary is printed."""

    json: bool = option(False, "the summary as JSON on standard output, lines on standard error")


def describe_task(asked: str, found: str) -> str:
    """One line that names the task by which answers are scored and how it was chosen.

    Args:
        asked: the value of ``--task``.
        found: the name of the task.
    """
    if asked != AUTO:
        return f"task: {found} (as asked for)"
    # A prefix: scoring by the published rules adds a suffix to the name of the task.
    return f"task: {found} ({'nothing more special was ' if found.startswith(FALLBACK) else ''}recognised)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_options(parser, ScoreSettings, "files")
    add_options(parser, JsonFlags, "files")
    add_options(parser, TaskOptions, "scoring")


def run(args: argparse.Namespace) -> int:
    """Score and print the summary."""
    from stepjepa.evaluation.output import format_summary, summary_file
    from stepjepa.evaluation.run import score_predictions

    settings = from_args(ScoreSettings, args, task_options=from_args(TaskOptions, args))
    with lines_to_stderr(args.json):
        summary = score_predictions(settings)
    written = {"output_file": args.output_file, "summary_file": str(summary_file(settings.output_file))}
    if args.json:
        print_json({**summary, **written})
        return 0
    print(describe_task(args.task, summary["task"]))
    print(visible_lines(format_summary(summary)))
    print(f"written: {', '.join(written.values())}")
    return 0
