"""``stepjepa score``: score answers that another program generated."""

from __future__ import annotations

import argparse

from stepjepa.arguments import add_switch
from stepjepa.commands.scoring_flags import add_scoring_group, describe_task, task_options
from stepjepa.terminal import lines_to_stderr, print_json, visible_lines

SUMMARY = "score answers that another program generated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    files = parser.add_argument_group("files")
    files.add_argument("--test_file", required=True, metavar="FILE", help="JSON lines with 'messages'")
    files.add_argument(
        "--predictions",
        required=True,
        metavar="FILE",
        help="JSON lines with 'index', from 0 in the test file, and 'generated', a text or a list of samples",
    )
    files.add_argument("--output_file", required=True, metavar="FILE", help="JSON lines, one per example")
    files.add_argument(
        "--missing",
        choices=("error", "wrong"),
        default="error",
        help="what a record without a prediction is (error)",
    )
    files.add_argument(
        "--json", action="store_true", help="the summary as JSON on standard output, lines on standard error"
    )
    add_switch(files, "--overwrite", help="replace --output_file (off)")
    add_scoring_group(parser)


def run(args: argparse.Namespace) -> int:
    """Score and print the summary."""
    from stepjepa.evaluation.output import summary_file
    from stepjepa.evaluation.predictions import ScoreSettings, score_predictions
    from stepjepa.evaluation.summary import format_summary

    settings = ScoreSettings(
        test_file=args.test_file,
        predictions=args.predictions,
        output_file=args.output_file,
        task=args.task,
        task_options=task_options(args),
        scoring=args.scoring,
        startswith=args.startswith,
        missing=args.missing,
        overwrite=args.overwrite,
    )
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
