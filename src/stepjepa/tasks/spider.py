"""Spider: questions about databases, answered in SQL and judged by what the queries find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.tasks.answers import text_scores
from stepjepa.tasks.base import (
    FAILED,
    NO_ANSWER,
    TIMED_OUT,
    WRONG,
    Response,
    Scored,
    Task,
    TaskOptions,
    record_error,
    task,
)
from stepjepa.tasks.raw_values import chat_record, read_text_field
from stepjepa.tasks.sql_execution import Verdict, judge

_DATABASE = re.compile(r"For db_id:\[([^\[\]\n]*)\]")


class _Query(NamedTuple):
    """The arguments of ``sql_execution.judge`` that differ; ``sql`` is None for the true query alone."""

    database: str
    gold: str
    sql: str | None
    ordered: bool


@task("spider")
class SpiderTask(Task):
    """The truth is a query; an answer is right if it finds the same in the record's database.

    Scores: ``execution``, the whole answer, run on the database, finds the rows that the true query finds, as often
    and, where the true query orders them, in its order; the order of the columns does not count, as in the test-suite
    evaluation of Spider (``sql_execution.compare``). ``same_columns``: also with the columns in the same order.
    ``first_statement``: the answer or the first statement in it does so, see :func:`first_statement`. ``exact_text``:
    the text is the same (:func:`normal_form`) and, where the true query works, finds the same.
    ``exact``, ``prefix``, ``contains`` of the text as it stands.

    A query that fails is wrong, whatever the true one finds. Where the true query itself fails every answer is wrong;
    ``details`` says how many such records there are and what the figure is without them.
    """

    headline = "execution"
    lenient = "first_statement"
    takes = ("spider_path", "missing_databases", "time_limit", "memory_limit", "workers")
    system_prompt = "Convert natural language to SQL."

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        if options.spider_path is None:
            raise UserError(
                "task 'spider' runs queries on the databases of Spider; pass --spider_path DIR, the folder that holds "
                "<name>/<name>.sqlite, or --task generic to compare the text alone"
            )
        if not Path(options.spider_path).is_dir():
            told = "--spider_path: no such folder; pass the one that holds the databases, <name>/<name>.sqlite"
            raise UserError(told, path=options.spider_path)
        return super().from_options(options)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """The question begins with ``For db_id:[name]``."""
        return _DATABASE.match(record.messages[-2]["content"]) is not None

    def truth(self, record: Record) -> str:
        database = self._database(record)
        if not database.is_file():
            raise record_error(
                record,
                f"the database '{database.parent.name}' is not at {database}; pass the --spider_path that has it, "
                "--missing_databases skip, or --task generic to compare the text alone",
            )
        return record.answer

    def left_out(self, record: Record) -> str | None:
        skip = self.options.missing_databases == "skip"
        return "no database" if skip and not self._database(record).is_file() else None

    def _database(self, record: Record) -> Path:
        match = _DATABASE.match(record.messages[-2]["content"])
        name = match[1] if match else ""
        if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            raise record_error(
                record,
                f"'{name}' is no name of a database; expected a question that begins with 'For db_id:[name]', the name "
                "of a folder in --spider_path; or pass --task generic to compare the text alone",
            )
        return Path(str(self.options.spider_path)) / name / f"{name}.sqlite"

    def score(self, record: Record, response: Response) -> Scored:
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Run answers in parallel, in processes of their own."""
        pairs = []
        for record, response in zip(records, responses, strict=True):
            gold = self.truth(record)
            query = _Query(str(self._database(record)), gold, None, orders_rows(gold))
            answers = whole_answer(response.text), first_statement(response.text)
            pairs.append([query._replace(sql=sql or None) for sql in answers])
        verdicts = self._judge([query for pair in pairs for query in pair])
        return [
            self._scored(whole, response.text, verdicts[whole], verdicts[first])
            for (whole, first), response in zip(pairs, responses, strict=True)
        ]

    @staticmethod
    def _scored(query: _Query, text: str, whole: Verdict, first: Verdict) -> Scored:
        same_text = normal_form(query.sql or "") == normal_form(query.gold)
        scores: dict[str, bool | float] = {
            "execution": whole.right,
            "same_columns": whole.same_columns,
            "first_statement": whole.right or first.right,
            "exact_text": (whole.right or whole.gold_failure is not None) and same_text,
            **text_scores(text, query.gold),
        }
        extracted = {
            "sql": query.sql,
            "failure": whole.failure,
            "gold_failure": whole.gold_failure,
            "truth_output": whole.gold_output or None,
            "answer_output": whole.output or None,
        }
        reason = whole.failure or whole.gold_failure
        failed = WRONG if reason is None else TIMED_OUT if _kind(reason) in ("time", "memory") else FAILED
        return Scored(scores, extracted, None if whole.right else failed if query.sql else NO_ANSWER)

    def _judge(self, queries: Sequence[_Query]) -> dict[_Query, Verdict]:
        """The verdict on each query; those that are the same are run once."""
        wanted = list(dict.fromkeys(queries))
        seconds = self.options.time_limit
        # Half of the memory is for SQLite, half for the rows that are compared.
        memory = max(1, self.options.memory_limit // 2)
        # Two queries with their own time each; a process is ended only where one of them does not keep it.
        outcomes = self.run_within_limits(judge, [(*query, seconds, memory) for query in wanted], 2 * seconds + 5)
        verdicts = {}
        for query, outcome in zip(wanted, outcomes, strict=True):
            if outcome.failure is None:
                verdicts[query] = outcome.value
                continue
            failure = f"{outcome.failure}: {outcome.message}"
            verdicts[query] = Verdict(gold_failure=failure)
            if query.sql is not None:
                # Which of the two ended the process? The answer, where the true query works alone.
                alone = query._replace(sql=None)
                gold = self._judge([alone])[alone]
                verdicts[query] = gold if gold.gold_failure else gold._replace(failure=failure)
        return verdicts

    def vote(self, scored: Scored, response: Response) -> str | None:
        """The query in its normal form; one that fails does not vote, for that needs no knowledge of the truth."""
        sql = scored.extracted["sql"]
        return None if sql is None or scored.extracted["failure"] is not None else normal_form(sql)

    def details(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """How hard the questions were, and what failed.

        ``by_hardness`` has for each level of :func:`hardness` (``unknown`` for a truth that is no query) the number of
        records, ``n``, and the share that is right. ``failures`` of answers and ``gold_failures`` of true
        queries are counted by reason; ``execution_without_gold_failures`` is the share among the others.
        """
        right = [line["scores"]["execution"] for line in lines]
        levels = [hardness(line["truth"]) or "unknown" for line in lines]
        counts, reached = Counter(levels), dict.fromkeys(levels, 0.0)
        for level, value in zip(levels, right, strict=True):
            reached[level] += value
        failures = Counter(_kind(line["extracted"]["failure"]) for line in lines if line["extracted"]["failure"])
        golds = [line["extracted"]["gold_failure"] for line in lines]
        details = {
            "by_hardness": {
                name: {"n": counts[name], "execution": reached[name] / counts[name]}
                for name in (*LEVELS, "unknown")
                if counts[name]
            },
            "failures": dict(failures.most_common()),
            "gold_failures": dict(Counter(filter(None, golds)).most_common()),
        }
        fine = [value for value, gold in zip(right, golds, strict=True) if gold is None]
        if 0 < len(fine) < len(lines):
            details["execution_without_gold_failures"] = sum(fine) / len(fine)
        return details

    @classmethod
    def convert(cls, row: Mapping[str, Any]) -> dict[str, Any]:
        """A training record in the published form, from a row with ``db_id``, ``question`` and ``query``."""
        name, question, query = (read_text_field(row, field).strip() for field in ("db_id", "question", "query"))
        return chat_record(cls.system_prompt, f"For db_id:[{name}]\n\n{question}", query)


def _kind(reason: str) -> str:
    return reason.partition(":")[0]


_BEGINNING = re.compile(r"(?:select|with|values)\b", re.IGNORECASE)
_LANGUAGE = re.compile(r"[ \t]*(?:(?:sqlite3?|sql)\b)?", re.IGNORECASE)
# Quotes and comments are passed over, for what looks like an end inside them is none.
_END = re.compile(
    r"""'[^']*'|"[^"]*"|--[^\n]*"""
    r"""|(?P<end>;|```|\n[ \t\r]*\n|\n(?:system|user|assistant)[ \t]*:?[ \t\r]*(?:\n|\Z)|\nFor[ ]db_id:)"""
)


def whole_answer(text: str) -> str:
    """The query that an answer is: all of it, without white space and the fence of a block of code around it."""
    text = text.strip()
    code = re.fullmatch(r"```([^`]+)```|`([^`]+)`", text)
    if code is None:
        return text
    return _LANGUAGE.sub("", code[1], count=1).strip() if code[1] else code[2].strip()


def first_statement(text: str) -> str:
    """The query that comes first, without what follows, which a model that does not stop says behind it.

    A text that does not begin as a query is taken from its first block of code on. The query ends at the first
    semicolon, blank line, line with nothing but the name of a role of the chat, next question, or with the block.
    """
    text = text.strip()
    if not _BEGINNING.match(text) and "```" in text:
        text = _LANGUAGE.sub("", text.partition("```")[2], count=1).strip()
    ends = (match.start() for match in _END.finditer(text) if match["end"])
    return text[: next(ends, len(text))].strip()


LEVELS = ("easy", "medium", "hard", "extra")
"""How hard queries are, see :func:`hardness`."""

_WORD = re.compile(r"--[^\n]*|'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|[^\W\d]\w*|\d[\w.]*|<>|[!<>=|]=|\|\||\S")
_CLAUSES = {"select", "from", "on", "where", "group", "having", "order", "limit"}
_AGGREGATES = {"count", "sum", "avg", "min", "max", "total", "group_concat"}
# Words without which a query means the same.
_NEEDLESS = {"as", "asc", "inner", "outer"}


def _words(sql: str) -> list[str]:
    """Words and signs in lower case; values in single quotes stay as they are."""
    words = []
    for word in _WORD.findall(sql):
        if word[0] in "'\"`":
            words.append(f"'{word[1:-1]}'")
        elif not word.startswith("--"):
            words.append(word.lower())
    return words[:-1] if words[-1:] == [";"] else words


def normal_form(sql: str) -> str:
    """One text for queries that differ only in writing.

    Ignored are white space, comments and a semicolon at the end; the case of keywords and names; the kind of quotes;
    ``INNER``, ``OUTER``, ``ASC``, ``AS``, ``<>`` for ``!=``. Values are kept as they are.
    """
    return " ".join("!=" if word == "<>" else word for word in _words(sql) if word not in _NEEDLESS)


def orders_rows(sql: str) -> bool:
    """Whether the rows of a query have an order: an ``ORDER BY`` of its own, not of a part in brackets."""
    depth = 0
    for word in _words(sql):
        depth += (word == "(") - (word == ")")
        if word == "order" and depth == 0:
            return True
    return False


def hardness(sql: str) -> str | None:
    """How hard a query is by the criteria of the Spider benchmark, one of :data:`LEVELS`; None for what is no query.

    Of the outermost query (the first of several that are combined) three things are counted. Components: WHERE, GROUP
    BY, ORDER BY, LIMIT, each JOIN, each OR, each LIKE. Nestings: each query inside a condition, and UNION, INTERSECT
    or EXCEPT. Others: more than one aggregation, selected column, condition in WHERE, column in GROUP BY. As in the
    published script, a negated condition (``NOT IN``, ``NOT LIKE``) and each AND or OR of HAVING count as an
    aggregation, while the aggregations inside HAVING don't.
    """
    if _words(sql)[:1] not in (["select"], ["with"]):
        return None
    found = Counter(_outermost(sql))

    def count(word: str, *clauses: str) -> int:
        return sum(found[clause, word] for clause in clauses)

    conditions = ("on", "where", "having")
    nestings = count("nested", *conditions) + count("combined", "")
    components = sum(count(name, name) > 0 for name in ("where", "group", "order", "limit"))
    components += count("join", "from", "on") + count("or", *conditions) + count("like", *conditions)
    aggregations = count("aggregate", "select", "order") + count("not", "where", "having")
    aggregations += count("and", "having") + count("or", "having")
    more = count(",", "select"), count("and", "where") + count("or", "where"), count(",", "group")
    others = (aggregations > 1) + sum(number > 0 for number in more)
    # The published table, in which two components with two others are extra, with three only hard.
    if nestings:
        return "hard" if nestings == 1 and components <= 1 and others == 0 else "extra"
    if components <= 1 and others == 0:
        return "easy"
    if (components <= 1 and others <= 2) or (components <= 2 and others <= 1):
        return "medium"
    return "hard" if (components <= 2 and others > 2) or (components == 3 and others <= 2) else "extra"


def _outermost(sql: str) -> Iterator[tuple[str, str]]:
    """The words of the outermost query, each behind the clause that it stands in.

    Besides: ``nested`` for a query in its clause, ``combined`` for UNION and the like, where it ends, ``aggregate`` for
    the function, ``join`` also for a comma between tables. The AND of a BETWEEN is left out.
    """
    words, clause, between = _words(sql), "", False
    brackets: list[bool] = []  # whether each that is open holds a query
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == ")" and brackets:
            brackets.pop()
        elif word == "(":
            if after == "select" and not any(brackets):
                yield clause, "nested"
            brackets.append(after == "select")
        elif any(brackets) or (word == "," and brackets):
            continue
        elif word in ("union", "intersect", "except"):
            yield "", "combined"
            return
        elif word in ("between", "and") and between == (word == "and"):
            between = not between
        else:
            clause = word if word in _CLAUSES else "from" if word == "join" else clause
            if word in _AGGREGATES:
                word = "aggregate" if after == "(" else "column"  # noqa: PLW2901
            yield clause, "join" if word == "," and clause == "from" else word
