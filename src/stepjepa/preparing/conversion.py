"""Convert rows of raw data sets into training records, counting the rows that are dropped, by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from stepjepa.data.records import BadRecords, parse_record
from stepjepa.errors import UserError
from stepjepa.options import option
from stepjepa.own_code import load
from stepjepa.preparing.step_splitting import drop_thinking, split_response, thinking_steps, tidy_step
from stepjepa.tasks.answers import marked_answers, parse_number, same_answer
from stepjepa.tasks.generic import Gsm8kTask
from stepjepa.tasks.hellaswag import HellaswagTask
from stepjepa.tasks.nq_open import NqOpenTask
from stepjepa.tasks.raw_values import Unusable, chat_record, convert_paraphrases, read_text_field
from stepjepa.tasks.sentiment import SentimentTask
from stepjepa.tasks.spider import SpiderTask

Row = Mapping[str, Any]
Rows = Iterable[tuple[int, Row]]  # with line numbers
# Converts a row to a record, or to a list of records that form a group. Raises Unusable to drop the row.
Convert = Callable[..., dict[str, Any] | list[dict[str, Any]]]
Splitter = Callable[[str], list[str]]

FEW_STEPS = "fewer than two steps"
SYSTEM_PROMPT = (
    "Please solve the problem step by step (separate steps with double newlines), "
    "and put your final answer within \\boxed{}."
)


@dataclass
class Counts:
    """Counts of rows and records."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows that gave no record, by reason
    changed: Counter[str] = field(default_factory=Counter)  # records that were changed, by the kind of change
    columns: tuple[str, ...] = ()  # of the first row, for error messages


def convert_rows(
    rows: Rows,
    convert: Convert,
    *,
    limit: int | None = None,
    path: object = "<memory>",
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], Counts]:
    """Convert at most ``limit`` rows of the file ``path`` to records, dropping those that are unusable.

    Several records of one row get its line number as the field ``group``. Invalid rows are collected by ``bad`` and
    skipped; without it the first one raises a UserError.
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


class Conversion(NamedTuple):
    """A published data set that ``stepjepa prepare`` can turn into training records."""

    summary: str  # one line of help
    rows: str  # the fields of its rows
    convert: Convert
    datasets: str  # names of such data sets on the hub


CONVERSIONS = {
    "gsm8k": Conversion(
        "word problems, each line of the solution a step if asked",
        "question and answer",
        Gsm8kTask.convert,
        "openai/gsm8k",
    ),
    "spider": Conversion("questions and SQL", "db_id, question and query", SpiderTask.convert, "xlangai/spider"),
    "nq-open": Conversion(
        "questions and short answers",
        "question and answer, a list",
        NqOpenTask.convert,
        "google-research-datasets/nq_open",
    ),
    "hellaswag": Conversion("endings of a story", "ctx, endings and label", HellaswagTask.convert, "Rowan/hellaswag"),
    "rotten-tomatoes": Conversion(
        "film reviews", "text and label, 0 or 1", SentimentTask.convert, "cornell-movie-review-data/rotten_tomatoes"
    ),
    "yelp": Conversion(
        "reviews", "text and label, 0 to 4", partial(SentimentTask.convert, stars=True), "Yelp/yelp_review_full"
    ),
    "yelp-polarity": Conversion("reviews", "text and label, 0 or 1", SentimentTask.convert, "fancyzhx/yelp_polarity"),
    "paraphrase": Conversion(
        "sentences of one sense",
        "sentences",
        convert_paraphrases,
        "google-research-datasets/paws, humarin/chatgpt-paraphrases",
    ),
}


def load_splitter(name: str) -> Splitter:
    """Import the user's splitter ``module:function``, which takes a response and returns the list of its steps."""
    return cast(Splitter, load("--custom", name, "function, such as my_splitter:split"))


@dataclass(frozen=True)
class StepOptions:
    """Options of :func:`prepare_records`."""

    question_field: str = option("question", "field of the question", metavar="NAME")
    response_field: str = option("deepseek_response", "field of the response", metavar="NAME")
    system_prompt: str = option(SYSTEM_PROMPT, metavar="TEXT")
    require_correct: bool = option(False, "leave out records whose final answer is not the ground truth")
    splitter: Splitter | None = None  # the user's own
    # What becomes of text in <think>...</think>; steps: it is split at blank lines.
    thinking: Literal["remove", "keep", "steps"] = "remove"


def prepare_records(
    rows: Rows,
    options: StepOptions,
    path: object = "<memory>",
    limit: int | None = None,
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], Counts]:
    """Convert responses of a model to records with a blank line between steps; arguments as of :func:`convert_rows`.

    Each has ``question``, ``total_steps``, ``messages`` and, if known, ``answer`` and ``ground_truth`` (by default the
    marked answer in ``answer``, or ``answer`` if it is a number).
    """
    records, counts = convert_rows(rows, partial(_prepare, options=options), limit=limit, path=path, bad=bad)
    if changed := sum(record.pop(_THINKING) for record in records):
        counts.changed["thinking removed (--keep_thinking, --think_steps)"] = changed
    return records, counts


_THINKING = "thinking removed"


def _prepare(row: Row, options: StepOptions) -> dict[str, Any]:
    question, whole = (read_text_field(row, name) for name in (options.question_field, options.response_field))
    response = drop_thinking(whole)
    if not response:
        raise Unusable(f"'{options.response_field}' holds only thinking")
    steps = _find_steps(response if options.thinking == "remove" else whole, options)
    if len(steps) < 2:
        raise Unusable(FEW_STEPS)
    truth = _ground_truth(row)
    if options.require_correct:
        _require_correct(response, truth)
    optional = {"answer": row.get("answer"), "ground_truth": truth}
    return {
        "question": question,
        **{name: value for name, value in optional.items() if value is not None},
        "total_steps": len(steps),
        _THINKING: options.thinking == "remove" and bool(re.search("</?think>", whole)),
        **chat_record(options.system_prompt, question, "\n\n".join(steps)),
    }


def _find_steps(response: str, options: StepOptions) -> list[str]:
    if options.splitter is None:
        return thinking_steps(response) if options.thinking == "steps" else split_response(response)
    try:
        steps: object = options.splitter(response)
    except Exception as error:  # the user's function may raise anything
        raise UserError(f"--custom: the splitter failed ({type(error).__name__}: {error}); correct it") from error
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(f"--custom: the splitter gave {type(steps).__name__}, expected a list of strings")
    return [tidied for tidied in map(tidy_step, steps) if tidied]


def _ground_truth(row: Row) -> str | None:
    """The answer in ``ground_truth``; else the marked answer in ``answer``, or ``answer`` itself if it is a number."""
    # A value that is not equal to itself is a gap in a table.
    values = [row.get(name) for name in ("ground_truth", "answer")]
    truth, answer = (str(v).strip() if isinstance(v, str | int | float) and v == v else "" for v in values)  # noqa: PLR0124
    if truth:
        return (marked_answers(truth) or [truth])[-1]
    if marked := marked_answers(answer):
        return marked[-1]
    return answer if parse_number(answer) is not None else None


def _require_correct(response: str, truth: str | None) -> None:
    """Drop a response whose last marked answer is not the truth; as in evaluation, only a marked answer counts."""
    if truth is None:
        raise Unusable("no ground truth to compare with")
    marked = marked_answers(response)
    if not marked:
        raise Unusable("no \\boxed{...} or '#### ...' answer")
    if not same_answer(marked[-1], truth):
        raise Unusable("wrong final answer")
