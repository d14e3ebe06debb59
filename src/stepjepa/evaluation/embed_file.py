"""Embed the texts or records of a file of any size, block by block, into a NumPy or Parquet file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from stepjepa.base.errors import UserError, shown
from stepjepa.base.files import atomic_write, check_output_file, claimed_output
from stepjepa.base.json_object import JsonObject
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.messages import is_absent, number_as_text
from stepjepa.data.reading_notes import named
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.data.row_error import RowError
from stepjepa.data.sources import read_rows
from stepjepa.evaluation.vector_files import FORMATS, VectorWriter, open_writer
from stepjepa.objectives.embedding import BLOCK, Embedder
from stepjepa.objectives.inputs import Text, with_answer
from stepjepa.objectives.view_embeddings import SideEmbeddings

REMEMBERED = 1_000_000
"""Maximum number of distinct texts that are remembered over blocks, so that each is embedded once.

A further text is embedded, and counted as distinct, again in every block that has it.
"""

T = TypeVar("T")


@dataclass
class EmbeddedFile:
    """The output of :func:`embed_file` and its counts."""

    path: Path
    rows: int = 0
    dimensions: int = 0
    inputs: int = 0  # texts or records that were embedded; skipped lines are counted by `bad`
    distinct: int = 0  # distinct texts, see `distinct_is_upper_bound`; or the number of records
    of_texts: bool = False  # whether the inputs are texts
    bad: BadRecords = field(default_factory=BadRecords)  # the skipped lines, which give no row

    @property
    def distinct_is_upper_bound(self) -> bool:
        """Whether there may be fewer distinct texts than ``distinct``, since only :data:`REMEMBERED` are remembered."""
        return self.of_texts and self.distinct > REMEMBERED

    def to_dict(self) -> JsonObject:
        """Return the JSON object that the command prints."""
        counts = {name: getattr(self, name) for name in ("rows", "dimensions", "inputs", "distinct")}
        return {
            "output_file": str(self.path),
            **counts,
            **({"distinct_is_upper_bound": True} if self.distinct_is_upper_bound else {}),
            **({"bad_records": self.bad.to_dict()} if self.bad.count else {}),
        }


def texts_of(path: str, column: str, bad: BadRecords | None = None) -> Iterator[tuple[Text, JsonObject]]:
    """Yield the texts in a column of a file, and their rows; ``bad`` notes a line without a text."""
    bad = bad or BadRecords()
    for line, row in read_rows(path, bad=bad):
        value = number_as_text(row.get(column))
        if isinstance(value, str):
            yield Text(value, path, line), row
        else:
            fault = f"column '{column}' holds {shown(value)}, no text" if column in row else f"has no column '{column}'"
            bad.handle(UserError(f"{fault}; there are {named(row)}", path=path, line=line), line)


def records_of(path: str, *, open_chats: bool, bad: BadRecords | None = None) -> Iterator[tuple[Record, JsonObject]]:
    """Yield the records of a file, and their rows.

    Args:
        path: JSON lines, CSV, TSV, Parquet or Arrow.
        open_chats: a chat may end with the question.
        bad: counts invalid lines, or raises the error of the first; None raises it.
    """
    bad = bad or BadRecords()
    for line, row in read_rows(path, bad=bad):
        try:
            record = parse_record(with_answer(row) if open_chats else row, path, line)
        except UserError as error:
            bad.handle(error, line)
        else:
            yield record, row


def embed_file(
    embedder: Embedder,
    path: str,
    output: str,
    *,
    column: str | None = None,
    id_column: str | None = None,
    overwrite: bool = False,
    bad: BadRecords | None = None,
) -> EmbeddedFile:
    """Embed a file of any size in constant memory, plus a hash for each of at most :data:`REMEMBERED` texts.

    Args:
        embedder: from ``Jepa.embedder``.
        path: JSON lines, CSV, TSV, Parquet or Arrow.
        output: ``.npy``, float32 ``[R, D]`` in the order of the file; or ``.parquet`` with the columns ``line``,
            ``step``, ``embedding`` and perhaps ``id``.
        column: the column of the texts; None for records.
        id_column: the column that becomes ``id``.
        overwrite: replace an existing output.
        bad: counts the lines that can't be embedded, which give no row; or raises the error of the first, as None does.

    Raises:
        UserError: a line is wrong, or a text empty or too long; the output exists, has another suffix, or is being
            written by another process. No partial output is left behind.
    """
    check_output(path, output, id_column=id_column, overwrite=overwrite)
    embedded = EmbeddedFile(Path(output), bad=bad or BadRecords(), of_texts=column is not None)
    inputs: Iterator[tuple[Text | Record, JsonObject]]
    if column is not None:
        inputs, size = iter(texts_of(path, column, embedded.bad)), BLOCK
    else:
        # Records take more memory than texts.
        inputs, size = iter(records_of(path, open_chats=embedder.tokenizer.open_chats, bad=embedded.bad)), BLOCK // 10
    with (
        claimed_output(output, overwrite),
        atomic_write(output, "w+b") as stream,
        open_writer(stream, embedded.path, ids=id_column is not None) as writer,
        tqdm(unit="line", desc="embed", disable=None) as progress,
    ):
        embed_texts = _DistinctTexts(embedder, writer)
        for block in _blocks(inputs, size):
            progress.update(len(block))
            if embedded.bad.skips and not (block := _without_bad(block, embedder, id_column, embedded.bad)):
                continue
            embedded.inputs += len(block)
            values = [value for value, _ in block]
            texts = [value for value in values if isinstance(value, Text)]
            try:
                embeddings = embed_texts(texts) if texts else embedder(values)
            except RowError as error:
                raise error.for_reader(embedded.bad.settings) from None
            ids = None if id_column is None else [_id(value, row, id_column) for value, row in block]
            writer.write(embeddings, [value.line for value in values], ids)
            embedded.distinct += 0 if texts else len(block)
        if not writer.rows:
            fault = embedded.bad.describe() if embedded.bad.count else "add at least one"
            raise UserError(f"holds no rows; {fault}", path=path)
        embedded.distinct += embed_texts.distinct
        embedded.rows, embedded.dimensions = writer.rows, writer.dimensions
        writer.finish()
    return embedded


def check_output(path: str, output: str, *, id_column: str | None = None, overwrite: bool = False) -> None:
    """Raise ``UserError`` for an output that can't be written, before a model is loaded.

    Args:
        path: the input.
        output: the output.
        id_column: the column that becomes ``id``; None for no ids.
        overwrite: replace an existing output.
    """
    target = check_output_file(output, overwrite)
    if target.suffix.lower() not in FORMATS:
        raise UserError("`output_file` is an array or a table; end its name in .npy or .parquet", path=target)
    if id_column is not None and target.suffix.lower() == ".npy":
        raise UserError("`id_column` does nothing with a .npy file, which holds vectors alone; write .parquet")
    if target.resolve() == Path(path).resolve():
        raise UserError("`output_file` is the input file; name another", path=target)


def _without_bad(
    block: list[tuple[Text | Record, JsonObject]], embedder: Embedder, id_column: str | None, bad: BadRecords
) -> list[tuple[Text | Record, JsonObject]]:
    """Return the inputs of a block that can be embedded; the others are noted."""
    good = []
    for value, row in block:
        try:
            embedder.check(value)
            if id_column is not None:
                _id(value, row, id_column)
        except UserError as error:
            bad.handle(error, value.line)
        else:
            good.append((value, row))
    return good


def _blocks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    waiting = iter(values)
    while block := list(islice(waiting, size)):
        yield block


def _id(text: Text | Record, row: JsonObject, column: str) -> str:
    value = row.get(column)
    if isinstance(value, str) or not is_absent(value):
        return str(number_as_text(value))
    fault = f"has no column '{column}'; there are {named(row)}"
    fault = f"column '{column}' is empty; fill it in" if column in row else fault
    raise UserError(fault, path=text.path, line=text.line)


@dataclass
class _DistinctTexts:
    """Embeds the new texts of a block, and reads the vectors of texts of earlier blocks back from the file."""

    embedder: Embedder
    writer: VectorWriter
    distinct: int = 0
    rows: dict[bytes, int] = field(default_factory=dict)  # hash of a text -> its row

    def __call__(self, texts: list[Text]) -> SideEmbeddings:
        """Embed texts; texts that were embedded before are read from the file."""
        keys = [hashlib.blake2b(text.text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        new = [number for number, key in enumerate(keys) if key not in self.rows]
        vectors = self.embedder([texts[number] for number in new]).vectors
        if not self.writer.dimensions:
            self.writer.begin(vectors.shape[1])
        all_vectors = np.empty((len(texts), vectors.shape[1]), np.float32)
        all_vectors[new] = vectors
        old = [number for number, key in enumerate(keys) if key in self.rows]
        if old:
            all_vectors[old] = self.writer.read([self.rows[keys[number]] for number in old])
        self.distinct += len({keys[number] for number in new})
        for number in new:
            if keys[number] not in self.rows and len(self.rows) < REMEMBERED:
                self.rows[keys[number]] = self.writer.rows + number
        return SideEmbeddings(all_vectors, np.arange(len(texts)), np.ones(len(texts), np.int64))
