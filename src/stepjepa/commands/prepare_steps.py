"""``stepjepa prepare steps``: training records with marked steps, from the responses of a reasoning model."""

from __future__ import annotations

import argparse
from typing import Any

from stepjepa.arguments import add_switch
from stepjepa.commands.preparation import Preparation, add_source_and_target, open_job, write_records
from stepjepa.commands.prepare_chat import CHATS
from stepjepa.errors import shown
from stepjepa.preparing.conversion import Rows
from stepjepa.preparing.step_preparation import (
    FEW_STEPS,
    QUESTION_FIELD,
    RESPONSE_FIELD,
    SYSTEM_PROMPT,
    StepOptions,
    load_splitter,
    prepare_records,
)

_MOST_NAMES = 12


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, "rows with 'question' and a response")
    parser.add_argument(
        "--question_field", default=QUESTION_FIELD, metavar="NAME", help=f"field of the question ({QUESTION_FIELD})"
    )
    parser.add_argument(
        "--response_field", default=RESPONSE_FIELD, metavar="NAME", help=f"field of the response ({RESPONSE_FIELD})"
    )
    parser.add_argument("--system_prompt", default=SYSTEM_PROMPT, metavar="TEXT", help=f"({SYSTEM_PROMPT})")
    parser.add_argument("--custom", metavar="MODULE:FUNCTION", help="your own splitter: response in, list of steps out")
    add_switch(
        parser.add_argument_group("filter"),
        "--require_correct",
        help="leave out records whose final answer is not the ground truth",
    )


def _run(args: argparse.Namespace) -> int:
    job = open_job(args)
    options = StepOptions(
        response_field=args.response_field,
        question_field=args.question_field,
        system_prompt=args.system_prompt,
        splitter=None if args.custom is None else load_splitter(args.custom),
        require_correct=args.require_correct,
    )
    first: dict[str, Any] = {}
    records, counts = prepare_records(_noting(job.rows, first), options, job.source, job.limit, job.bad)
    steps = [("steps per record", f"{counts.steps / counts.kept:.2f}")] if records else []
    there = f"; there is {', '.join(map(shown, list(first)[:_MOST_NAMES]))}" if first else ""
    hint = f"; name the fields with --question_field and --response_field{there}"
    if any(name in first for name in CHATS):
        hint = "; whole chats are read by 'stepjepa prepare chat'"
    if FEW_STEPS in counts.skipped:
        hint = "; steps are told by blank lines, 'Step 2:' or '2.'; for others name a function of yours with --custom"
    write_records(job, records, counts.read, counts.skipped, hint=hint, more=steps)
    return 0


def _noting(rows: Rows, first: dict[str, Any]) -> Rows:
    """The rows; what the first one holds is noted as it comes."""
    for number, (line, row) in enumerate(rows):
        if not number:
            first.update(row)
        yield line, row


STEPS = Preparation("training records with marked steps, from the responses of a reasoning model", _add_arguments, _run)
