"""What the text of a query says: the same query, ordered rows, how hard; judged by hand."""

import re
import time
from collections import Counter

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.sql.text import hardness, normal_form, orders_rows, same_text


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        # Writing.
        ("SELECT name FROM singer", "select  name\n from SINGER ;", True),
        ("SELECT a FROM t WHERE b != 1", "SELECT a FROM t WHERE b <> 1", True),
        ("SELECT a AS x FROM t", "SELECT a x FROM t", True),
        # Quotes around values, as Spider has them, and around names.
        ("SELECT a FROM t WHERE b = 'Paris'", 'SELECT a FROM t WHERE b = "Paris"', True),
        ("SELECT a FROM t WHERE b BETWEEN 'x' AND 'y'", 'SELECT a FROM t WHERE b BETWEEN "x" AND "y"', True),
        ("SELECT name FROM t", "SELECT 'name' FROM t", False),
        ('SELECT a FROM t WHERE b = t."c"', "SELECT a FROM t WHERE b = 'c'", False),
        # Values stay as they are.
        ("SELECT a FROM t WHERE b = 'Paris'", "SELECT a FROM t WHERE b = 'paris'", False),
        # What tables are called.
        (
            "SELECT T1.a FROM t AS T1 JOIN u AS T2 ON T1.id = T2.id",
            "SELECT x.a FROM t x INNER JOIN u y ON x.id = y.id",
            True,
        ),
        (
            "SELECT T2.a FROM t AS T2 JOIN t AS T1 ON T2.b = T1.c",
            "SELECT T1.a FROM t AS T1 JOIN t AS T2 ON T1.b = T2.c",
            True,
        ),
        ("SELECT a FROM t LEFT JOIN u ON t.b = u.b", "SELECT a FROM t LEFT OUTER JOIN u ON t.b = u.b", True),
        ("SELECT a FROM t, u", "SELECT a FROM t JOIN u", True),
        ("SELECT a FROM t JOIN u USING (b)", "SELECT a FROM t INNER JOIN u USING (B)", True),
        # Names belong to their own query, or to one around it.
        (
            "SELECT a FROM t WHERE b IN (SELECT T1.b FROM u AS T1 WHERE T1.c > 1)",
            "SELECT T1.a FROM t AS T1 WHERE T1.b IN (SELECT b FROM u WHERE c > 1)",
            True,
        ),
        ("WITH x AS (SELECT a FROM t) SELECT x.a FROM x", "with x as (select a from t) select a from x", True),
        # Other queries.
        ("SELECT a, b FROM t", "SELECT b, a FROM t", False),
        ("SELECT a FROM t WHERE b = 1 AND c = 2", "SELECT a FROM t WHERE b = 1 OR c = 2", False),
        ("SELECT a FROM t", "SELECT a FROM t; SELECT b FROM t", False),
        # No queries: only as they stand.
        ("I don't know", "I don't know ", True),
        ("DROP TABLE t", "drop table t", False),
        ("", "SELECT a FROM t", False),
    ],
)
def test_the_same_text(first, second, same):
    assert same_text(first, second) is same
    assert same_text(second, first) is same


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM t WHERE b = 'order by'", False),
        ('SELECT "order by" FROM t', False),
        ("SELECT a FROM t WHERE b = (SELECT b FROM u ORDER BY c LIMIT 1)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("no query", None),
        ("", None),
    ],
)
def test_whether_the_rows_are_ordered(sql, ordered):
    assert orders_rows(sql) is ordered


@pytest.mark.parametrize(
    ("sql", "level"),
    [
        # Not more than one component.
        ("SELECT count(*) FROM singer", "easy"),
        ("SELECT name FROM singer ORDER BY age", "easy"),
        ("SELECT DISTINCT country FROM singer GROUP BY country", "easy"),
        # Two columns, two conditions, or two components.
        ("SELECT name, age FROM singer", "medium"),
        ("SELECT avg(age), min(age), max(age) FROM singer", "medium"),
        ("SELECT name FROM singer WHERE name LIKE '%a%'", "medium"),
        ("SELECT name FROM singer ORDER BY age DESC LIMIT 1", "medium"),
        ("SELECT country, count(*) FROM singer GROUP BY country", "medium"),
        # Three components, three others, or one nesting and nothing else.
        ("SELECT country FROM singer GROUP BY country ORDER BY count(*) DESC LIMIT 1", "hard"),
        ("SELECT name FROM singer WHERE age > (SELECT avg(age) FROM singer)", "hard"),
        ("SELECT min(age), max(age) FROM singer WHERE a = 1 AND b = 2 GROUP BY c, d", "hard"),
        # More of it.
        ("SELECT max(age), min(age) FROM singer WHERE country = 'France' GROUP BY country", "extra"),
        ("SELECT count(*) FROM singer WHERE id NOT IN (SELECT singer FROM song)", "extra"),
        ("no query", None),
        ("", None),
    ],
)
def test_how_hard_a_query_is(sql, level):
    assert hardness(sql) == level


# The 20 databases of the development set of Spider, and how many of its 1034 questions are published to be how hard.
DEVELOPMENT = {
    *("concert_singer", "pets_1", "car_1", "flight_2", "employee_hire_evaluation", "cre_Doc_Template_Mgt"),
    *("course_teach", "world_1", "museum_visit", "wta_1", "battle_death", "student_transcripts_tracking", "tvshow"),
    *("poker_player", "voter_1", "orchestra", "network_1", "dog_kennels", "singer", "real_estate_properties"),
}
PUBLISHED = {"easy": 248, "medium": 446, "hard": 174, "extra": 166}


@pytest.fixture(scope="module")
def spider(shared_data):
    return [
        (re.match(r"For db_id:\[(.*?)\]", record.messages[1]["content"])[1], record.answer)
        for name in ("spider_test", "spider_train")
        for record in read_records(shared_data / "llm_jepa" / f"{name}.jsonl")
    ]


def test_hardness_is_distributed_as_published(spider):
    assert Counter(hardness(sql) for name, sql in spider if name in DEVELOPMENT) == PUBLISHED


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT " + "a, " * 300_000 + "a FROM t",
        "SELECT " + "(" * 500_000 + "1" + ")" * 500_000,
        "SELECT * FROM " + "(SELECT * FROM " * 400 + "t" + ")" * 400,
        "SELECT " + "- " * 4000 + "1",
        "SELECT a FROM t WHERE " + " OR ".join(["a = 1"] * 900),
        "SELECT * FROM t" + " LEFT JOIN t" * 800,
        "SELECT " + "STRUCT (" * 200,
        '"' * 9_999,
        "word " * 200_000,
        "\x00" * 1_000_000,
    ],
    ids=range(10),
)
def test_no_text_takes_long(sql):
    started = time.process_time()
    for function in (normal_form, orders_rows, hardness):
        function(sql)
    assert not same_text(sql, "SELECT a FROM t")
    assert time.process_time() - started < 2
