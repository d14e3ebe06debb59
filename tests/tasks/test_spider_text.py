"""What the text of a query says: the same query, ordered rows, how hard; judged by hand."""

import re
import time
from collections import Counter

import pytest

from stepjepa.data.sources import read_records
from stepjepa.tasks.spider import first_statement, hardness, normal_form, orders_rows, whole_answer


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("SELECT name FROM singer", "select  name\n from SINGER ; -- all", True),
        ("SELECT a FROM t WHERE b != 1", "SELECT a FROM t WHERE b <> 1", True),
        ("SELECT a FROM t WHERE b = 'Paris'", 'SELECT a FROM t WHERE b = "Paris"', True),
        ("SELECT T1.a FROM t AS T1 JOIN u ON b = c", "SELECT t1.a FROM t T1 INNER JOIN u ON b = c", True),
        ("SELECT a FROM t ORDER BY a", "SELECT a FROM t ORDER BY a ASC", True),
        ("SELECT name FROM t", "SELECT 'name' FROM t", False),
        ("SELECT a FROM t WHERE b = 'Paris'", "SELECT a FROM t WHERE b = 'paris'", False),
        ("SELECT a FROM t WHERE b = 1 AND c = 2", "SELECT a FROM t WHERE b = 1 OR c = 2", False),
        ("SELECT a FROM t WHERE b > 1", "SELECT a FROM t WHERE b >= 1", False),
    ],
)
def test_the_same_text(first, second, same):
    assert (normal_form(first) == normal_form(second)) is same


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM t WHERE b = 'order by'", False),
        ("SELECT a FROM t WHERE b = (SELECT b FROM u ORDER BY c LIMIT 1)", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
    ],
)
def test_whether_the_rows_are_ordered(sql, ordered):
    assert orders_rows(sql) is ordered


@pytest.mark.parametrize(
    ("sql", "level"),
    [
        # Not more than one component.
        ("SELECT count(*) FROM singer", "easy"),
        ("SELECT name FROM singer WHERE age BETWEEN 1 AND 2", "easy"),
        # Two columns, two conditions, or two components.
        ("SELECT name, age FROM singer", "medium"),
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


def test_hardness_is_distributed_as_published(shared_data):
    queries = [
        (re.match(r"For db_id:\[(.*?)\]", record.messages[1]["content"])[1], record.answer)
        for name in ("spider_test", "spider_train")
        for record in read_records(shared_data / "llm_jepa" / f"{name}.jsonl")
    ]
    assert Counter(hardness(sql) for name, sql in queries if name in DEVELOPMENT) == PUBLISHED


@pytest.mark.parametrize("word", ["a, ", "(", "(SELECT * FROM ", " OR a = 1", "word ", "'", '"', "--"])
def test_no_text_takes_long(word):
    started = time.process_time()
    for function in (normal_form, orders_rows, hardness, first_statement, whole_answer):
        function("SELECT " + word * 100_000)
    assert time.process_time() - started < 4
