"""NL-RX: a sentence about lines becomes a regular expression; the data sets synth and turk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from stepjepa.answers.legible import unfenced
from stepjepa.answers.scoring import text_scores
from stepjepa.answers.workers import Outcome, Workers
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.tasks.base import (
    NO_ANSWER,
    TIMED_OUT,
    WRONG,
    Response,
    Scored,
    Task,
    TaskOptions,
    Unusable,
    chat_record,
)
from stepjepa.tasks.regex.equivalence import equivalent, find_difference
from stepjepa.tasks.regex.syntax import RegexSyntaxError, parse

SYSTEM_PROMPT = "Convert natural language to regular expression."

# What is found out about an answer.
SAME_TEXT = "same text"
EQUIVALENT = "equivalent"
DIFFERENT = "different"
MALFORMED = "malformed"
UNDECIDED = "undecided"
EMPTY = "empty"
_RIGHT = (SAME_TEXT, EQUIVALENT)
_ERRORS = {DIFFERENT: WRONG, MALFORMED: WRONG, EMPTY: NO_ANSWER, UNDECIDED: TIMED_OUT}

# What a fifth of the published expressions come to, so that very different ones are equivalent.
_TRIVIAL = {"no line": "~(.*)", "every line": ".*", "every line but the empty one": ".+"}

_FILE_NAME = re.compile(r"(?:synth|turk|nl[_-]?rx)(?![a-z])", re.IGNORECASE)
_LONGEST_EXAMPLE = 60


class Verdict(NamedTuple):
    """What is found out about an answer.

    Attributes:
        verdict: one of the constants above.
        reason: for a different one a line on which the two differ, shortened if need be; for a malformed one what is
            wrong; for an undecided one which limit was reached; for an equivalent one what both describe, if that is
            no line at all or every line.
    """

    verdict: str
    reason: str | None = None


def judge(answer: str, truth: str) -> Verdict:
    """Compare two expressions; without a limit of time, so for processes that can be ended.

    Args:
        answer: any text.
        truth: an expression.
    """
    try:
        parse(answer)
    except RegexSyntaxError as error:
        return Verdict(MALFORMED, str(error))
    line = find_difference(answer, truth)
    if line is None:
        trivial = (name for name, regex in _TRIVIAL.items() if equivalent(truth, regex))
        return Verdict(EQUIVALENT, next(trivial, None))
    return Verdict(DIFFERENT, line if len(line) <= _LONGEST_EXAMPLE else f"{line[:_LONGEST_EXAMPLE]}...")


class NlRxTask(Task):
    """The truth is the assistant message, an expression of NL-RX's dialect (see ``tasks.regex.syntax``).

    Scores: ``equivalent`` (the whole answer is an expression that describes the same lines as the truth), ``exact``
    (it is the same text, as in the published figures), ``prefix`` (it begins with the truth, perhaps the model ran on),
    ``contains``, and ``undecided`` (whether it is equivalent could not be found out within the limits). White space
    around the answer does not count; for ``equivalent`` neither does the fence of code that it is shown in.

    The headline is ``equivalent``, since one description has many right expressions and the published files hold one
    of them; nothing in it is guessed, so it differs from ``exact`` only by answers that are proven right. An undecided
    one is not counted as right: the true share lies between the share of ``equivalent`` and that plus the share of
    ``undecided``. An answer that is not of the dialect, or continues after the expression, is wrong.

    Of the 10,000 published expressions 1503 describe no line at all (``(dog)&(truck)``: both words and nothing else),
    493 every line and 217 every line but the empty one. Whatever says as little is equivalent to them; how many
    answers are right in that way only is told apart in the details.
    """

    name = "nl-rx"
    headline = "equivalent"
    lenient = "prefix"
    takes = ("time_limit", "memory_limit", "workers")

    def __init__(self, options: TaskOptions | None = None) -> None:
        self._options = options or TaskOptions()
        self._workers: Workers | None = None

    @classmethod
    def from_options(cls, options: TaskOptions) -> Self:
        """The task with the user's limits."""
        return cls(options)

    @classmethod
    def recognises(cls, record: Record) -> bool:
        """The record has the system prompt of the published files, or its file is called ``synth...`` or so."""
        return record.messages[0] == {"role": "system", "content": SYSTEM_PROMPT} or bool(
            _FILE_NAME.match(Path(record.path).name)
        )

    def truth(self, record: Record) -> str:
        """The expression of the assistant message.

        Raises:
            UserError: it is none.
        """
        truth = record.answer.strip()
        try:
            parse(truth)
        except RegexSyntaxError as error:
            raise UserError(
                f"the assistant message is no regular expression of NL-RX ({error}); correct it or pass --task generic",
                path=record.path,
                line=record.line,
            ) from None
        return truth

    def score(self, record: Record, response: Response) -> Scored:
        """Compare with the truth as text, and if that differs as expressions."""
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Compare as text, then in processes with limits whatever differs."""
        pairs = [
            (unfenced(response.text), self.truth(record)) for record, response in zip(records, responses, strict=True)
        ]
        verdicts = {(answer, truth): Verdict(SAME_TEXT) for answer, truth in pairs if answer == truth}
        verdicts |= {(answer, truth): Verdict(EMPTY) for answer, truth in pairs if not answer}
        # Samples of one record often agree; each pair is decided once.
        waiting = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
        if waiting:
            verdicts |= zip(waiting, map(_verdict, self._start_workers().map(waiting)), strict=True)
        return [
            _scored(verdicts[pair], text_scores(response.text, pair[1]))
            for pair, response in zip(pairs, responses, strict=True)
        ]

    def _start_workers(self) -> Workers:
        if self._workers is None:
            options = self._options
            self._workers = Workers(
                judge, seconds=options.time_limit, memory=options.memory_limit, processes=options.workers
            )
        return self._workers

    def details(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """How the answers were decided.

        ``verdicts`` counts them; ``trivially_equivalent`` are those of the equivalent ones that differ as text from a
        truth that describes no line, or every line; ``equivalent_at_least`` and ``equivalent_at_most`` are the bounds
        of the true share where some are undecided. Of several samples of one record the one that the majority gave
        counts, as in the lines.
        """
        counts = Counter(line["extracted"]["verdict"] for line in lines)
        right = sum(counts[verdict] for verdict in _RIGHT)
        trivial = sum(
            line["extracted"]["verdict"] == EQUIVALENT and line["extracted"]["reason"] is not None for line in lines
        )
        details: dict[str, Any] = {"verdicts": dict(counts.most_common()), "trivially_equivalent": trivial}
        if counts[UNDECIDED]:
            details["equivalent_at_least"] = right / len(lines)
            details["equivalent_at_most"] = (right + counts[UNDECIDED]) / len(lines)
        return details

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()


def _verdict(outcome: Outcome) -> Verdict:
    return Verdict(UNDECIDED, outcome.message) if outcome.failure else outcome.value


def _scored(verdict: Verdict, texts: dict[str, bool | float]) -> Scored:
    scores = {
        "equivalent": verdict.verdict in _RIGHT,
        **texts,
        "undecided": verdict.verdict == UNDECIDED,
    }
    return Scored(scores, {"verdict": verdict.verdict, "reason": verdict.reason}, _ERRORS.get(verdict.verdict))


def make_record(sentence: str, regex: str) -> dict[str, Any]:
    """A record in the published form.

    Raises:
        Unusable: the sentence is empty, or the expression is none of the dialect.
    """
    if not sentence.strip():
        raise Unusable("no sentence")
    try:
        parse(regex.strip())
    except RegexSyntaxError:
        raise Unusable("no regular expression of NL-RX") from None
    return chat_record(SYSTEM_PROMPT, sentence.strip(), regex.strip())
