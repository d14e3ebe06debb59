"""Rows of published data sets become training records; those that can't are counted by reason."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

from stepjepa.data.records import BadRecords, parse_record
from stepjepa.errors import UserError
from stepjepa.tasks.raw_values import Unusable

Rows = Iterable[tuple[int, Mapping[str, Any]]]
# A row in, a record out; raises Unusable, or UserError without a place.
Convert = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class Counts:
    """How many rows were read and dropped.

    Attributes:
        read: rows read, used or not.
        dropped: what was left out, by reason.
        changed: what was done to records that were kept.
        columns: the names in the first row, for error messages.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    columns: tuple[str, ...] = ()

    def watch(self, rows: Rows) -> Rows:
        """The same rows, counted as they pass."""
        for line, row in rows:
            if not self.read:
                self.columns = tuple(map(str, row))
            self.read += 1
            yield line, row


@contextmanager
def _located(path: object, line: int) -> Iterator[None]:
    """Give errors their file and line."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error), path=path, line=line) from error


def convert_rows(
    rows: Rows,
    convert: Convert,
    *,
    limit: int | None = None,
    path: object = "<memory>",
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], Counts]:
    """Make a record of every row that can be one.

    Args:
        rows: line numbers and rows.
        convert: makes a record of one.
        limit: stop when there are so many records.
        path: for error messages.
        bad: takes the rows that are wrong; None makes the first of them an error.

    Raises:
        UserError: a row is wrong, or ``convert`` gives something that is no record; both only without ``bad``.
    """
    counts = Counts()

    def converted() -> Iterator[dict[str, Any]]:
        for line, row in counts.watch(rows):
            try:
                with _located(path, line):
                    record = convert(row)
                parse_record(record, str(path), line)
            except Unusable as reason:
                counts.dropped[str(reason)] += 1
            except UserError as error:
                if bad is None:
                    raise
                bad.note(error, line)
            else:
                yield record

    # Lazily, so that nothing behind the last record is read.
    return list(islice(converted(), limit)), counts


@dataclass(frozen=True)
class Conversion:
    """A published data set that ``stepjepa prepare`` can turn into training records.

    Attributes:
        summary: one line of help.
        rows: the fields of its rows, for the help.
        function: its name below ``stepjepa.tasks``, loaded when needed; from a row to a record, or with ``whole`` from
            all rows to all records and what was dropped.
        datasets: where such rows are found on the hub, for the help.
        options: of the function.
        whole: rows do not become records one by one.
    """

    summary: str
    rows: str
    function: str
    datasets: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    def records(
        self,
        rows: Rows,
        *,
        limit: int | None = None,
        path: object = "<memory>",
        bad: BadRecords | None = None,
        **options: Any,
    ) -> tuple[list[dict[str, Any]], Counts]:
        """As :func:`convert_rows`; ``options`` go to the function."""
        module, _, name = self.function.partition(".")
        function = attrgetter(name)(importlib.import_module(f"stepjepa.tasks.{module}"))
        options = {**self.options, **options}
        if not self.whole:
            return convert_rows(rows, partial(function, **options), limit=limit, path=path, bad=bad)

        def wrong(line: int, error: UserError) -> None:
            located = UserError(str(error), path=path, line=line)
            if bad is None:
                raise located
            bad.note(located, line)

        counts = Counts()
        records, counts.dropped = function(counts.watch(rows), wrong)
        for number, record in enumerate(records, start=1):
            parse_record(record, "<record>", number)
        return records[:limit], counts


CONVERSIONS = {
    "gsm8k": Conversion(
        "word problems with solutions, main or socratic, as they are or each line a step",
        "question and answer",
        "gsm8k.Gsm8kTask.convert",
        ("openai/gsm8k --subset main", "openai/gsm8k --subset socratic"),
    ),
    "spider": Conversion(
        "questions about databases and SQL",
        "db_id, question and query",
        "spider.SpiderTask.convert",
        ("xlangai/spider",),
    ),
    "nq-open": Conversion(
        "questions and short answers",
        "question and answer, a list",
        "nq_open.NqOpenTask.convert",
        ("google-research-datasets/nq_open",),
    ),
    "hellaswag": Conversion(
        "four endings of a story, one of them right",
        "ctx, endings and label",
        "hellaswag.HellaswagTask.convert",
        ("Rowan/hellaswag",),
    ),
    "rotten-tomatoes": Conversion(
        "film reviews, Good or Bad",
        "text and label, 0 or 1",
        "sentiment.SentimentTask.convert",
        ("cornell-movie-review-data/rotten_tomatoes",),
    ),
    "yelp": Conversion(
        "reviews with one star to five, Very Bad to Very Good",
        "text and label, 0 to 4",
        "sentiment.SentimentTask.convert",
        ("Yelp/yelp_review_full",),
        {"stars": True},
    ),
    "yelp-polarity": Conversion(
        "reviews, Good or Bad",
        "text and label, 0 or 1",
        "sentiment.SentimentTask.convert",
        ("fancyzhx/yelp_polarity",),
    ),
    "paraphrase": Conversion(
        "pairs or groups of sentences that say the same, each to predict the next",
        "two sentences, a list of them, or a sentence and its group",
        "paraphrase.records_of",
        ("google-research-datasets/paws --subset labeled_final", "humarin/chatgpt-paraphrases"),
        whole=True,
    ),
}
