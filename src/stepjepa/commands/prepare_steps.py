"""``stepjepa prepare steps``: training records with marked steps, from the responses of a reasoning model."""

from __future__ import annotations

import argparse

from stepjepa.commands.preparation import Preparation, add_source_and_target, open_job, write_records
from stepjepa.data.formats import CHATS, MOST_NAMES
from stepjepa.errors import UserError, shown
from stepjepa.options import add_switch
from stepjepa.preparing.step_preparation import FEW_STEPS, StepOptions, load_splitter, prepare_records


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, "rows with 'question' and a response")
    default = StepOptions()
    for name, what in {"question_field": "field of the question ", "response_field": "field of the response "}.items():
        value = getattr(default, name)
        parser.add_argument(f"--{name}", default=value, metavar="NAME", help=f"{what}({value})")
    prompt = default.system_prompt
    parser.add_argument("--system_prompt", default=prompt, metavar="TEXT", help=f"({prompt})")
    parser.add_argument("--custom", metavar="MODULE:FUNCTION", help="your own splitter: response in, list of steps out")
    thinking = parser.add_argument_group("text between <think> and </think> (removed, and counted)")
    add_switch(thinking, "--keep_thinking", help="keep it, with its tags")
    add_switch(thinking, "--think_steps", help="its blocks, divided by blank lines, are the first steps")
    add_switch(
        parser.add_argument_group("filter"),
        "--require_correct",
        help="leave out records whose final answer is not the ground truth",
    )


def _run(args: argparse.Namespace) -> int:
    if args.keep_thinking and args.think_steps:
        raise UserError("--keep_thinking and --think_steps exclude each other; leave one out")
    job = open_job(args)
    options = StepOptions(
        response_field=args.response_field,
        question_field=args.question_field,
        system_prompt=args.system_prompt,
        splitter=None if args.custom is None else load_splitter(args.custom),
        require_correct=args.require_correct,
        thinking="keep" if args.keep_thinking else "steps" if args.think_steps else "remove",
    )
    records, counts = prepare_records(job.rows, options, job.source, job.limit, job.bad)
    steps = sum(record["total_steps"] for record in records)
    more = [("steps per record", f"{steps / len(records):.2f}")] if records else []
    hint = ""
    if any(reason.startswith("no field") for reason in counts.dropped):
        there = ", ".join(map(shown, counts.columns[:MOST_NAMES]))
        hint = f"; name the fields with --question_field and --response_field (there is {there})"
        if any(name in counts.columns for name in CHATS):
            hint += ", or read whole chats with 'stepjepa prepare chat'"
    if FEW_STEPS in counts.dropped:
        hint = "; steps are told by blank lines, 'Step 2:' or '2.'; for others name a function of yours with --custom"
    write_records(job, records, counts, hint=hint, more=more)
    return 0


STEPS = Preparation("training records with marked steps, from the responses of a reasoning model", _add_arguments, _run)
