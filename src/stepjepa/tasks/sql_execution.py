"""Run untrusted queries on an SQLite file, and compare what two of them find.

Nothing here can change a file: the database is opened read-only and immutable, and whatever is not plain reading is
refused before it runs. Only the standard library is imported, since worker processes load this module.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

Row = tuple[Any, ...]

MOST_ROWS = 500_000
_MOST_BYTES = 64 * 2**20
_LONGEST_QUERY = 100_000
# One value: zeroblob, randomblob, printf, replace and group_concat can make no longer one.
_LONGEST_VALUE = 16 * 2**20
# Instructions of SQLite's virtual machine between two looks at the clock: well under a millisecond.
_INSTRUCTIONS = 1000

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
# Functions that reach beyond the database: code, pointers, files and the log of this process.
_DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "sqlite_log"}
_SYNTAX = ("syntax error", "incomplete input", "unrecognized token", "stack overflow", "one statement at a time")
# Characters of a message or a result that are kept to be read.
_LONGEST_OUTPUT = 300


class QueryResult(NamedTuple):
    """What a query found, or why it failed.

    Attributes:
        rows: in SQLite's order; None if the query failed.
        columns: how many there are, also where there are no rows.
        failure: None, or ``syntax`` (no query at all, or several), ``denied`` (it would do more than read), ``time``,
            ``rows``, ``memory`` (a limit), ``other`` (an unknown table or column, most often).
        message: the reason in SQLite's words.
    """

    rows: list[Row] | None
    columns: int = 0
    failure: str | None = None
    message: str = ""


def run_query(
    database: str | os.PathLike[str], sql: str, *, seconds: float, memory: int, most_rows: int = MOST_ROWS
) -> QueryResult:
    """Run one query; whatever it is, no file is changed or made.

    Run it in a process of its own: one call of a function on a long text can't be interrupted from within, and the
    limit on memory (in MiB) holds for all of SQLite in this process and is never raised again.
    """
    if len(sql) > _LONGEST_QUERY:
        return QueryResult(None, failure="syntax", message=f"longer than {_LONGEST_QUERY} characters")
    deadline = time.monotonic() + seconds
    denied: list[int] = []

    def authorize(action: int, _first: str | None, second: str | None, *_: str | None) -> int:
        function = action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _DENIED_FUNCTIONS
        if action in _READING or function:
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    def late() -> bool:
        return time.monotonic() > deadline

    try:
        with closing(_open(database, memory)) as connection:
            connection.set_authorizer(authorize)
            connection.set_progress_handler(late, _INSTRUCTIONS)
            result = _read(connection.execute(sql.rstrip("; \t\r\n")), most_rows)
            return QueryResult(None, failure="time", message="interrupted") if late() else result
    except MemoryError:
        return QueryResult(None, failure="memory", message="out of memory")
    # ValueError: text that is no UTF-8, or holds a null character.
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        failure = "time" if late() else "denied" if denied else _kind(error)
        return QueryResult(None, failure=failure, message=str(error)[:_LONGEST_OUTPUT])


def _open(database: str | os.PathLike[str], memory: int) -> sqlite3.Connection:
    # Immutable: no locks and no look at a journal, so that nothing is written beside the file either.
    uri = f"{Path(database).resolve().as_uri()}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)
    # Text in another encoding than it says is compared by its bytes.
    connection.text_factory = lambda content: content.decode("utf-8", "surrogateescape")
    connection.execute(f"PRAGMA hard_heap_limit = {memory * 2**20}")
    # Otherwise a large sort goes to a file.
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _read(cursor: sqlite3.Cursor, most_rows: int) -> QueryResult:
    if cursor.description is None:
        return QueryResult(None, failure="syntax", message="no statement")
    rows: list[Row] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(rows) > most_rows:
            return QueryResult(None, failure="rows", message=f"more than {most_rows} rows")
        if size > _MOST_BYTES:
            return QueryResult(None, failure="memory", message=f"a result of more than {_MOST_BYTES} bytes")
    return QueryResult(rows, len(cursor.description))


def _kind(error: Exception) -> str:
    too_large = getattr(error, "sqlite_errorname", "") in ("SQLITE_NOMEM", "SQLITE_TOOBIG")
    if too_large or isinstance(error, sqlite3.DataError):
        return "memory"
    return "syntax" if any(words in str(error) for words in _SYNTAX) else "other"


def same_result(gold: QueryResult, found: QueryResult, *, ordered: bool, any_columns: bool = True) -> bool:
    """Whether two queries that did not fail found the same.

    Rows count as often as they occur, with ``ordered`` in their order. With ``any_columns`` the order of the columns
    does not count; one rearrangement must fit all rows. A whole number is equal as integer and as float; other floats
    are compared in twelve digits, since sums depend on the order of their terms; NULL equals only NULL, and a number is
    never text.
    """
    first, second = _rounded(gold.rows or ()), _rounded(found.rows or ())
    if gold.columns != found.columns or len(first) != len(second):
        return False
    if first == second or (not ordered and Counter(first) == Counter(second)):
        return True
    if not any_columns or not first:
        return False
    columns, others = list(zip(*first, strict=True)), list(zip(*second, strict=True))
    return Counter(columns) == Counter(others) if ordered else _can_be_rearranged(columns, others)


def _rounded(rows: Sequence[Row]) -> list[Row]:
    def settle(value: Any) -> Any:
        return float(f"{value:.12g}") if isinstance(value, float) and not value.is_integer() else value

    return [tuple(map(settle, row)) for row in rows]


def _can_be_rearranged(columns: list[Row], others: list[Row]) -> bool:
    """Whether the second table is the first with columns and rows in another order."""
    # Equal columns are interchangeable, so only different ones are tried.
    different = list(dict.fromkeys(others))
    contents = [Counter(column) for column in different]
    fits = [[at for at, there in enumerate(contents) if there == content] for content in map(Counter, columns)]
    rows, each = Counter(zip(*columns, strict=True)), Counter(map(different.index, others))
    # Only results with many columns of equal content have more ways than these, and count as different.
    return any(
        Counter(chosen) == each and Counter(zip(*(different[at] for at in chosen), strict=True)) == rows
        for chosen in islice(product(*fits), 10_000)
    )


class Verdict(NamedTuple):
    """A query compared with the right one.

    Attributes:
        right: it finds the same, see :func:`same_result`.
        same_columns: also with its columns in the same order.
        failure: why it failed, if it did, see :class:`QueryResult`.
        message: the reason in words.
        gold_failure: why the right query failed; then nothing is said about the other.
        gold_output: what the ``sqlite3`` shell would print for the right query; if long, shortened, with a digest.
        output: the same for the other.
    """

    right: bool = False
    same_columns: bool = False
    failure: str | None = None
    message: str = ""
    gold_failure: str | None = None
    gold_output: str = ""
    output: str = ""


def judge(  # noqa: PLR0917  # what is sent to another process has no names
    database: str, gold: str, sql: str | None, ordered: bool, seconds: float, memory: int
) -> Verdict:
    """Compare what the right query and another find, each within the limits.

    ``sql`` is None to see only whether the right one works; ``memory`` is in MiB.
    """
    truth = run_query(database, gold, seconds=seconds, memory=memory)
    if truth.rows is None:
        return Verdict(gold_failure=f"{truth.failure}: {truth.message}")
    output = _printed(truth.rows)
    if sql is None:
        return Verdict(gold_output=output)
    # One row more than the right ones is as wrong as a billion.
    found = run_query(database, sql, seconds=seconds, memory=memory, most_rows=len(truth.rows))
    if found.failure == "rows":
        return Verdict(gold_output=output, output=found.message)
    if found.rows is None:
        return Verdict(failure=found.failure, message=found.message, gold_output=output)
    right = same_result(truth, found, ordered=ordered)
    same_columns = right and same_result(truth, found, ordered=ordered, any_columns=False)
    return Verdict(right, same_columns, gold_output=output, output=_printed(found.rows))


def _printed(rows: Sequence[Row]) -> str:
    content = "\n".join("|".join(map(_cell, row)) for row in rows).encode("utf-8", "surrogateescape")
    text = content.decode("utf-8", "backslashreplace")
    if len(text) <= _LONGEST_OUTPUT:
        return text
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"{text[:_LONGEST_OUTPUT]}... ({len(content)} bytes, sha256 {digest})"


def _cell(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float):
        digits = f"{value:.15g}"
        return f"{digits}.0" if digits.lstrip("-").isdigit() else digits
    return "" if value is None else str(value)
