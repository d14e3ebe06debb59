"""Convert rows of raw data sets into training records, counting the rows that are dropped, by reason."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.config.option import option
from stepjepa.data.bad_records import BadRecords
from stepjepa.data.columns import CHATS, read_chat
from stepjepa.data.messages import check_text_only, is_absent, read_tools, read_variables, tools_column
from stepjepa.data.records import fields_beside, parse_record
from stepjepa.data.steps import find_steps
from stepjepa.preparing.step_splitting import blank_lines, drop_thinking, split_response, tidy_step
from stepjepa.tasks.answers import marked_answers, parse_number, same_answer
from stepjepa.tasks.generic import Gsm8kTask
from stepjepa.tasks.hellaswag import HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.raw_values import (
    Unusable,
    chat_record,
    convert_paraphrases,
    read_steps_field,
    read_text_field,
)
from stepjepa.tasks.sentiment import SentimentTask
from stepjepa.tasks.spider import SpiderTask

Row = Mapping[str, object]
Rows = Iterable[tuple[int, Row]]  # with line numbers
# Converts a row to a record, or to a list of records that form a group; raises Unusable to drop the row.
Convert = Callable[..., JsonObject | list[JsonObject]]

SYSTEM_PROMPT = (
    "Please solve the problem step by step (separate steps with double newlines), "
    "and put your final answer within \\boxed{}."
)


MOST_LINES = 3
"""Lines of dropped rows that are named."""


@dataclass
class Counts:
    """Counts of rows and records."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows that gave no record, by reason
    dropped_lines: dict[str, list[int]] = field(default_factory=dict)  # the first of those rows
    changed: Counter[str] = field(default_factory=Counter)  # rows whose text was changed, by what was done to it
    columns: tuple[str, ...] = ()  # of the first row, for error messages
    # Column that holds a value, or key of its messages -> whether a conversion read it.
    was_read: dict[str, bool] = field(default_factory=dict)

    @property
    def unused(self) -> list[str]:
        """The columns, and keys of messages, that no conversion read."""
        return [name for name, was_read in self.was_read.items() if not was_read]


