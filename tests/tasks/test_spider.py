"""Spider: which answers are right, judged as a person would who sees the database."""

import sqlite3

import pytest

import task_records
from stepjepa.base.errors import UserError
from stepjepa.data.sources import read_records
from stepjepa.tasks.base import FAILED, NO_ANSWER, TIMED_OUT, WRONG, Response, TaskOptions
from stepjepa.tasks.reference import with_published_rules
from stepjepa.tasks.registry import choose_task
from stepjepa.tasks.spider import SpiderTask
from stepjepa.tasks.sql_order import orders_rows

SCHEMA = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER, country TEXT);
INSERT INTO singer VALUES (1, 'Joe', 52, 'Netherlands'), (2, 'Tim', 32, 'United States'), (3, 'Rose', 41, 'France'),
    (4, 'Tim', 43, 'France'), (5, 'Ann; B', 29, NULL);
CREATE TABLE song (id INTEGER PRIMARY KEY, title TEXT, singer INTEGER, sold REAL);
INSERT INTO song VALUES (1, 'Sun', 3, 1.5), (2, 'Moon', 3, 2.5), (3, 'Love', 1, 2.5), (4, 'Hey', 4, 0.25);
"""


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("databases")
    (folder / "singers").mkdir()
    connection = sqlite3.connect(folder / "singers" / "singers.sqlite")
    connection.executescript(SCHEMA)
    connection.close()
    return folder


def make_task(folder, **options):
    return SpiderTask.from_options(TaskOptions(spider_path=folder, **options))


@pytest.fixture(scope="module")
def task(databases):
    made = make_task(str(databases), time_limit=2, memory_limit=512, workers=2)
    yield made
    made.close()


def record(answer, database="singers", line=1):
    return task_records.record(answer, f"For db_id:[{database}]\n\nHow many?", line=line)


NAMES = "SELECT name FROM singer"
COUNT = "SELECT count(*) FROM singer"
PAIRS = "SELECT name, age FROM singer WHERE country = 'France'"
BY_AGE = "SELECT name FROM singer ORDER BY age"
NONE = "SELECT name FROM singer WHERE age > 90"
ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT max(n) FROM c"
JOINED = 'SELECT T1.name FROM singer AS T1 JOIN song AS T2 ON T1.id = T2.singer WHERE T2.title = "Moon"'

# truth, answer, then e: execution, c: same_columns, f: first_statement; then the error.
ANSWERS = [
    # Right, in whatever words.
    (COUNT, COUNT, "ecf", None),
    (COUNT, "SELECT count(id) FROM singer", "ecf", None),
    (COUNT, f"```sql\n{COUNT};\n```", "ecf", None),
    (JOINED, "SELECT name FROM singer WHERE id IN (SELECT singer FROM song WHERE title = 'Moon')", "ecf", None),
    # Two columns in either order, where the question names both.
    (PAIRS, "SELECT age, name FROM singer WHERE country = 'France'", "e-f", None),
    # Right, but more was said.
    (COUNT, f"{COUNT};\nSELECT name FROM singer", "--f", FAILED),
    (COUNT, f"Here is the query:\n```sql\n{COUNT}\n```", "--f", FAILED),
    (f"{NAMES} WHERE name = 'Ann; B'", f"{NAMES} WHERE name = 'Ann; B'; SELECT", "--f", FAILED),
    (COUNT, "SELECT count(*) /* all; */ FROM singer; SELECT", "--f", FAILED),
    # What comes before the query is not overlooked.
    (COUNT, f"Answer: {COUNT}", "---", FAILED),
    # Nearly right.
    (COUNT, "SELECT count(country) FROM singer", "---", WRONG),
    (BY_AGE, NAMES, "---", WRONG),
    (PAIRS, "SELECT age, age FROM singer WHERE country = 'France'", "---", WRONG),
    ("SELECT country FROM singer WHERE id = 5", "SELECT 0", "---", WRONG),
    # A query that fails is wrong, also where the truth finds nothing.
    (NONE, "SELECT nme FROM singer WHERE age > 90", "---", FAILED),
    (NONE, "SELECT name FROM", "---", FAILED),
    (NONE, "DELETE FROM singer WHERE age > 90", "---", FAILED),
    # Nothing.
    (NONE, "", "---", NO_ANSWER),
    # Without end.
    (COUNT, ENDLESS, "---", TIMED_OUT),
    (COUNT, "SELECT hex(zeroblob(1000000000))", "---", TIMED_OUT),
]


@pytest.fixture(scope="module")
def judged(task):
    records = [record(truth) for truth, *_ in ANSWERS]
    return task.score_all(records, [Response(answer) for _, answer, *_ in ANSWERS])


@pytest.mark.parametrize("place", range(len(ANSWERS)), ids=[answer[:60] for _, answer, *_ in ANSWERS])
def test_the_verdict_of_a_person(judged, place):
    *_, letters, error = ANSWERS[place]
    scored = judged[place]
    names = ("execution", "same_columns", "first_statement")
    assert "".join(mark if scored.scores[name] else "-" for name, mark in zip(names, "ecf", strict=True)) == letters
    assert scored.error == error
    assert list(scored.scores) == [*names, "exact", "prefix", "contains"]
    assert (scored.extracted["failure"] is None) is (error in (None, WRONG, NO_ANSWER))
    assert scored.extracted["gold_failure"] is None


def test_true_queries_that_fail_are_counted_apart(task, judged):
    truths = ["SELECT nme FROM singer", "SELECT count(*) FROM singer", "SELECT nme FROM singer"]
    output = ["SELECT nme FROM singer;", "SELECT 5", "SELECT name FROM singer"]
    scored = task.score_all([record(truth) for truth in truths], [Response(text) for text in output])
    assert [each.scores["execution"] for each in scored] == [False, True, False]
    assert [each.error for each in scored] == [FAILED, None, FAILED]
    assert scored[0].extracted["gold_failure"] == "other: no such column: nme"
    assert scored[0].extracted["failure"] is None
    scored += judged
    details = task.details([{"scores": each.scores, "extracted": each.extracted} for each in scored])
    assert details["gold_failures"] == {"other: no such column: nme": 2}
    right = [each.scores["execution"] for each in scored if each.extracted["gold_failure"] is None]
    assert details["execution_without_gold_failures"] == sum(right) / len(right)
    assert set(details["failures"]) == {"syntax", "other", "denied", "time", "memory"}


def test_true_queries_whose_order_is_not_determined_are_counted(task):
    truths = ["SELECT name FROM singer ORDER BY 1 > 0", "SELECT name FROM singer ORDER BY id"]
    scored = task.score_all([record(truth) for truth in truths], [Response(f"{truth}, id DESC") for truth in truths])
    assert [each.scores["execution"] for each in scored] == [False, True]
    assert [each.extracted["gold_order"] for each in scored] == ["not determined", None]
    lines = [{"scores": each.scores, "extracted": each.extracted} for each in scored]
    assert task.details(lines)["order not determined"] == 1
    assert "order not determined" not in task.details(lines[1:])


def test_the_query_stands_behind_the_thought(task):
    truth = "SELECT count(*) FROM singer"
    scored = task.score(record(truth), Response(f"<think>\nSELECT 1\n</think>\n\n{truth}"))
    assert scored.scores["execution"] and scored.scores["exact"]
    reference = with_published_rules(task).score(record(truth), Response(f"<think>no</think>{truth}"))
    assert not reference.scores["reference"] and reference.scores["execution"]


def test_a_true_query_without_end_is_no_fault_of_the_answer(databases):
    impatient = make_task(str(databases), time_limit=0.2, memory_limit=512, workers=1)
    scored = impatient.score(record(ENDLESS), Response("SELECT 1"))
    impatient.close()
    assert (scored.error, scored.extracted["gold_failure"]) == (TIMED_OUT, "time: interrupted")
    assert scored.extracted["failure"] is None


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t UNION SELECT b FROM u order  by 1", True),
        ("SELECT a FROM t WHERE b = 'order by' -- order by", False),
        ("SELECT a FROM t WHERE b = (SELECT b FROM u ORDER BY c LIMIT 1)", False),
        ("SELECT a /* ( */ FROM t ORDER BY a", True),
    ],
)
def test_whether_the_rows_are_ordered(sql, ordered):
    assert orders_rows(sql) is ordered


def test_the_published_rules_find_what_a_shell_would_print(task):
    reference = with_published_rules(task)
    pairs = {(NAMES, NAMES): True, (NAMES, BY_AGE): False, (NONE, "no query"): True, (NONE, NAMES): False}
    pairs |= {("SELECT nme FROM singer", NAMES): False, ("SELECT nme FROM singer", "no query"): True}
    scored = reference.score_all([record(truth) for truth, _ in pairs], [Response(answer) for _, answer in pairs])
    reference.close()
    assert [each.scores["reference"] for each in scored] == list(pairs.values())


def test_a_worker_that_dies_costs_one_answer(databases):
    # More than the process may take, in one value that SQLite allows.
    tight = make_task(str(databases), time_limit=2, memory_limit=64, workers=1)
    large = " UNION ALL ".join(["SELECT hex(zeroblob(8000000))"] * 3)
    scored = tight.score_all([record(COUNT)] * 3, [Response(text) for text in (COUNT, large, COUNT)])
    tight.close()
    assert [each.error for each in scored] == [None, TIMED_OUT, None]
    assert scored[1].extracted["gold_failure"] is None
    assert scored[1].extracted["truth_output"] != scored[1].extracted["answer_output"]


def test_the_folder_of_spider_stands_for_that_of_its_databases(databases, tmp_path):
    (tmp_path / "database").symlink_to(databases)
    (tmp_path / "tables.json").write_text("[]")
    made = make_task(str(tmp_path), time_limit=2, workers=1)
    assert made.score(record(COUNT), Response(COUNT)).scores["execution"]
    made.close()


def test_without_databases_there_is_no_task(tmp_path):
    with pytest.raises(UserError, match=r"pass `spider_path DIR`.*`task generic`"):
        choose_task("auto", [record(COUNT)])


def test_without_databases_another_task_says_what_it_compares(databases, capsys):
    assert choose_task("generic", [record(COUNT)]).name == "generic"
    expected = "note: the records are of task 'spider', which judges by 'execution'; 'generic' compares only texts\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(UserError, match="`spider_path` does nothing with task 'generic'"):
        choose_task("generic", [record(COUNT)], TaskOptions(spider_path=str(databases)))
    # Of another task, which lacks nothing, it is not said.
    choose_task("generic", [task_records.record("2", "What is 1+1?")])
    assert capsys.readouterr().err == ""


def test_a_database_that_is_missing_is_named_or_its_records_are_left_out(databases, task):
    with pytest.raises(UserError, match=r"^test\.jsonl:7: the database 'flights' is not at .*flights\.sqlite; pass"):
        task.truth(record(COUNT, "flights", line=7))
    lenient = make_task(str(databases), missing_databases="skip")
    assert [lenient.left_out(record(COUNT, name)) for name in ("singers", "flights")] == [None, "no database"]
    assert task.left_out(record(COUNT, "flights")) is None


@pytest.mark.parametrize("name", ["", "..", "../databases"])
def test_names_that_lead_out_of_the_folder_are_refused(task, name):
    with pytest.raises(UserError, match=r"^test\.jsonl:1: .*is no name of a database"):
        task.truth(record(COUNT, name))


@pytest.mark.slow
def test_every_true_query_of_the_real_files_is_right_and_no_file_is_touched(shared_data):
    folder = shared_data / "spider" / "database"
    task = make_task(str(folder), missing_databases="skip", memory_limit=1024)
    records = [
        record
        for name in ("spider_test", "spider_train")
        for record in read_records(shared_data / "llm_jepa" / f"{name}.jsonl")
        if task.left_out(record) is None
    ]
    assert len(records) == 342 + 1614
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    scored = task.score_all(records, [Response(example.answer) for example in records])
    task.close()
    assert all(all(each.scores.values()) and each.error is None for each in scored)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_answers_have_the_names_of_their_results(task):
    same = [COUNT, "SELECT 5", "SELECT 5.0", "SELECT 4.35 * 100 / 87", "SELECT count(id) FROM singer"]
    names = task.answer_names([record(sql) for sql in same])
    assert len(set(names)) == 1
    others = [NAMES, BY_AGE, "SELECT name FROM singer ORDER BY age DESC", NONE, PAIRS, "SELECT missing FROM singer"]
    different = task.answer_names([record(sql) for sql in others])
    assert different[-1] is None
    assert len({*names, *different}) == 1 + len(others)
    # Without an ORDER BY the order of rows says nothing.
    unions = ["SELECT 1 UNION ALL SELECT 2", "SELECT 2 UNION ALL SELECT 1"]
    assert len(set(task.answer_names([record(sql) for sql in unions]))) == 1
    assert len(set(task.answer_names([record(f"{sql} ORDER BY 1") for sql in unions]))) == 1
    assert len(set(task.answer_names([record(f"{unions[0]} ORDER BY 1{end}") for end in ("", " DESC")]))) == 2


def test_a_thought_in_front_of_the_true_query_is_not_run(task):
    """It made a query that fails, so that every answer was wrong."""
    reasoned = record(f"<think>\nAll of them.\n</think>\n\n{NAMES}")
    (scored,) = task.score_all([reasoned], [Response(NAMES)])
    assert scored.error is None and scored.extracted["gold_failure"] is None
    assert task.answer_names([reasoned]) == task.answer_names([record(NAMES)]) != [None]
