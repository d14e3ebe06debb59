"""Spider: questions about databases, answered in SQL and judged by the results of the queries."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.answers import strip_code_fence, text_scores
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
    right_answer,
)
from stepjepa.tasks.raw_values import chat_record, read_text_field
from stepjepa.tasks.sql_execution import Check, Verdict, judge, result_name
from stepjepa.tasks.sql_order import QUOTES_AND_COMMENTS, orders_rows
from stepjepa.tasks.workers import Workers

_DATABASE = re.compile(r"For db_id:\[([^\[\]\n]*)\]")


class SpiderTask(Task):
    """The truth is a query; an answer is right if it has the same result in the record's database.

    ``execution`` and ``same_columns`` are of the whole answer (``sql_execution.compare``), ``first_statement`` also of
    :func:`first_statement`. A query that fails is wrong, whatever the true one returns. If the true query itself
    fails, every answer is wrong; ``details`` counts such records.
    """

    name = "spider"
    headline = "execution"
    secondary_score = "first_statement"
    used_options = ("spider_path", "missing_databases", "time_limit", "memory_limit", "workers")
    system_prompt = "Convert natural language to SQL."

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        folder = options.spider_path
        if folder is None or not Path(folder).is_dir():
            fault = "task 'spider' runs queries; pass `spider_path DIR`, the folder that holds <name>/<name>.sqlite"
            raise UserError(f"{fault}, or `task generic` to compare the text alone", path=folder)
        # Spider's own folder holds the databases' one.
        inner = Path(folder) / "database"
        if inner.is_dir() and not (inner / "database.sqlite").is_file():
            options = replace(options, spider_path=str(inner))
        return super().from_options(options)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """Return whether the question begins with ``For db_id:[name]``."""
        return _DATABASE.match(record.messages[-2]["content"]) is not None

    def truth(self, record: Record) -> str:
        database = self._database(record)
        if not database.is_file():
            fault = f"the database '{database.parent.name}' is not at {database}; pass the `spider_path` that has it"
            raise record_error(record, f"{fault}, `missing_databases skip`, or `task generic` for the text")
        return right_answer(record)

    def left_out(self, record: Record) -> str | None:
        skip = self.options.missing_databases == "skip"
        return "no database" if skip and not self._database(record).is_file() else None

    def _database(self, record: Record) -> Path:
        """Return the file of the database that a record names."""
        match = _DATABASE.match(record.messages[-2]["content"])
        name = match[1] if match else ""
        if name in ("", ".", "..") or re.search(r"[/\\\0]", name):
            remedy = "begin the question with 'For db_id:[NAME]', or pass `task generic` to compare the text alone"
            raise record_error(record, f"'{name}' is no name of a database; {remedy}")
        return Path(str(self.options.spider_path)) / name / f"{name}.sqlite"

    def score(self, record: Record, response: Response) -> Scored:
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Run answers in parallel, in separate processes; equal ones are run once."""
        # Of each answer the whole text, and its first statement.
        pairs = [
            (
                self._check(record, strip_code_fence(response.content)),
                self._check(record, first_statement(response.content)),
            )
            for record, response in zip(records, responses, strict=True)
        ]
        distinct = list(dict.fromkeys(check for pair in pairs for check in pair))
        # Each of the two queries has its own time limit; a process is ended only if one exceeds it.
        seconds = 2 * self.options.time_limit + 5
        outcomes = self.run_within_limits(judge, [(check,) for check in distinct], seconds)
        verdicts = {}
        for check, outcome in zip(distinct, outcomes, strict=True):
            # If both queries were run, most likely the answer ended the process; its output must equal no other.
            failure = f"{outcome.failure}: {outcome.message}"
            ended = Verdict(gold_failure=failure) if check.sql is None else Verdict(failure=failure, output=failure)
            verdicts[check] = ended if outcome.failure else outcome.value
        return [
            self._scored(response.content, whole, verdicts[whole], verdicts[first])
            for response, (whole, first) in zip(responses, pairs, strict=True)
        ]

    @property
    def _sqlite_memory(self) -> int:
        """Memory limit of SQLite, in MiB: half of that of a process; the rest is for the rows that are compared."""
        return max(1, self.options.memory_limit // 2)

    def _check(self, record: Record, sql: str) -> Check:
        """Return the comparison of a query with that of a record; an empty one is not run."""
        gold, seconds = self.truth(record), self.options.time_limit
        return Check(str(self._database(record)), gold, sql or None, orders_rows(gold), seconds, self._sqlite_memory)

    def answer_names(self, records: Sequence[Record]) -> list[str | None]:
        """Return the result of each true query in its database; None for a query that fails."""
        limits, calls = self.options, []
        for record in records:
            gold = self.truth(record)
            calls.append((str(self._database(record)), gold, orders_rows(gold), limits.time_limit, self._sqlite_memory))
        # The task's own processes run another function.
        seconds = limits.time_limit + 5
        workers = Workers(result_name, seconds=seconds, memory=limits.memory_limit, processes=limits.workers)
        try:
            return [outcome.value for outcome in workers.map(calls)]
        finally:
            workers.close()

    @staticmethod
    def _scored(text: str, check: Check, full: Verdict, first: Verdict) -> Scored:
        """Make the scores of an answer from the verdicts on the whole text and on its first statement."""
        scores: dict[str, bool | float] = {
            "execution": full.right,
            "same_columns": full.same_columns,
            "first_statement": full.right or first.right,
            **text_scores(text, check.gold),
        }
        extracted = {
            "sql": check.sql,
            "failure": full.failure,
            "gold_failure": full.gold_failure,
            "gold_order": "not determined" if full.ties else None,
            "truth_output": full.gold_output or None,
            "answer_output": full.output or None,
        }
        reason = full.failure or full.gold_failure
        failed = WRONG if reason is None else TIMED_OUT if reason.startswith(("time:", "memory:")) else FAILED
        return Scored(scores, extracted, None if full.right else failed if check.sql else NO_ANSWER)

    def vote(self, scored: Scored, response: Response) -> str | None:
        """Return the query with single spaces; a failed query has no vote (its failure is known without the truth)."""
        sql = scored.extracted["sql"]
        return None if sql is None or scored.extracted["failure"] is not None else " ".join(sql.split())

    def details(self, lines: Sequence[JsonObject]) -> JsonObject:
        """Return ``failures`` of answers and ``gold_failures`` of true queries, counted by reason.

        ``execution_without_gold_failures`` is the share of right answers among records whose true query works. ``order
        not determined`` counts true queries whose result depends on the order of rows that tie in their ``ORDER BY``:
        an answer that orders these differently has another result, and is wrong.
        """
        answers, golds = ([line["extracted"][name] for line in lines] for name in ("failure", "gold_failure"))
        failures = Counter(failure.partition(":")[0] for failure in answers if failure)
        details: JsonObject = {"failures": dict(failures.most_common())}
        details["gold_failures"] = dict(Counter(filter(None, golds)).most_common())
        ties = sum(line["extracted"].get("gold_order") is not None for line in lines)
        details |= {"order not determined": ties} if ties else {}
        working = [line["scores"]["execution"] for line, gold in zip(lines, golds, strict=True) if gold is None]
        if 0 < len(working) < len(lines):
            details["execution_without_gold_failures"] = sum(working) / len(working)
        return details

    @classmethod
    def convert(cls, row: Mapping[str, object]) -> JsonObject:
        """Convert a row with ``db_id``, ``question`` and ``query`` to a training record in the published form."""
        name, question, query = (read_text_field(row, field).strip() for field in ("db_id", "question", "query"))
        return chat_record(cls.system_prompt, f"For db_id:[{name}]\n\n{question}", query)


_BEGINNING = re.compile(r"(?:select|with|values)\b", re.IGNORECASE)
_LANGUAGE = re.compile(r"[ \t]*(?:(?:sqlite3?|sql)\b)?", re.IGNORECASE)
_END = re.compile(
    QUOTES_AND_COMMENTS
    + r"|(?P<end>;|```|\n[ \t\r]*\n|\n(?:system|user|assistant)[ \t]*:?[ \t\r]*(?:\n|\Z)|\nFor[ ]db_id:)"
)


def first_statement(text: str) -> str:
    """Return the first query of a text, without the text that a model adds if it does not stop.

    A text that does not begin with a query is read from its first code block. The query ends at the first
    semicolon, blank line, name of a role of the chat, next question, or with the block.
    """
    text = text.strip()
    if not _BEGINNING.match(text) and "```" in text:
        text = _LANGUAGE.sub("", text.partition("```")[2], count=1).strip()
    ends = (match.start() for match in _END.finditer(text) if match["end"])
    return text[: next(ends, len(text))].strip()
