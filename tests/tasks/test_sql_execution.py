"""Queries that nobody has vouched for: what they find, what is refused, and that no byte is ever written."""

import sqlite3
import time
from collections import Counter
from itertools import permutations, product
from pathlib import Path

import pytest

from stepjepa.tasks.sql_execution import Check, QueryError, Table, compare, judge, run_query
from stepjepa.tasks.workers import Workers

MEMORY = 512


def make_database(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, country TEXT, pay REAL);
        INSERT INTO singer VALUES (1, 'Joe', 52, 'Netherlands', 0.1), (2, 'Tim', 32, 'United States', 0.2),
            (3, 'Rose', 41, 'France', 0.3), (4, 'Tim', 43, 'France', NULL);
        CREATE TABLE numbers (n INTEGER);
        INSERT INTO numbers WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 1000)
            SELECT n FROM c;
        CREATE VIEW french AS SELECT name FROM singer WHERE country = 'France';
        CREATE TABLE latin (word TEXT);
        INSERT INTO latin VALUES (CAST(x'436166e9' AS TEXT)), (CAST(x'436166ea' AS TEXT));
        """
    )
    connection.commit()
    connection.close()
    return path


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return make_database(tmp_path_factory.mktemp("databases") / "small.sqlite")


def state(folder):
    """Names, contents and times of change, which tell of files that came and went."""
    entries = (folder, *sorted(folder.rglob("*")))
    return [(entry.name, entry.stat().st_mtime_ns, entry.is_file() and entry.read_bytes()) for entry in entries]


def run(database, sql, seconds=5.0, **limits):
    """The rows, or the kind of the failure."""
    try:
        return run_query(database, sql, seconds=seconds, memory=MEMORY, **limits).rows
    except QueryError as error:
        assert str(error).encode()
        return error.kind


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("VALUES (1, NULL);", [(1, None)]),
        ('WITH f AS (SELECT * FROM singer WHERE country = "France") SELECT min(age) FROM f', [(41,)]),
        ("SELECT name FROM french ORDER BY name", [("Rose",), ("Tim",)]),
        ("SELECT name FROM singer, json_each('[1, 3]') WHERE singer.id = value", [("Joe",), ("Rose",)]),
        ('SELECT key FROM json_tree(\'{"a": {"b": 1}}\') WHERE atom = 1', [("b",)]),
    ],
)
def test_reading_is_allowed(database, sql, rows):
    assert run(database, sql) == rows


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sql", "failure"),
    [
        ("DROP TABLE singer", "denied"),
        ("WITH x AS (SELECT 1) DELETE FROM singer", "denied"),
        ("ATTACH DATABASE '/tmp/should-not-be-there.sqlite' AS x", "denied"),
        ("VACUUM INTO '/tmp/should-not-be-there.sqlite'", "denied"),
        ("PRAGMA journal_mode = WAL", "denied"),
        ("SELECT Fts3_tokenizer('simple')", "denied"),
        ("SELECT * FROM pragma_table_info('singer')", "denied"),
        ("SELECT Load_extension('x') FROM json_each('[1]')", "denied"),
        ("CREATE VIRTUAL TABLE temp.words USING fts4(word)", "denied"),
        ("UPDATE sqlite_master SET sql = 'x'", "other"),
        ("SELECT 1; SELECT 2", "syntax"),
        ("-- nothing", "syntax"),
        ("word " * 100_000, "syntax"),
        ("SELECT nme FROM singer", "other"),
        ("SELECT '\ud800'", "other"),
        ("WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c", "time"),
        ("SELECT a.n, b.n FROM numbers a, numbers b, numbers c", "rows"),
        ("SELECT zeroblob(1000000000)", "memory"),
        ("SELECT zeroblob(10000000) FROM numbers", "memory"),
        ("SELECT * FROM (SELECT zeroblob(10000000 + n) AS b FROM numbers) ORDER BY b", "memory"),
        ("SELECT * FROM " + " JOIN ".join(["numbers"] * 100), "other"),
    ],
)
def test_everything_else_fails_within_the_limits_and_writes_nothing(database, sql, failure):
    before = state(database.parent)
    started = time.monotonic()
    assert run(database, sql, seconds=1.0 if failure == "time" else 30.0, most_rows=10_000) == failure
    assert time.monotonic() - started < 15
    assert state(database.parent) == before
    assert not Path("/tmp/should-not-be-there.sqlite").exists()


@pytest.mark.slow
def test_a_call_that_cannot_be_interrupted_is_ended_with_its_process(database):
    # One call of one function that takes long: SQLite does not look at the clock before it is over.
    slow = f"SELECT hex(zeroblob(8000000)) LIKE '%{'0' * 900}1%'"
    calls = [
        (Check(str(database), "SELECT 1", sql, False, 0.5, 100),)
        for sql in (slow, "SELECT count(*) FROM numbers a, numbers b, numbers c", "SELECT 1")
    ]
    workers = Workers(judge, seconds=1.5, memory=400, processes=1)
    try:
        first, second, third = workers.map(calls)
    finally:
        workers.close()
    assert first.failure == "time"
    assert (second.value.right, second.value.failure) == (False, "time: interrupted")
    assert third.value.right


def test_text_that_is_no_utf8_is_read_and_told_apart(database):
    verdict = judge(Check(str(database), "SELECT word FROM latin", "SELECT word FROM latin", False, 5.0, MEMORY))
    assert verdict.right
    verdict.output.encode()
    first, second = (f"SELECT word FROM latin WHERE rowid = {row}" for row in (1, 2))
    other = judge(Check(str(database), first, second, False, 5.0, MEMORY))
    assert not other.right


def test_no_file_is_made_or_touched_whatever_the_database_is(tmp_path):
    # Names that mean something in an address, and files that are no databases.
    special = [make_database(tmp_path / name / "a.sqlite") for name in ("a%20b", "x?mode=rwc")]
    (tmp_path / "text.sqlite").write_text("no database, but long enough to have a header " * 10)
    (tmp_path / "empty.sqlite").touch()
    # One with a log of writes beside it.
    writer = sqlite3.connect(make_database(tmp_path / "log.sqlite"))
    writer.execute("PRAGMA journal_mode = WAL").fetchone()
    writer.execute("DELETE FROM singer WHERE id = 1")
    writer.commit()
    before = state(tmp_path)
    assert (tmp_path / "log.sqlite-wal").stat().st_size > 0
    for name in ("none.sqlite", ".", "text.sqlite", "empty.sqlite"):
        assert run(tmp_path / name, "SELECT 1 FROM singer") == "other"
    for file in (tmp_path / "log.sqlite", *special):
        assert run(file, "SELECT count(*) FROM singer") == [(4,)]
        assert run(file, "DELETE FROM singer") == "denied"
    assert state(tmp_path) == before
    writer.close()


def found(*rows):
    return Table(list(rows), len(rows[0]))


@pytest.mark.parametrize(
    ("gold", "answer", "unordered", "ordered", "same_columns"),
    [
        # Columns in another order, the same for all rows.
        ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], True, True, False),
        # How often a row occurs.
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False, False),
        # What is the same value and what is not.
        ([(1,)], [(1.0,)], True, True, True),
        ([(None,)], [(0,)], False, False, False),
        ([(0.1 + 0.2,)], [(0.3,)], True, True, True),
        ([(9007199254740993,)], [(9007199254740992.0,)], False, False, False),
        # Two instants of a Julian date, a second apart.
        ([(2459580.5000115740,)], [(2459580.5000231480,)], False, False, False),
        # Floats that are nearly the same must not change which rows belong together.
        ([(0.1 + 0.2, "a"), (0.3, "b")], [(0.3, "a"), (0.3, "b")], True, True, True),
        # Many equal columns, of which one stands elsewhere.
        ([(0,) * 30 + (1,)], [(0,) * 5 + (1,) + (0,) * 25], True, True, False),
    ],
)
def test_the_same_result_as_a_person_would_say(gold, answer, unordered, ordered, same_columns):
    for first, second in [(gold, answer), (answer, gold)]:
        assert compare(found(*first), found(*second), ordered=False) == (unordered, unordered and same_columns)
        assert compare(found(*first), found(*second), ordered=True).rows is ordered


def test_rearranged_columns_are_found_exactly_where_trying_all_finds_them():
    outcomes = Counter()
    tables = [cells for cells in product([1, None], repeat=6) if sum(map(bool, cells)) < 4]
    for cells, others, ordered in product(tables, tables, (False, True)):
        gold, answer = ([each[:3], each[3:]] for each in (cells, others))
        rearranged = [[tuple(row[place] for place in order) for row in answer] for order in permutations(range(3))]
        expected = any(rows == gold if ordered else Counter(rows) == Counter(gold) for rows in rearranged)
        assert compare(found(*gold), found(*answer), ordered=ordered).rows is expected, (gold, answer, ordered)
        outcomes[ordered, expected] += 1
    assert len(outcomes) == 4


@pytest.mark.parametrize(
    ("gold", "sql", "right", "failure", "outputs"),
    [
        ("SELECT pay FROM singer LIMIT 2", "SELECT pay FROM singer WHERE id <= 2", True, None, ("0.1\n0.2",) * 2),
        ("SELECT name FROM singer WHERE id > 9", "SELECT nme", False, "other: no such column: nme", ("", "")),
        ("SELECT name FROM singer WHERE id > 9", "SELECT name FROM singer", False, None, ("", "more than 0 rows")),
        ("SELECT pay, 1.0, NULL, x'61' FROM singer WHERE id = 1", None, False, None, ("0.1|1.0||a", "")),
    ],
)
def test_a_verdict_says_what_was_found(database, gold, sql, right, failure, outputs):
    verdict = judge(Check(str(database), gold, sql, False, 5.0, MEMORY))
    assert (verdict.right, verdict.failure, verdict.gold_failure) == (right, failure, None)
    assert (verdict.gold_output, verdict.output) == outputs
