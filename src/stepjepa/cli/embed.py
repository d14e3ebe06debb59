"""``stepjepa embed``: embed the texts or records of a file."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.files import existing_file
from stepjepa.base.json_object import JsonObject
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import JsonFlags
from stepjepa.config.jepa import Dtype
from stepjepa.config.option import FROM_ONE, option
from stepjepa.data.records import BadRecords

if TYPE_CHECKING:
    from stepjepa.objectives.embedding import Embedder
    from stepjepa.objectives.inputs import EmbedOptions
    from stepjepa.objectives.jepa import Jepa

EPILOG = """\
example: stepjepa embed --model_path runs/a --input_file texts.jsonl \\
  --column question --side source --output_file questions.npy
A question and its answer are near each other: --side source and --side target.
docs/how-to/embeddings.md says more."""


@dataclass
class EmbedFlags:
    """The input, the output and the side to embed."""

    model_path: str = option(help="run or checkpoint folder, or hub id", metavar="PATH", group="files")
    input_file: str = option(help="JSON lines, CSV, TSV or Parquet", metavar="FILE", group="files")
    output_file: str = option(
        help="FILE.npy, float32 [rows, dimensions]; or FILE.parquet with line and step, too",
        metavar="FILE",
        group="files",
    )
    overwrite: bool = option(False, "let --output_file replace a file", group="files")
    column: str | None = option(
        None, "column of the texts (records: 'messages' or what training reads)", metavar="NAME", group="files"
    )
    id_column: str | None = option(None, "column that becomes 'id' in a Parquet file", metavar="NAME", group="files")
    side: Literal["source", "target"] = option("source", "source: questions, or steps; target: what they predict")
    bad_records: Literal["error", "skip"] = option(
        "error", "lines that can't be embedded: error; or skip and report how many, they give no row", group="files"
    )
    raw: bool = option(False, "vectors as they are read; else of length 1")


@dataclass
class ReadingFlags:
    """The readout of embeddings, and the loading of the model."""

    batch_size: int = option(32, "texts at a time", allowed=FROM_ONE)
    dtype: Dtype = option("auto", "of the weights")
    layer: int | None = option(None, "index of hidden_states to read; -1: the last one (that of training)")
    pooling: Literal["last", "mean"] | None = option(None, "one token or the mean of several (that of training)")
    max_length: int | None = option(None, "most tokens of a text (that of training)", allowed=FROM_ONE)
    system_prompt: str | None = option(
        None, "precedes the questions of a model of layout branched; '' for none (that of training)", metavar="TEXT"
    )
    trust_remote_code: bool = option(False, "run code that comes with the model")


def load_jepa(args: argparse.Namespace, device: str | None = None) -> Jepa:
    """Load the model that the flags name."""
    from stepjepa.objectives.jepa import Jepa

    options = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code, "device": device}
    with raising_user_errors():
        jepa = Jepa.from_pretrained(args.model_path, **options)
    if args.system_prompt is not None:
        if not jepa.reads_system_prompt:
            warning = "`system_prompt` does nothing: the model reads questions by themselves, without a system prompt"
            raise UserError(f"{warning}; leave it out")
        jepa.system_prompt = args.system_prompt
    return jepa


def reading_options(args: argparse.Namespace) -> EmbedOptions:
    """Return the options of ``Jepa.embedder`` that the flags name."""
    return {
        "batch_size": args.batch_size,
        "layer": args.layer,
        "pooling": args.pooling,
        "max_length": args.max_length,
    }


def make_embedder(jepa: Jepa, args: argparse.Namespace, side: Literal["source", "target"], *, raw: bool) -> Embedder:
    """Make the embedder that the flags describe."""
    options = reading_options(args)
    options["raw"] = raw
    with raising_user_errors():
        return jepa.embedder(side, **options)


def run(args: argparse.Namespace) -> JsonObject:
    """Embed the file."""
    existing_file(args.input_file, "input file")
    from stepjepa.evaluation.embed_file import check_output, embed_file

    check_output(args.input_file, args.output_file, id_column=args.id_column, overwrite=args.overwrite)
    embedder, start = make_embedder(load_jepa(args), args, args.side, raw=args.raw), time.perf_counter()
    embedded = embed_file(
        embedder,
        args.input_file,
        args.output_file,
        column=args.column,
        id_column=args.id_column,
        overwrite=args.overwrite,
        bad=BadRecords(args.bad_records),
    )
    embedded.bad.tell()
    seconds = time.perf_counter() - start
    noun = "texts" if args.column is not None else "records"
    distinct = f" ({embedded.distinct:,} distinct)" if embedded.distinct < embedded.inputs else ""
    speed = f"{embedded.inputs / seconds:,.0f} a second"
    print(f"{embedded.inputs:,} {noun}{distinct} on side {args.side} in {seconds:,.1f} s, {speed}")
    print(f"written: {args.output_file}, float32 [{embedded.rows}, {embedded.dimensions}]")
    return {**embedded.to_dict(), "side": args.side, "seconds": seconds}


EMBED = Command(
    run,
    flags=((EmbedFlags, "embedding"), (ReadingFlags, "model"), (JsonFlags, "files")),
    common="model_path input_file output_file overwrite column side raw batch_size json",
    epilog=EPILOG,
)
