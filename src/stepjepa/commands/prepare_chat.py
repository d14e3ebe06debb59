"""``stepjepa prepare chat``: training records of any table with questions and answers, or with whole chats."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from stepjepa.commands.preparation import Preparation, add_source_and_target, open_job, write_records
from stepjepa.data.formats import ASSISTANT, USER, to_messages
from stepjepa.errors import UserError
from stepjepa.preparing.conversion import convert_rows


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_and_target(parser, "rows with a column of questions and one of answers, or with one of whole chats")
    columns = parser.add_argument_group(
        "columns", "Without --columns: 'messages' or 'conversations' as they are; 'instruction' and 'input' together."
    )
    columns.add_argument(
        "--columns",
        nargs=2,
        metavar=("USER", "ASSISTANT"),
        help=f"of what is asked and answered (the first of {', '.join(USER)}, and of {', '.join(ASSISTANT)})",
    )
    columns.add_argument("--system", metavar="NAME", help="of a system prompt for each row (none)")
    columns.add_argument("--system_prompt", metavar="TEXT", help="one system prompt for all rows (none)")


def _run(args: argparse.Namespace) -> int:
    if args.system is not None and args.system_prompt is not None:
        raise UserError("--system and --system_prompt both say what the system prompt is; leave one out")
    job = open_job(args)
    columns = None if args.columns is None else tuple(args.columns)

    def make_record(row: Mapping[str, Any]) -> dict[str, Any]:
        messages, _ = to_messages(row, columns, system=args.system, system_prompt=args.system_prompt)
        return {"messages": messages}

    records, counts = convert_rows(job.rows, make_record, limit=job.limit, path=job.source, bad=job.bad)
    write_records(job, records, counts)
    return 0


CHAT = Preparation(
    "training records of any table with questions and answers, or with whole chats", _add_arguments, _run
)
