"""Convert rows of published data sets into training records, counting the rows that are dropped, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from stepjepa.data.records import BadRecords, parse_record
from stepjepa.errors import UserError
from stepjepa.tasks import paraphrase
from stepjepa.tasks.generic import Gsm8kTask
from stepjepa.tasks.hellaswag import HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.raw_values import Unusable
from stepjepa.tasks.sentiment import SentimentTask
from stepjepa.tasks.spider import SpiderTask

Rows = Iterable[tuple[int, Mapping[str, Any]]]
# Converts a row to a record, or to a list of records that form a group. Raises Unusable to drop the row.
Convert = Callable[[Mapping[str, Any]], dict[str, Any] | list[dict[str, Any]]]


@dataclass
class Counts:
    """Counts of rows and records.

    Attributes:
        read: rows read.
        dropped: rows that gave no record, by reason.
        changed: records that were changed, by the kind of change.
        columns: the column names of the first row, for error messages.
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    columns: tuple[str, ...] = ()


def convert_rows(
    rows: Rows,
    convert: Convert,
    *,
    limit: int | None = None,
    path: object = "<memory>",
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], Counts]:
    """Convert rows to records, dropping those that are unusable.

    Args:
        rows: line numbers and rows.
        convert: converts a row to a record, or to a list of records, which get the line number as the field ``group``.
        limit: stop after this number of records.
        path: for error messages.
        bad: collects invalid rows, which are skipped; None raises an error for the first one.

    Raises:
        UserError: a row or its record is invalid, and ``bad`` is None.
    """
    counts = Counts()

    def converted() -> Iterator[dict[str, Any]]:
        for line, row in rows:
            if not counts.read:
                counts.columns = tuple(map(str, row))
            counts.read += 1
            try:
                made = convert(row)
                records = [record | {"group": line} for record in made] if isinstance(made, list) else [made]
                for record in records:
                    parse_record(record, str(path), line)
            except Unusable as reason:
                counts.dropped[str(reason)] += 1
            except UserError as error:
                located = error if error.line is not None else UserError(str(error), path=path, line=line)
                if bad is None:
                    raise located from error
                bad.note(located, line)
            else:
                yield from records

    # Lazy, so that no row after the last record is read.
    return list(islice(converted(), limit)), counts


@dataclass(frozen=True)
class Conversion:
    """A published data set that ``stepjepa prepare`` can turn into training records.

    Attributes:
        summary: one line of help.
        rows: the fields of its rows, for the help.
        convert: converts a row to a record or a list of records.
        datasets: names of such data sets on the hub, for the help.
    """

    summary: str
    rows: str
    convert: Callable[..., dict[str, Any] | list[dict[str, Any]]]
    datasets: tuple[str, ...]


CONVERSIONS = {
    "gsm8k": Conversion(
        "word problems with solutions, main or socratic, as they are or each line a step",
        "question and answer",
        Gsm8kTask.convert,
        ("openai/gsm8k --subset main", "openai/gsm8k --subset socratic"),
    ),
    "spider": Conversion(
        "questions about databases and SQL",
        "db_id, question and query",
        SpiderTask.convert,
        ("xlangai/spider",),
    ),
    "nq-open": Conversion(
        "questions and short answers",
        "question and answer, a list",
        NqOpenTask.convert,
        ("google-research-datasets/nq_open",),
    ),
    "hellaswag": Conversion(
        "four endings of a story, one of them right",
        "ctx, endings and label",
        HellaswagTask.convert,
        ("Rowan/hellaswag",),
    ),
    "rotten-tomatoes": Conversion(
        "film reviews, Good or Bad",
        "text and label, 0 or 1",
        SentimentTask.convert,
        ("cornell-movie-review-data/rotten_tomatoes",),
    ),
    "yelp": Conversion(
        "reviews with one star to five, Very Bad to Very Good",
        "text and label, 0 to 4",
        partial(SentimentTask.convert, stars=True),
        ("Yelp/yelp_review_full",),
    ),
    "yelp-polarity": Conversion(
        "reviews, Good or Bad",
        "text and label, 0 or 1",
        SentimentTask.convert,
        ("fancyzhx/yelp_polarity",),
    ),
    "paraphrase": Conversion(
        "sentences that say the same, each to predict the next",
        "two sentences, or a list of them",
        paraphrase.convert,
        ("google-research-datasets/paws --subset labeled_final", "humarin/chatgpt-paraphrases"),
    ),
}
