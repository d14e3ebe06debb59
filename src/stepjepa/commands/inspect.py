"""``stepjepa inspect``: show how records become a micro-batch, with counts of the whole file."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from stepjepa.arguments import add_training_data, jepa_config
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.commands import Command
from stepjepa.data.records import bad_records, tell_bad_records
from stepjepa.data.sources import read_records
from stepjepa.files import refuse_existing
from stepjepa.models.presets import PREFIX, preset_tokenizer
from stepjepa.options import FROM_ONE, Parser, option


@dataclass
class ShowFlags:
    """What is shown, and how."""

    index: int = option(0, "the first record, counted from 0", metavar="I")
    records: int = option(1, "how many to show, as one micro-batch from there on", allowed=FROM_ONE)
    json: bool = option(False, "one JSON document on standard output instead of text")
    png: str | None = option(None, "write tree and attention matrix as a picture", metavar="FILE")
    overwrite: bool = option(False, "let --png replace a file")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Show some records."""
    config = jepa_config(args)
    if args.png is not None:
        refuse_existing(args.png, args.overwrite)
    bad = bad_records(args.bad_records)
    records = read_records(args.train_file, bad=bad, columns=args.columns)
    tell_bad_records(bad)
    if args.model_name.startswith(PREFIX):
        texts = (message["content"] for record in records for message in record.messages)
        tokenizer = preset_tokenizer(args.model_name, texts, args.chat_template)
    else:
        from stepjepa.models.loading import load_tokenizer

        own = {name: getattr(args, name) for name in ("chat_template", "trust_remote_code", "gguf_file")}
        tokenizer = load_tokenizer(args.model_name, **own)
    if config.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, config.predictors or 0)

    from stepjepa.inspection.record import as_text, inspect_records, title

    inspection = inspect_records(records, args.index, tokenizer, config, args.records)
    if not args.json:
        print(as_text(inspection))
    if args.png is not None:
        from stepjepa.inspection.plots import write_png

        write_png(inspection, args.png, title(inspection))
        print(f"wrote {args.png}", file=sys.stderr)
    return {"model": args.model_name, **asdict(inspection)}


def add_flags(parser: Parser) -> None:
    """Add the flags of data, of which two are required here, and model."""
    add_training_data(parser)
    parser.required += ["train_file", "model_name"]


INSPECT = Command(
    run,
    add=add_flags,
    flags=((ShowFlags, "what to show"),),
    common="train_file max_length model_name chat_template regular step_jepa layout predictors pairs step_separator "
    "labels plain index records json png overwrite",
    epilog="example: stepjepa inspect --train_file data.jsonl --model_name preset:tiny --step_jepa",
)
