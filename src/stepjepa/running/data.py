"""Read the records of a run: from files, from one file that is split, or from a mixture of data sets."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.files import fingerprint
from stepjepa.base.processes import is_main_process
from stepjepa.base.spool import Spooled
from stepjepa.base.terminal import note
from stepjepa.base.typed_json import to_json
from stepjepa.chat.source import read_template
from stepjepa.config.run import RunConfig
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.questions import question_hashes
from stepjepa.data.reading_notes import tell_unused
from stepjepa.data.record import Data, Record
from stepjepa.data.sources import check_source, each_record, each_record_of_data, each_record_of_source, mix
from stepjepa.data.splitting import draw_held_out
from stepjepa.data.summarising import records_fingerprint
from stepjepa.models.names import check_base
from stepjepa.store.record import Source


def check_inputs(run: RunConfig) -> None:
    """Raise ``UserError`` for a missing model, chat template or data file; reading the records may take minutes."""
    if run.model_name is not None:
        check_base(run.model_name)
    if run.chat_template is not None:
        read_template(run.chat_template)
    for source in (run.train_file, run.eval_file, run.data_file, *(run.dataset or ())):
        if source is not None:
            check_source(source)


def read_data(
    run: RunConfig, train: Data | None = None, held_out: Data | None = None
) -> tuple[Sequence[Record], Sequence[Record], dict[str, Source]]:
    """Return training records, held-out records and descriptions of their files.

    Records are written to temporary files as they are read, and are not held in memory.

    Args:
        run: the configuration, which names the files.
        train: training records in memory, instead of files.
        held_out: held-out records in memory, instead of a file.
    """
    check_inputs(run)
    if run.data_file is not None:
        records, origin = read_file(run, run.data_file)
        is_held_out, split_by = _split(run, records)
        train_records = Spooled(compress(records, ~is_held_out))
        eval_records = Spooled(compress(records, is_held_out))
        origin = replace(origin, eval_split=run.eval_split, split_seed=run.split_seed, split_by=split_by)
        files = {"data": origin}
    else:
        if train is not None:
            train_records, origin = _in_memory(train)
        else:
            train_records, origin = (
                read_mixture(run) if run.dataset is not None else read_file(run, str(run.train_file))
            )
        eval_records, files = Spooled[Record]([]), {"train": origin}
        if held_out is not None:
            eval_records, files["eval"] = _in_memory(held_out)
        elif run.eval_file is not None:
            eval_records, files["eval"] = read_file(run, run.eval_file)
    _tell_overlap(train_records, eval_records)
    return train_records, eval_records, files


def _split(run: RunConfig, records: Sequence[Record]) -> tuple[NDArray[np.bool_], str | None]:
    """Draw the held-out records of ``data_file``.

    Returns:
        bool ``[N]``: whether a record is held out; and ``question`` if a split by record would hold out other records,
        else None.
    """
    count = round(len(records) * run.eval_split)
    if not 0 < count < len(records):
        fault = f"{counted(len(records), 'record')} can't be split with `eval_split {run.eval_split}`"
        raise UserError(f"{fault}; one part would be empty", path=run.data_file)
    by_record = draw_held_out(range(len(records)), count, run.split_seed)
    if run.split_by == "record":
        return by_record, None
    keys = [question_hashes(record.messages)["normalised"] for record in records]
    by_question = draw_held_out(keys, count, run.split_seed)
    if by_question.any():
        return by_question, None if np.array_equal(by_question, by_record) else "question"
    trained = {key for key, held_out in zip(keys, by_record, strict=True) if not held_out}
    both = sum(key in trained for key, held_out in zip(keys, by_record, strict=True) if held_out)
    if is_main_process():
        note(
            f"{both:,} of {count:,} held-out records have a question that is also trained on, since "
            f"every question is that of {min(Counter(keys).values()):,} records or more; raise `eval_split`, or name "
            "other questions as `eval_file`, with `train_file`"
        )
    return by_record, None


def _in_memory(data: Data) -> tuple[Spooled[Record], Source]:
    """Return records that were passed in Python, as objects or as the name of a file, and describe them."""
    records = Spooled(each_record_of_data(data))
    if not records:
        raise UserError("the data set holds no records; add at least one")
    return records, Source(records=len(records), sha256=records_fingerprint(records))


def read_mixture(run: RunConfig) -> tuple[Spooled[Record], Source]:
    """Return the mixed records of ``dataset``, and a description of their source."""
    parts, sources = zip(*(_read(run, source, each_record_of_source) for source in run.dataset or ()), strict=True)
    chosen = mix([len(part) for part in parts], run.dataset_weights, run.split_seed)
    drawn = ((part[index] for index in indices) for part, indices in zip(parts, chosen, strict=True))
    records = Spooled(chain.from_iterable(drawn))
    shares = [
        {**to_json(source), "taken": len(part_indices)} for source, part_indices in zip(sources, chosen, strict=True)
    ]
    names = " + ".join(str(source.file) for source in sources)
    more = {"datasets": shares}
    return records, Source(file=names, records=len(records), sha256=records_fingerprint(records), other=more)


def read_file(run: RunConfig, file: str) -> tuple[Spooled[Record], Source]:
    """Read the records of a file, as :func:`_read`; the description has the SHA-256 of the file."""
    records, origin = _read(run, file, each_record)
    return records, replace(origin, sha256=fingerprint(file))


def _read(run: RunConfig, source: str, read: Callable[..., Iterator[Record]]) -> tuple[Spooled[Record], Source]:
    """Read the records of one source by ``read`` into a temporary file, and describe the source."""
    bad = BadRecords(run.bad_records, settings=("bad_records", "columns"))
    records = Spooled(read(source, bad=bad, columns=run.columns))
    if is_main_process():
        bad.tell()
        tell_unused(records)
    return records, Source(
        file=Path(source).name if Path(source).exists() else source,
        records=len(records),
        other={"bad_records": bad.to_dict()} if bad.count else {},
    )


def _tell_overlap(train_records: Sequence[Record], eval_records: Sequence[Record]) -> None:
    """Print a note if held-out records are also training records."""
    held_out = [_chat_hash(record) for record in eval_records]
    held_out_texts = set(held_out)
    trained = held_out_texts and held_out_texts.intersection(map(_chat_hash, train_records))
    both = sum(digest in trained for digest in held_out)
    if both and is_main_process():
        note(
            f"{both:,} of {len(eval_records):,} held-out records are also training records, so figures on them don't "
            "say how the model does on new ones; remove them from one of the files"
        )


def _chat_hash(record: Record) -> bytes:
    return hashlib.blake2b(str(record.chat).encode("utf-8", "surrogatepass"), digest_size=16).digest()
