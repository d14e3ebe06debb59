"""Write vectors block by block into a NumPy or Parquet file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepjepa.objectives.view_embeddings import SideEmbeddings

if TYPE_CHECKING:
    from pyarrow import Schema
    from pyarrow.parquet import ParquetWriter

FORMATS = (".npy", ".parquet")


class VectorWriter:
    """Appends vectors to a binary file, from which earlier ones can be read back."""

    def __init__(self, spool: IO[bytes]) -> None:
        self.spool, self.rows, self.dimensions, self.offset = spool, 0, 0, 0

    def begin(self, dimensions: int) -> None:
        """Set the number of dimensions."""
        self.dimensions = dimensions

    def read(self, rows: list[int]) -> NDArray[np.float32]:
        """Read rows that are written, ``[len(rows), D]``."""
        self.spool.flush()
        shape = (self.rows, self.dimensions)
        return np.array(np.memmap(self.spool, np.float32, "r", self.offset, shape)[rows])

    def write(self, embeddings: SideEmbeddings, lines: list[int], ids: list[str] | None) -> None:
        """Append the rows of a block.

        Args:
            embeddings: of the inputs of the block.
            lines: the line of each input.
            ids: the id of each input; None without ids.
        """
        if not self.dimensions:
            self.begin(embeddings.vectors.shape[1])
        self.spool.seek(0, 2)
        self.spool.write(np.ascontiguousarray(embeddings.vectors).tobytes())
        self.rows += len(embeddings.vectors)

    def finish(self) -> None:
        """Complete the file."""


class _NpyWriter(VectorWriter):
    """A ``.npy`` file; its header, which has the number of rows, is written again at the end."""

    def begin(self, dimensions: int) -> None:
        super().begin(dimensions)
        self._write_header()
        self.offset = self.spool.tell()

    def finish(self) -> None:
        self.spool.seek(0)
        self._write_header()
        # NumPy leaves room for a growing first dimension.
        assert self.spool.tell() == self.offset

    def _write_header(self) -> None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, self.dimensions)}
        np.lib.format.write_array_header_1_0(self.spool, header)


class _ParquetWriter(VectorWriter):
    """A Parquet file with one row group for each block."""

    def __init__(self, spool: IO[bytes], stream: IO[bytes], *, ids: bool) -> None:
        super().__init__(spool)
        self._stream, self._ids = stream, ids
        self._writer: ParquetWriter | None = None

    def _schema(self) -> Schema:
        import pyarrow as pa

        columns = [("id", pa.string())] if self._ids else []
        columns += [("line", pa.int64()), ("step", pa.int64())]
        return pa.schema([*columns, ("embedding", pa.list_(pa.float32(), self.dimensions))])

    def write(self, embeddings: SideEmbeddings, lines: list[int], ids: list[str] | None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().write(embeddings, lines, ids)
        schema = self._schema()
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._stream, schema)
        flat = pa.array(embeddings.vectors.reshape(-1))
        columns: dict[str, Any] = {
            "line": np.asarray(lines)[embeddings.index],
            "step": embeddings.step,
            "embedding": pa.FixedSizeListArray.from_arrays(flat, self.dimensions),
        }
        if ids is not None:
            columns["id"] = [ids[index] for index in embeddings.index]
        self._writer.write_table(pa.table(columns, schema=schema))

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def open_writer(stream: IO[bytes], output: Path, *, ids: bool) -> Iterator[VectorWriter]:
    """Yield the writer of a file of vectors, ``.npy`` or ``.parquet``.

    Args:
        stream: the file, open for reading and writing.
        output: its final path, whose suffix decides the format.
        ids: whether a Parquet file has the column ``id``.
    """
    if output.suffix.lower() == ".npy":
        yield _NpyWriter(stream)
    else:
        with tempfile.TemporaryFile(dir=output.parent) as spool:
            yield _ParquetWriter(spool, stream, ids=ids)
