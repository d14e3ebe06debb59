"""``stepjepa embed``: embed the texts or records of a file."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.files import existing_file
from stepjepa.base.json_object import JsonObject
from stepjepa.cli.commands import Command
from stepjepa.cli.flags import JsonFlags
from stepjepa.cli.parser import from_args
from stepjepa.config.option import check_effects, option
from stepjepa.data.bad_records import BadRecords
from stepjepa.evaluation.model_reading import ReadingSettings, make_embedder

EPILOG = """\
example: stepjepa embed --model_path runs/a --input_file texts.jsonl \\
  --column question --side source --output_file questions.npy
A question and its answer are near each other: --side source and --side target.
docs/how-to/embeddings.md says more."""


@dataclass
class EmbedFlags:
    """The input, the output and the side to embed."""

    model_path: str = option(help="run or checkpoint folder, or hub id", metavar="PATH", path="or name", group="files")
    input_file: str = option(help="JSON lines, CSV, TSV, Parquet or Arrow", metavar="FILE", path=True, group="files")
    output_file: str = option(
        help="FILE.npy, float32 [rows, dimensions], or FILE.parquet; the table has line and step, too",
        metavar="FILE",
        path=True,
        group="files",
    )
    overwrite: bool = option(False, "let --output_file replace a file", group="files")
    column: str | None = option(
        None, "column of the texts (by default whole records, as training reads them)", metavar="NAME", group="files"
    )
    id_column: str | None = option(None, "column that becomes 'id' in a Parquet file", metavar="NAME", group="files")
    side: Literal["source", "target"] = option(
        "source", "the side of the pairs; source: questions, or steps; target: what they predict"
    )
    bad_records: Literal["error", "skip"] = option(
        "error", "lines that can't be embedded: error; or skip and report how many, they give no row", group="files"
    )
    raw: bool = option(False, "write vectors as they are read; else of length 1")
    no_cache: bool = option(
        False,
        "neither read nor write the map or the heads beside the file of --linear_map",
        group="files",
        only_with="linear_map",
    )


def run(args: argparse.Namespace) -> JsonObject:
    """Embed the file."""
    check_effects(vars(args), EmbedFlags)
    existing_file(args.input_file, "input file")
    from stepjepa.evaluation.embed_file import check_output, embed_file
    from stepjepa.evaluation.stored_map import reading_options

    check_output(args.input_file, args.output_file, id_column=args.id_column, overwrite=args.overwrite)
    if args.linear_map is not None and Path(args.output_file).resolve() == Path(args.linear_map).resolve():
        raise UserError("`output_file` is the file of `linear_map`; name another", path=args.output_file)
    reading = from_args(ReadingSettings, args)
    reading.check(args.model_path)
    bad = BadRecords(args.bad_records, settings=("bad_records", "column"))
    jepa, map_bad = reading.load(args.model_path), BadRecords(args.bad_records, settings=("bad_records",))
    options = reading_options(reading, jepa, args.model_path, bad=map_bad, cache=not args.no_cache)
    embedder, start = make_embedder(jepa, args.side, {**options, "raw": args.raw}), time.perf_counter()
    embedded = embed_file(
        embedder,
        args.input_file,
        args.output_file,
        column=args.column,
        id_column=args.id_column,
        overwrite=args.overwrite,
        bad=bad,
    )
    embedded.bad.tell()
    seconds = time.perf_counter() - start
    inputs = counted(embedded.inputs, "text" if args.column is not None else "record")
    at_most = "at most " if embedded.distinct_is_upper_bound else ""
    distinct = f" ({at_most}{embedded.distinct:,} distinct)" if embedded.distinct < embedded.inputs else ""
    speed = f"{embedded.inputs / seconds:,.0f} a second"
    print(f"{inputs}{distinct} on side {args.side} in {seconds:,.1f} s, {speed}")
    print(f"written: {args.output_file}, float32 [{embedded.rows}, {embedded.dimensions}]")
    return {**embedded.to_dict(), "side": args.side, "seconds": seconds}


EMBED = Command(
    run,
    flags=((EmbedFlags, "embedding"), (ReadingSettings, "model"), (JsonFlags, "files")),
    common="model_path input_file output_file overwrite column side raw batch_size linear_map projection_heads json",
    epilog=EPILOG,
)
