"""Records read as they are needed: passes over a source that is too large to be held."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from stepjepa.data.records import BadRecords, Record, as_records, iterate_records
from stepjepa.errors import UserError
from stepjepa.files import existing_file


class Placed(NamedTuple):
    """A record and where it stands.

    Attributes:
        position: how many records came before it in its pass over the source, before anything was shuffled.
        record: without its further fields, which training does not read.
    """

    position: int
    record: Record


class RecordFile:
    """The records of a JSON lines file, read again by every iteration; errors name file and line.

    Args:
        path: of the file.
        bad: takes the lines that are wrong; None makes the first of them an error.

    Attributes:
        path: as given.
        bad: as given.

    Raises:
        UserError: it is missing, or no plain file (a pipe can't be read twice).
    """

    def __init__(self, path: str | os.PathLike[str], bad: BadRecords | None = None) -> None:
        found = existing_file(path, "data file")
        if not found.is_file():
            raise UserError("is no plain file, and a stream is read once an epoch; name a file", path=found)
        self.path = path
        self.bad = bad

    def __iter__(self) -> Iterator[Record]:
        return iterate_records(self.path, self.bad)


@dataclass(frozen=True)
class RecordStream:
    """What ``JepaTrainer`` trains on without holding it: no more than a buffer of it is in memory.

    Args:
        source: an iterable of records, as dicts with ``messages`` or as ``records.Record``, that can be iterated once
            for every epoch: a :class:`RecordFile`, a torch ``IterableDataset``, a ``datasets.IterableDataset`` or any
            other. Where it has a method ``set_epoch``, it is told the number of each epoch. Every process reads all of
            it and must get the same records in the same order, so a source must neither divide itself among processes
            nor shuffle without a fixed seed.
        shuffle_buffer_size: records to draw the next one from; 0 keeps the order of the source. The whole source would
            be needed to make all orders as likely as each other: a record can come early by at most so many places.

    Raises:
        ValueError: the source can be iterated only once, gives each process a part, or the size is negative.

    Example:
        >>> JepaTrainer(model, TrainingArguments("runs/a", max_steps=1000), JepaConfig(),
        ...             train_dataset=RecordStream(RecordFile("train.jsonl"), shuffle_buffer_size=1000), ...)
    """

    source: Iterable[Record | dict[str, Any]]
    shuffle_buffer_size: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.source, Iterator):
            kind = type(self.source).__name__
            raise ValueError(f"expected records that can be read once an epoch, got a {kind}, which ends for good")
        if getattr(self.source, "_distributed", None) is not None:
            # datasets.distributed.split_dataset_by_node leaves this mark.
            raise ValueError(
                "expected all records on every process, got a data set split by node; leave split_dataset_by_node out, "
                "since the trainer divides every step among the processes"
            )
        if self.shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size: expected 0 or more, got {self.shuffle_buffer_size}")

    def __iter__(self) -> Iterator[Record]:
        """All records, checked, in the order of the source."""
        return as_records(self.source)

    @property
    def name(self) -> str:
        """What errors call the source: its file, or a label."""
        return str(self.source.path) if isinstance(self.source, RecordFile) else "<memory>"

    @property
    def bad(self) -> BadRecords | None:
        """The lines of its file that were passed over so far; None where they are errors."""
        return self.source.bad if isinstance(self.source, RecordFile) else None

    def epoch(self, number: int, seed: int) -> Iterator[Placed]:
        """One pass over the source.

        Args:
            number: of the epoch, from 0; another one gives another order where there is a buffer.
            seed: of the order.

        Returns:
            Every record once. Before the k-th is given out (from 1), ``k + shuffle_buffer_size`` are read at most.

        Raises:
            UserError: a record is wrong; raised when it is read, which is up to a buffer ahead of its turn.
        """
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        records = (Placed(*each) for each in enumerate(map(_bare, as_records(self.source))))
        if not self.shuffle_buffer_size:
            return records
        return _shuffled(records, self.shuffle_buffer_size, np.random.default_rng([seed, number]))


def _bare(record: Record) -> Record:
    return replace(record, extra={}) if record.extra else record


def _shuffled(records: Iterator[Placed], size: int, generator: np.random.Generator) -> Iterator[Placed]:
    """A record drawn from a buffer makes room for the next one; what is left at the end is shuffled."""
    buffer: list[Placed] = []
    for placed in records:
        if len(buffer) < size:
            buffer.append(placed)
            continue
        drawn = int(generator.integers(size))
        yield buffer[drawn]
        buffer[drawn] = placed
    for drawn in generator.permutation(len(buffer)).tolist():
        yield buffer[drawn]
