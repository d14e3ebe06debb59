"""``stepjepa inspect``: show how records become a micro-batch, with counts of the whole file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from stepjepa.arguments import add_training_data, jepa_config
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.commands import Command
from stepjepa.data.records import Record, bad_records, tell_bad_records
from stepjepa.data.sources import read_records
from stepjepa.files import refuse_existing
from stepjepa.models.presets import PREFIX, preset_tokenizer
from stepjepa.options import FROM_ONE, option
from stepjepa.terminal import make_console

PIPE_WIDTH = 120
"""Columns of the output if standard output is not a terminal and ``COLUMNS`` is not set."""


@dataclass
class ShowFlags:
    """What is shown, and how."""

    index: int = option(0, "the first record, counted from 0", metavar="I")
    records: int = option(1, "how many to show, as one micro-batch from there on", allowed=FROM_ONE)
    json: bool = option(False, "one JSON document on standard output instead of tables")
    no_color: bool = option(False, "no colours, only marks; so does NO_COLOR in the environment")
    png: str | None = option(None, "write tree and attention matrix as a picture", metavar="FILE")
    overwrite: bool = option(False, "let --png replace a file")


def run(args: argparse.Namespace) -> int:
    """Show some records.

    Raises:
        UserError: a flag, the file or the model is wrong, or there is no such record.
    """
    config = jepa_config(args)
    if args.png is not None:
        refuse_existing(args.png, args.overwrite)
    bad = bad_records(args.bad_records)
    records = read_records(args.train_file, bad=bad, columns=args.columns)
    tell_bad_records(bad)
    tokenizer = _tokenizer(args, records)
    assert config.predictors is not None
    if config.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, config.predictors)

    from stepjepa.inspection.record import inspect_records

    inspection = inspect_records(records, args.index, tokenizer, config, args.records)
    if args.json:
        print(json.dumps({"model": args.model_name, **inspection.to_dict()}, ensure_ascii=False))
    else:
        from stepjepa.inspection.view import show

        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        width = shutil.get_terminal_size().columns if known else PIPE_WIDTH
        show(inspection, make_console(width, colours=not args.no_color))
    if args.png is not None:
        from stepjepa.inspection.picture import write_png
        from stepjepa.inspection.view import title

        write_png(inspection, args.png, title(inspection))
        print(f"wrote {args.png}", file=sys.stderr)
    return 0


def _tokenizer(args: argparse.Namespace, records: list[Record]) -> Any:
    """The tokenizer that training would use; a preset's is trained on the file's own texts."""
    if args.model_name.startswith(PREFIX):
        texts = (message["content"] for record in records for message in record.messages)
        return preset_tokenizer(args.model_name, texts, args.chat_template)
    from stepjepa.models.loading import load_tokenizer

    return load_tokenizer(
        args.model_name,
        chat_template=args.chat_template,
        trust_remote_code=args.trust_remote_code,
        gguf_file=args.gguf_file,
    )


INSPECT = Command(
    run,
    add=lambda parser: add_training_data(parser, required=("train_file", "model_name")),
    flags=((ShowFlags, "what to show"),),
    common=(
        *("train_file", "max_length", "model_name", "chat_template", "regular", "step_jepa", "layout", "predictors"),
        *("pairs", "step_separator", "labels", "plain", "index", "records", "json", "png", "overwrite"),
    ),
    epilog="example: stepjepa inspect --train_file data.jsonl --model_name preset:tiny --step_jepa",
)
