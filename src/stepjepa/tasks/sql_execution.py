"""Run untrusted queries on an SQLite file, and compare the results of two of them.

Nothing here can change a file: the database is opened read-only and immutable, and any statement that does more than
read is refused before it runs. Almost only the standard library is imported, since worker processes load this module.
"""

import hashlib
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count, islice, product
from pathlib import Path
from typing import NamedTuple

from stepjepa.tasks.sql_order import with_last_term

Row = tuple[object, ...]

MOST_ROWS = 500_000
RANK = "stepjepa_rank"
_MOST_BYTES = 64 * 2**20
# Bytes of one value, also one made by zeroblob, randomblob, printf, replace and group_concat.
_LONGEST_VALUE = 16 * 2**20
_LONGEST_PATTERN = 1000
# Characters of a message or a result that are recorded.
_LONGEST_OUTPUT = 300
# Instructions of SQLite's virtual machine between two checks of the time: well under a millisecond.
_INSTRUCTIONS = 1000

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
# Functions that reach beyond the database: code, pointers, files and the log of this process.
_DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit", "sqlite_log"}
_SYNTAX = ("syntax error", "incomplete input", "unrecognized token", "stack overflow", "one statement at a time")


class QueryError(Exception):
    """A query that failed, by kind: ``syntax`` (no query at all, or several), ``denied`` (it would do more than read),
    ``time``, ``rows``, ``memory`` (a limit), or ``other`` (an unknown table or column, most often).
    """

    def __init__(self, kind: str, message: object) -> None:
        super().__init__(str(message)[:_LONGEST_OUTPUT])
        self.kind = kind


class Table(NamedTuple):
    """The result of a query: its rows in SQLite's order, and the number of columns (known without rows, too)."""

    rows: list[Row]
    columns: int


def run_query(
    database: str | os.PathLike[str],
    sql: str,
    *,
    seconds: float,
    memory: int,
    most_rows: int = MOST_ROWS,
    rank: Callable[[], float] | None = None,
) -> Table:
    """Run one query; no query can change or make a file.

    Run it in a separate process: one call of a function on a long text can't be interrupted from within, and the
    limit on memory holds for all of SQLite in this process and is never raised again.

    Args:
        database: the file of the database.
        sql: the query.
        seconds: the longest time.
        memory: the most memory, in MiB.
        most_rows: the most rows of the result.
        rank: implements the SQL function :data:`RANK`, which is called once per row.

    Raises:
        QueryError: the query is wrong, or it reached a limit.
    """
    deadline = time.monotonic() + seconds
    denied: list[int] = []

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        function = action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _DENIED_FUNCTIONS
        # What json_each and its like ask for when they say which columns they have; SQLite itself refuses a statement
        # that would change this table.
        declaring = action == sqlite3.SQLITE_UPDATE and first == "sqlite_master"
        if action in _READING or function or declaring:
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    def late() -> bool:
        return time.monotonic() > deadline

    # Immutable: no locks and no journal, so that nothing is written beside the file.
    uri = f"{Path(database).resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            _limit(connection, memory)
            if rank is not None:
                connection.create_function(RANK, 0, rank)
            connection.set_authorizer(authorize)
            connection.set_progress_handler(late, _INSTRUCTIONS)
            table = _read(connection.execute(sql.rstrip("; \t\r\n")), most_rows)
    except MemoryError:
        raise QueryError("memory", "out of memory") from None
    # ValueError: the text is not UTF-8, or holds a null character.
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise QueryError("time" if late() else "denied" if denied else _kind(error), error) from None
    if late():
        raise QueryError("time", "interrupted")
    return table


