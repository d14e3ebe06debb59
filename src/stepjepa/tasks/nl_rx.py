"""NL-RX: a sentence about lines becomes a regular expression; the data sets synth and turk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepjepa.data.records import Record
from stepjepa.tasks.answers import strip_code_fence, text_scores
from stepjepa.tasks.base import NO_ANSWER, TIMED_OUT, WRONG, Response, Scored, Task, record_error, task
from stepjepa.tasks.raw_values import Unusable, chat_record
from stepjepa.tasks.regex import RegexSyntaxError, equivalent, find_difference, parse

# The verdicts on an answer.
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
    """One of the constants above, and why.

    The reason is, if different, a line on which the two differ; if malformed, what is wrong; if undecided, which limit
    was reached; if equivalent, what both describe where that is no line at all or every line.
    """

    verdict: str
    reason: str | None = None


def judge(answer: str, truth: str) -> Verdict:
    """Compare any text with an expression; without a limit of time, so to be run by :meth:`Task.run_within_limits`."""
    try:
        parse(answer)
    except RegexSyntaxError as error:
        return Verdict(MALFORMED, str(error))
    line = find_difference(answer, truth)
    if line is None:
        trivial = (name for name, regex in _TRIVIAL.items() if equivalent(truth, regex))
        return Verdict(EQUIVALENT, next(trivial, None))
    return Verdict(DIFFERENT, line if len(line) <= _LONGEST_EXAMPLE else f"{line[:_LONGEST_EXAMPLE]}...")


@task("nl-rx")
class NlRxTask(Task):
    """The truth is the assistant message, an expression of NL-RX's dialect (see ``tasks.regex``).

    Scores: ``equivalent`` (the whole answer is an expression that describes the same lines as the truth), ``exact``
    (it is the same text, as in the published figures), ``prefix`` (it begins with the truth, perhaps the model ran on),
    ``contains``, and ``undecided`` (the limits were reached before equivalence was decided; not counted as right).
    White space around the answer does not count; for ``equivalent`` neither does the fence of code around it.

    The headline is ``equivalent``, since one description has many right expressions and the published files hold one
    of them. Of the 10,000 published expressions 1503 describe no line at all, 493 every line and 217 every line but the
    empty one; whatever says as little is equivalent to them, and the details count such answers.
    """

    headline = "equivalent"
    lenient = "prefix"
    takes = ("time_limit", "memory_limit", "workers")
    system_prompt = "Convert natural language to regular expression."

    @classmethod
    def recognises(cls, record: Record) -> bool:
        return cls.is_of_data_set(record) or bool(_FILE_NAME.match(Path(record.path).name))

    def truth(self, record: Record) -> str:
        truth = record.answer.strip()
        try:
            parse(truth)
        except RegexSyntaxError as error:
            told = f"the assistant message is no regular expression of NL-RX ({error})"
            raise record_error(record, f"{told}; correct it or pass --task generic") from None
        return truth

    def score(self, record: Record, response: Response) -> Scored:
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Compare as text, then in processes with limits whatever differs."""
        answers = [strip_code_fence(response.text) for response in responses]
        pairs = [(answer, self.truth(record)) for answer, record in zip(answers, records, strict=True)]
        verdicts = {pair: Verdict(SAME_TEXT) for pair in pairs if pair[0] == pair[1]}
        verdicts |= {pair: Verdict(EMPTY) for pair in pairs if not pair[0]}
        # Samples of one record often agree; each pair is decided once.
        waiting = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
        if waiting:
            for pair, outcome in zip(waiting, self.run_within_limits(judge, waiting), strict=True):
                verdicts[pair] = Verdict(UNDECIDED, outcome.message) if outcome.failure else outcome.value
        scored = []
        for pair, response in zip(pairs, responses, strict=True):
            verdict, reason = verdicts[pair]
            texts = text_scores(response.text, pair[1])
            scores = {"equivalent": verdict in _RIGHT, **texts, "undecided": verdict == UNDECIDED}
            scored.append(Scored(scores, {"verdict": verdict, "reason": reason}, _ERRORS.get(verdict)))
        return scored

    def details(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """How the answers were decided.

        ``verdicts`` counts them; ``trivially_equivalent`` are the equivalent ones that differ as text from a truth that
        describes no line, or every line; ``equivalent_at_least`` and ``equivalent_at_most`` are the bounds of the true
        share where some are undecided.
        """
        verdicts = [(line["extracted"]["verdict"], line["extracted"]["reason"]) for line in lines]
        counts = Counter(verdict for verdict, _ in verdicts)
        right = sum(counts[verdict] for verdict in _RIGHT)
        trivial = sum(verdict == EQUIVALENT and reason is not None for verdict, reason in verdicts)
        details: dict[str, Any] = {"verdicts": dict(counts.most_common()), "trivially_equivalent": trivial}
        if counts[UNDECIDED]:
            details["equivalent_at_least"] = right / len(lines)
            details["equivalent_at_most"] = (right + counts[UNDECIDED]) / len(lines)
        return details


def make_record(sentence: str, regex: str) -> dict[str, Any]:
    """A record in the published form; :class:`Unusable` without a sentence or without an expression of the dialect."""
    sentence, regex = sentence.strip(), regex.strip()
    if not sentence:
        raise Unusable("no sentence")
    try:
        parse(regex)
    except RegexSyntaxError:
        raise Unusable("no regular expression of NL-RX") from None
    return chat_record(NlRxTask.system_prompt, sentence, regex)
