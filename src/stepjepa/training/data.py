"""The records that a run from the command line trains on and evaluates on."""

from __future__ import annotations

import argparse
import random
import sys
from itertools import islice
from typing import Any

from stepjepa.batch.stream import RecordStream
from stepjepa.data.records import BadRecords, Record, bad_records, tell_bad_records
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.run_folder import is_main_process
from stepjepa.training.provenance import identify_file, identify_stream

SHUFFLE_BUFFER = 1000
"""Records of a stream to draw the next one from, where nothing is said (as in ``datasets``)."""

FIRST = 1000
"""Records of a stream that are looked at before it is trained on, or as many as its buffer holds."""


def open_stream(args: argparse.Namespace) -> RecordStream:
    """The training records of ``--streaming``."""
    size = args.shuffle_buffer_size
    if size is None:
        size = 0 if args.training.get("train_sampling_strategy") == "sequential" else SHUFFLE_BUFFER
    return RecordStream(args.train_file, size, bad_records(args.bad_records))


def read_data(args: argparse.Namespace) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Training records (of a stream the first ones, see ``FIRST``), held-out records and what identifies their files.

    Raises:
        UserError: a file is missing or wrong, or ``--eval_split`` would leave a part empty.
    """
    if args.data_file is not None:
        records, bad = _read(args, args.data_file)
        order = random.Random(args.split_seed).sample(range(len(records)), len(records))
        count = round(len(records) * args.eval_split)
        if not 0 < count < len(records):
            raise UserError(
                f"{len(records)} records can't be split with --eval_split {args.eval_split}; one part would be empty",
                path=args.data_file,
            )
        held = set(order[:count])
        parts = [records[i] for i in range(len(records)) if i not in held], [records[i] for i in sorted(held)]
        _tell_overlap(*parts)
        split = {"eval_split": args.eval_split, "split_seed": args.split_seed}
        return *parts, {"data": {**identify_file(args.data_file, records, bad), **split}}
    if args.streaming:
        stream = open_stream(args)
        train_records = list(islice(stream, max(FIRST, stream.shuffle_buffer_size)))
        files = {"train": identify_stream(args.train_file)}
    else:
        train_records, bad = _read(args, args.train_file)
        files = {"train": identify_file(args.train_file, train_records, bad)}
    if args.eval_file is None:
        return train_records, [], files
    eval_records, bad = _read(args, args.eval_file)
    if not args.streaming:
        _tell_overlap(train_records, eval_records)
    return train_records, eval_records, {**files, "eval": identify_file(args.eval_file, eval_records, bad)}


def _read(args: argparse.Namespace, path: str) -> tuple[list[Record], BadRecords | None]:
    """The records of a file, and what was skipped in it."""
    bad = bad_records(args.bad_records)
    records = read_records(path, bad=bad)
    if is_main_process():
        tell_bad_records(bad)
    return records, bad


def _tell_overlap(train_records: list[Record], eval_records: list[Record]) -> None:
    """Say on standard error how many held-out records are trained on, too."""
    trained = {str(record.messages) for record in train_records}
    both = sum(str(record.messages) in trained for record in eval_records)
    if both and is_main_process():
        print(
            f"note: {both:,} of {len(eval_records):,} held-out records are among the training records, too, so what is "
            "measured on them is no measure of new ones; take them out of one",
            file=sys.stderr,
        )
