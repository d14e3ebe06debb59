"""Rows of published data sets become training records; those that can't are counted by reason."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from stepjepa.data.records import BadRecords, parse_record
from stepjepa.errors import UserError
from stepjepa.tasks.base import Unusable

Rows = Iterable[tuple[int, Mapping[str, Any]]]
# Line number and row in, record out; raises Unusable.
Convert = Callable[[int, Mapping[str, Any]], dict[str, Any]]


@dataclass
class Counts:
    """What became of the rows.

    Attributes:
        read: rows read, used or not.
        dropped: what was left out, by reason.
        columns: the names in the first row, for error messages.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    columns: tuple[str, ...] = ()

    def watch(self, rows: Rows) -> Rows:
        """The same rows, counted as they pass."""
        for line, row in rows:
            if not self.read:
                self.columns = tuple(map(str, row))
            self.read += 1
            yield line, row


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
    # Lazily, so that nothing behind the last record is read.
    return list(islice(_converted(rows, convert, counts, path, bad), limit)), counts


def _converted(
    rows: Rows, convert: Convert, counts: Counts, path: object, bad: BadRecords | None
) -> Iterable[dict[str, Any]]:
    for line, row in counts.watch(rows):
        try:
            record = convert(line, row)
            parse_record(record, str(path), line)
        except Unusable as reason:
            counts.dropped[str(reason)] += 1
        except UserError as error:
            if bad is None:
                raise
            bad.note(error, line)
        else:
            yield record


@dataclass(frozen=True)
class Conversion:
    """A published data set that ``stepjepa prepare`` can turn into training records.

    Attributes:
        summary: one line of help.
        rows: the fields of its rows, for the help.
        function: ``module:name``, loaded when needed; from a row to a record, or with ``whole`` from all rows to all
            records and what was dropped.
        datasets: where such rows are found on the hub, for the help.
        whole: rows do not become records one by one.
    """

    summary: str
    rows: str
    function: str
    datasets: tuple[str, ...]
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
        module, _, name = self.function.partition(":")
        function = partial(getattr(importlib.import_module(module), name), **options)
        if not self.whole:
            return convert_rows(rows, lambda line, row: function(row), limit=limit, path=path, bad=bad)
        counts = Counts()

        def wrong(line: int, error: UserError) -> None:
            assert bad is not None
            bad.note(UserError(str(error), path=path), line)

        try:
            records, counts.dropped = function(counts.watch(rows), **({} if bad is None else {"wrong": wrong}))
        except UserError as error:
            raise UserError(str(error), path=path) from None
        for number, record in enumerate(records, start=1):
            parse_record(record, "<record>", number)
        return records[:limit], counts


CONVERSIONS = {
    "gsm8k": Conversion(
        "word problems with solutions, main or socratic, as they are or each line a step",
        "question and answer",
        "stepjepa.tasks.gsm8k:convert",
        ("openai/gsm8k --subset main", "openai/gsm8k --subset socratic"),
    ),
    "spider": Conversion(
        "questions about databases and SQL",
        "db_id, question and query",
        "stepjepa.tasks.spider:convert",
        ("xlangai/spider",),
    ),
    "nq-open": Conversion(
        "questions and short answers",
        "question and answer, a list",
        "stepjepa.tasks.nq_open:convert",
        ("google-research-datasets/nq_open",),
    ),
    "hellaswag": Conversion(
        "four endings of a story, one of them right",
        "ctx, endings and label",
        "stepjepa.tasks.hellaswag:convert",
        ("Rowan/hellaswag",),
    ),
    "rotten-tomatoes": Conversion(
        "film reviews, Good or Bad",
        "text and label, 0 or 1",
        "stepjepa.tasks.sentiment:convert",
        ("cornell-movie-review-data/rotten_tomatoes",),
    ),
    "yelp": Conversion(
        "reviews with one star to five, Very Bad to Very Good",
        "text and label, 0 to 4",
        "stepjepa.tasks.sentiment:convert_stars",
        ("Yelp/yelp_review_full",),
    ),
    "yelp-polarity": Conversion(
        "reviews, Good or Bad",
        "text and label, 0 or 1",
        "stepjepa.tasks.sentiment:convert",
        ("fancyzhx/yelp_polarity",),
    ),
    "paraphrase": Conversion(
        "pairs or groups of sentences that say the same, each to predict the next",
        "two sentences, a list of them, or a sentence and its group",
        "stepjepa.tasks.paraphrase:records_of",
        ("google-research-datasets/paws --subset labeled_final", "humarin/chatgpt-paraphrases"),
        whole=True,
    ),
}
