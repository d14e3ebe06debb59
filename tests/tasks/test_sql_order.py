"""Queries whose ORDER BY does not tell rows apart: another order of these is another result."""

import sqlite3

import pytest

from stepjepa.tasks.sql_execution import Check, depends_on_ties, judge, run_query
from stepjepa.tasks.sql_order import with_last_term

LIMITS = {"seconds": 5.0, "memory": 200}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "zoo.sqlite"
    connection = sqlite3.connect(path)
    rows = "(1, 'Zed', 4), (2, 'Amy', 4), (3, 'Bob', 7), (4, 'Bob', 7)"
    connection.executescript(
        f"create table animal(id integer primary key, name text, age int); insert into animal values {rows}"
    )
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize(
    ("sql", "depends"),
    [
        ("SELECT name FROM animal ORDER BY age DESC", True),
        ("SELECT name FROM animal ORDER BY age LIMIT 1", True),
        ("SELECT name FROM animal ORDER BY age DESC, name;", False),
        ("SELECT name FROM animal ORDER BY id", False),
        # The rows of equal rank are the same.
        ("SELECT name FROM animal ORDER BY age DESC LIMIT 1", False),
        ("SELECT age FROM animal ORDER BY age -- by age", False),
        ("SELECT name FROM animal ORDER /* young */ -- first\n BY age", True),
        ("SELECT name AS [order by], age AS `limit` FROM animal", False),
        ("SELECT name FROM animal ORDER BY age -- limit 1", True),
        ("SELECT age, count(*) FROM animal GROUP BY age ORDER BY count(*)", True),
        ("SELECT DISTINCT name FROM animal ORDER BY age", True),
        ("SELECT count(*) FROM animal ORDER BY 1", False),
        # Ordered by the columns of the result.
        ("SELECT name, age FROM animal UNION SELECT name, 0 FROM animal ORDER BY age", True),
        ("SELECT age FROM animal UNION SELECT 0 ORDER BY age", False),
        ("SELECT name FROM animal", False),
        ("SELECT name FROM (SELECT name FROM animal ORDER BY age LIMIT 1)", False),
    ],
)
def test_whether_a_result_depends_on_ties(zoo, sql, depends):
    table = run_query(zoo, sql, **LIMITS)
    assert depends_on_ties(zoo, sql, table, **LIMITS) is depends
    # The verdict has it, with an answer and without, where the query orders.
    ordered = bool(with_last_term(sql, "1"))
    for answer in (None, "SELECT name FROM animal", "SELECT nme"):
        assert judge(Check(str(zoo), sql, answer, ordered, 5.0, 200)).ties is depends


def test_by_hand_where_the_term_goes():
    assert with_last_term("SELECT a FROM t ORDER BY a LIMIT 3;", "x()") == [
        "SELECT a FROM t ORDER BY a \n, x() LIMIT 3",
        "SELECT * FROM (SELECT a FROM t \n) ORDER BY a \n, x() LIMIT 3",
    ]
    assert with_last_term("SELECT a FROM (SELECT 1 ORDER BY 1)", "x()") == []