def _limit(connection: sqlite3.Connection, memory: int) -> None:
    """Limit the sizes of values and the memory (in MiB), and make SQLite write no file for a sort."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _LONGEST_PATTERN)
    # Text in another encoding than declared is compared by its bytes.
    connection.text_factory = lambda content: content.decode("utf-8", "surrogateescape")
    connection.execute(f"PRAGMA hard_heap_limit = {memory * 2**20}")
    # Otherwise a large sort would write a file.
    connection.execute("PRAGMA temp_store = MEMORY")


def _kind(error: Exception) -> str:
    """Return the kind of an error of SQLite: ``memory``, ``syntax`` or ``other``."""
    too_large = getattr(error, "sqlite_errorname", "") in ("SQLITE_NOMEM", "SQLITE_TOOBIG")
    if too_large or isinstance(error, sqlite3.DataError):
        return "memory"
    return "syntax" if any(words in str(error) for words in _SYNTAX) else "other"


def _read(cursor: sqlite3.Cursor, most_rows: int) -> Table:
    """Read the rows of a query; raise ``QueryError`` for too many or too large ones."""
    if cursor.description is None:
        raise QueryError("syntax", "no statement")
    rows: list[Row] = []
    size = 0
    for row in cursor:
        rows.append(row)
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(rows) > most_rows:
            raise QueryError("rows", f"more than {most_rows} rows")
        if size > _MOST_BYTES:
            raise QueryError("memory", f"a result of more than {_MOST_BYTES} bytes")
    return Table(rows, len(cursor.description))


class Match(NamedTuple):
    """In what two results are equal."""

    rows: bool  # their rows, up to the order of columns
    columns: bool  # the order of columns, too


def compare(gold: Table, result: Table, *, ordered: bool) -> Match:
    """Compare two results.

    Rows are compared as multisets, with ``ordered`` as lists; one order of the columns must fit all rows. A whole
    number is equal as integer and as float; other floats are compared to twelve digits, since sums depend on the order
    of their terms; NULL equals only NULL, and a number is never text.

    Args:
        gold: the result of the right query.
        result: that of the other one.
        ordered: the order of rows counts.
    """
    first, second = ([tuple(map(_settled, row)) for row in table.rows] for table in (gold, result))
    if gold.columns != result.columns or len(first) != len(second):
        return Match(False, False)
    if first == second or (not ordered and Counter(first) == Counter(second)):
        return Match(True, True)
    columns, others = list(zip(*first, strict=True)), list(zip(*second, strict=True))
    if ordered:
        return Match(Counter(columns) == Counter(others), False)
    # Equal columns are interchangeable, so only distinct ones are permuted. Results with very many columns of equal
    # content have more permutations than are tried, and count as different.
    different = list(dict.fromkeys(others))
    contents, multiplicity = [Counter(column) for column in different], Counter(map(different.index, others))
    fits = [[at for at, other in enumerate(contents) if other == content] for content in map(Counter, columns)]
    rearranged = any(
        Counter(chosen) == multiplicity
        and Counter(zip(*(different[at] for at in chosen), strict=True)) == Counter(first)
        for chosen in islice(product(*fits), 10_000)
    )
    return Match(rearranged, False)


class Verdict(NamedTuple):
    """The comparison of a query with the right one, see :func:`compare`."""

    right: bool = False
    same_columns: bool = False
    failure: str | None = None  # kind of a QueryError, and its message
    gold_failure: str | None = None  # failure of the right query; the other is then not judged
    gold_output: str = ""  # output as the sqlite3 shell would print it; shortened with a digest if long
    output: str = ""
    ties: bool = False  # the right query's result depends on the order of rows that tie in its ORDER BY


def depends_on_ties(database: str | os.PathLike[str], sql: str, table: Table, *, seconds: float, memory: int) -> bool:
    """Return whether an ordered query has another result than ``table`` if tied rows come in another order.

    Tries the order in which SQLite reads the rows, its reverse and a shuffled one; an order that can't be tried is
    ignored.

    Args:
        database: the file.
        sql: the query.
        table: its result.
        seconds: time limit of all tries together.
        memory: memory limit of a query, in MiB.
    """
    deadline = time.monotonic() + seconds
    for rank in (count(0, -1).__next__, count().__next__, random.Random(0).random):
        for changed in with_last_term(sql, f"{RANK}()"):
            remaining = deadline - time.monotonic()
            try:
                other = run_query(database, changed, seconds=remaining, memory=memory, rank=rank)
            except QueryError:
                continue
            if not compare(table, other, ordered=True).columns:
                return True
            break
    return False


class Check(NamedTuple):
    """The queries that :func:`judge` compares, and the limits of each."""

    database: str  # path of the SQLite file
    gold: str  # the right query
    sql: str | None  # the query to judge; None to run only the right one
    ordered: bool  # whether the order of rows counts
    seconds: float
    memory: int  # in MiB


def judge(check: Check) -> Verdict:
    """Compare the results of the right query and of the one to judge, each within its limits."""
    database, gold, sql, ordered, seconds, memory = check
    started = time.monotonic()
    try:
        truth = run_query(database, gold, seconds=seconds, memory=memory)
    except QueryError as error:
        failed = Verdict(gold_failure=f"{error.kind}: {error}")
        if sql is not None:
            # The published rule compares printed output, and that of the right query is empty here.
            with suppress(QueryError):
                return failed._replace(output=_printed(run_query(database, sql, seconds=seconds, memory=memory).rows))
        return failed
    remaining = seconds - (time.monotonic() - started)
    ties = ordered and depends_on_ties(database, gold, truth, seconds=remaining, memory=memory)
    of_truth = Verdict(gold_output=_printed(truth.rows), ties=ties)
    if sql is None:
        return of_truth
    try:
        # One row too many decides; more need not be read.
        result = run_query(database, sql, seconds=seconds, memory=memory, most_rows=len(truth.rows))
    except QueryError as error:
        if error.kind == "rows":
            return of_truth._replace(output=str(error))
        return of_truth._replace(failure=f"{error.kind}: {error}")
    match = compare(truth, result, ordered=ordered)
    return of_truth._replace(right=match.rows, same_columns=match.columns, output=_printed(result.rows))


def result_name(database: str, sql: str, ordered: bool, seconds: float, memory: int) -> str | None:
    """Name the result of a query in a database: equal results have equal names, see :func:`compare`.

    The order of columns counts, and with ``ordered`` that of rows.

    Args:
        database: the file.
        sql: the query.
        ordered: the order of rows counts.
        seconds: time limit.
        memory: memory limit, in MiB.

    Returns:
        The name; None for a query that fails.
    """
    try:
        table = run_query(database, sql, seconds=seconds, memory=memory)
    except QueryError:
        return None
    rows = [repr(tuple(map(_settled, row))) for row in table.rows]
    content = "\n".join([database, str(table.columns), *(rows if ordered else sorted(rows))])
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()


def _settled(value: object) -> object:
    """Return a value in a form that equal numbers share: a whole float as an integer, others to twelve digits."""
    if not isinstance(value, float):
        return value
    rounded = value if value.is_integer() else float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def _printed(rows: list[Row]) -> str:
    """Return rows as the sqlite3 shell prints them; shortened with a digest if long."""
    content = "\n".join("|".join(map(_cell, row)) for row in rows).encode("utf-8", "surrogateescape")
    text = content.decode("utf-8", "backslashreplace")
    if len(text) <= _LONGEST_OUTPUT:
        return text
    return f"{text[:_LONGEST_OUTPUT]}... ({len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:16]})"


def _cell(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, float):
        digits = f"{value:.15g}"
        return f"{digits}.0" if digits.lstrip("-").isdigit() else digits
    return "" if value is None else str(value)
