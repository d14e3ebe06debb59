"""Records in a temporary file, so that a data set of any size takes next to no memory."""

from __future__ import annotations

import mmap
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

from stepjepa.base.files import TEMPORARY, naming_disk_errors

Item = TypeVar("Item")

BLOCK = 1000
"""Records that are written, read, and tokenised together."""


class Spooled(Sequence[Item]):
    """A sequence, of records for example, in an unnamed temporary file that is deleted together with it.

    The block of the record that was read last stays in memory, so that reading in order is fast. The file lies in the
    folder for temporary files (``TMPDIR``).
    """

    def __init__(self, records: Iterable[Item]) -> None:
        """Write the records, a block in memory at a time."""
        waiting = iter(records)
        self._places: list[tuple[int, int]] = []  # start and end of each block in the file, in bytes
        self._count = end = 0
        self._latest: tuple[int, list[Item]] = (-1, [])  # number and records of the block that was read last
        # Unbuffered, since it is read through a memory map.
        with naming_disk_errors(TEMPORARY.format(tempfile.gettempdir())), tempfile.TemporaryFile(buffering=0) as file:
            while block := list(islice(waiting, BLOCK)):
                data = memoryview(pickle.dumps(block, pickle.HIGHEST_PROTOCOL))
                start = end
                while end < start + len(data):
                    end += file.write(data[end - start :])
                self._places.append((start, end))
                self._count += len(block)
            # The map keeps the file's contents after it is closed. It must not be empty.
            self._map = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) if end else None

    def __len__(self) -> int:
        return self._count

    def _block(self, number: int) -> list[Item]:
        if self._latest[0] != number:
            assert self._map is not None
            start, end = self._places[number]
            self._latest = number, pickle.loads(self._map[start:end])
        return self._latest[1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(self._count))]
        place = range(self._count)[index]
        return self._block(place // BLOCK)[place % BLOCK]

    def __iter__(self) -> Iterator[Item]:
        for number in range(len(self._places)):
            yield from self._block(number)
        self._latest = (-1, [])

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence has equal records."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(record == theirs for record, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"Spooled({len(self):,} items)"