class _TrackedRow(JsonObject):
    """A row that records which of its columns were read."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.columns_read: set[str] = set()
        self.unread_keys: list[str] = []  # keys of its messages that are not read
        self.changes: list[str] = []  # what was done to its text

    def __getitem__(self, name: str) -> object:
        self.columns_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> object:
        """Return the value of a column, or the default."""
        self.columns_read.add(name)
        return super().get(name, default)


def convert_rows(
    rows: Rows, convert: Convert, *, limit: int | None = None, path: object = "<memory>", bad: BadRecords | None = None
) -> tuple[list[JsonObject], Counts]:
    """Convert rows to records, dropping those that are unusable; several records of one row get the field ``group``.

    Args:
        rows: line numbers and rows.
        convert: makes a record, or a list of records, of a row.
        limit: maximum number of records; None for all.
        path: the file of the rows, for errors.
        bad: counts invalid rows, or raises the error of the first; None raises it.

    Returns:
        The records, and counts of the rows.
    """
    counts, records_made = Counts(), list[JsonObject]()
    for line, row in rows:
        if limit is not None and len(records_made) >= limit:
            break
        if not counts.read:
            counts.columns = tuple(map(str, row))
        counts.read += 1
        tracked = _TrackedRow(row)
        try:
            result = convert(tracked)
            records = [record | {"group": line} for record in result] if isinstance(result, list) else [result]
            for record in records:
                parse_record(record, str(path), line)
        except Unusable as reason:
            counts.dropped[str(reason)] += 1
            counts.dropped_lines.setdefault(str(reason), []).append(line)
            del counts.dropped_lines[str(reason)][MOST_LINES:]
        except UserError as error:
            located = error if error.line is not None else error.at(path, line)
            (bad or BadRecords()).handle(located, line)
        else:
            records_made += records
            for name, value in row.items():
                if not is_absent(value):
                    counts.was_read[name] = counts.was_read.get(name, False) or name in tracked.columns_read
            counts.was_read |= dict.fromkeys(tracked.unread_keys, False)
            counts.changed.update(tracked.changes)
    return records_made[:limit], counts


def convert_chat(row: Row, **about: str | None) -> JsonObject:
    """Convert a row that holds a chat, in any form of :func:`stepjepa.data.columns.read_chat`, to a record."""
    plain = dict(row)
    check_text_only(plain)
    chat = read_chat(plain, **about)
    tools = tools_column(plain)
    more: JsonObject = {"tools": read_tools(plain.get(tools))}
    more["chat_template_kwargs"] = read_variables(plain.get("chat_template_kwargs"))
    more |= fields_beside(plain, chat.used)
    for name in {*chat.used, tools, *more}:
        row.get(name)  # marks the column as read; others were only inspected
    if isinstance(row, _TrackedRow):
        row.unread_keys = chat.unused
    return {"messages": chat.messages} | {name: value for name, value in more.items() if value is not None}


class Conversion(NamedTuple):
    """A published data set that ``stepjepa prepare`` can turn into training records."""

    summary: str  # one line of help
    rows: str  # the fields of its rows, and the name of such a data set on the hub
    convert: Convert


CONVERSIONS = {
    "gsm8k": Conversion("word problems", "question and answer (openai/gsm8k)", Gsm8kTask.convert),
    "spider": Conversion("questions and SQL", "db_id, question and query (xlangai/spider)", SpiderTask.convert),
    "nq-open": Conversion("questions", "question and answer (google-research-datasets/nq_open)", NqOpenTask.convert),
    "hellaswag": Conversion("stories", "ctx, endings and label (Rowan/hellaswag)", HellaswagTask.convert),
    "rotten-tomatoes": Conversion(
        "film reviews", "text and label, 0 or 1 (cornell-movie-review-data/rotten_tomatoes)", SentimentTask.convert
    ),
    "yelp": Conversion(
        "reviews", "text and label, 0 to 4 (Yelp/yelp_review_full)", partial(SentimentTask.convert, stars=True)
    ),
    "yelp-polarity": Conversion("reviews", "text and label, 0 or 1 (fancyzhx/yelp_polarity)", SentimentTask.convert),
    "paraphrase": Conversion("sentences of one sense", "sentences (humarin/chatgpt-paraphrases)", convert_paraphrases),
}


_KEPT = ("id", "group")
"""Further fields of a response that its record keeps: embeddings and analyses read them."""


@dataclass(frozen=True)
class StepOptions:
    """Options of :func:`convert_response`."""

    question_field: str = option("question", "field of the question", metavar="NAME")
    response_field: str = option("deepseek_response", "field of the response, or of a list of steps", metavar="NAME")
    system_prompt: str = option(SYSTEM_PROMPT, "system prompt of each record", metavar="TEXT")
    require_correct: bool = option(
        False, "leave out responses whose last \\boxed{} or #### is not `ground_truth`, or without it `answer`"
    )
    splitter: Callable[[str], list[str]] = split_response  # or the user's own


_TOO_FEW, _WRONG = "fewer than two steps", "wrong or no final answer"
_OPEN_BLOCK = "a code fence or formula begins in one step and ends in another"
OF_RESPONSES = (_TOO_FEW, _WRONG, _OPEN_BLOCK)
"""Beginnings of reasons for which a row is dropped whose fields were read: other fields are no remedy."""


def convert_response(row: Row, options: StepOptions) -> JsonObject:
    """Convert a response of a model, without text in ``<think>``, to a record with a blank line between steps.

    A response may be a list of texts, which are its steps as they are. The record has ``question``, ``total_steps``,
    ``messages`` and, if known, ``id``, ``group``, ``answer`` and ``ground_truth`` (by default the marked answer in
    ``answer``, or ``answer`` if it is a number).

    Args:
        row: column name -> value.
        options: names of the columns, and how a response is split.

    Raises:
        Unusable: the response has fewer than two steps, or is wrong and ``require_correct`` is set; or code that is
            not closed in its step would join steps.
        UserError: the user's splitter failed, or the row holds a chat.
    """
    if (chat := next((name for name in CHATS if name in row and options.question_field not in row), None)) is not None:
        remedy = "stepjepa train --step_jepa --step_separator finds steps in it as it is; or name other fields"
        raise UserError(f"'{chat}' is a chat, and no field '{options.question_field}' is beside it; {remedy}")
    question = read_text_field(row, options.question_field)
    steps = read_steps_field(row, options.response_field)
    response = "\n\n".join(steps) if steps else drop_thinking(read_text_field(row, options.response_field))
    if not response:
        raise Unusable(f"'{options.response_field}' holds only thinking")
    steps = steps or _split(response, options.splitter)
    tidied = [step for step in map(tidy_step, steps) if step]
    if len(tidied) < 2:
        had_thought = "</think>" in str(row[options.response_field])
        raise Unusable(_TOO_FEW + (" behind the thought" if had_thought else ""))
    content = "\n\n".join(tidied)
    if len(find_steps(content)) != len(tidied):
        raise Unusable(_OPEN_BLOCK)
    truth = _ground_truth(row)
    if options.require_correct:
        if truth is None:
            raise Unusable("no ground truth to compare with")
        # As in evaluation, only a marked answer counts, the last one.
        if not any(same_answer(answer, truth) for answer in marked_answers(response)[-1:]):
            raise Unusable(_WRONG)
    answer = row.get("answer")
    if isinstance(answer, float) and not math.isfinite(answer):  # NaN is a gap in a table
        answer = None
    answer = answer if isinstance(answer, str | int | float | None) else str(answer)
    if isinstance(row, _TrackedRow) and blank_lines(response) >= len(tidied):
        row.changes.append("blank lines inside a step, which would part it, or rules between steps were removed")
    record = {"question": question, "answer": answer, "ground_truth": truth, "total_steps": len(tidied)}
    record |= chat_record(options.system_prompt, question, content)
    record |= fields_beside({name: row[name] for name in _KEPT if name in row}, set())
    return {name: value for name, value in record.items() if value is not None}


def _split(response: str, splitter: Callable[[str], object]) -> list[str]:
    """Return the steps of a response; raise ``UserError`` if the splitter, which may be the user's, fails."""
    try:
        steps = splitter(response)
    except Exception as error:  # the user's function may raise anything
        raise UserError(f"custom: the splitter failed ({type(error).__name__}: {error}); correct it") from error
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"custom: the splitter gave {type(steps).__name__}, expected a list of strings")
    return steps


def _ground_truth(row: Row) -> str | None:
    """Return ``ground_truth``; else the marked answer in ``answer``, or ``answer`` itself if it is a number."""
    for name in ("ground_truth", "answer"):
        text = str(row.get(name, "")).strip()
        if text in ("", "None", "nan"):  # a gap in a table
            continue
        if marked := marked_answers(text):
            return marked[-1]
        if name == "ground_truth" or parse_number(text) is not None:
            return text
    return None
