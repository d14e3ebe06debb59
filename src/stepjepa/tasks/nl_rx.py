"""NL-RX: a sentence about lines becomes a regular expression; the data sets synth and turk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stepjepa.base.json_object import JsonObject
from stepjepa.data.record import Record
from stepjepa.tasks.answers import strip_code_fence, text_scores
from stepjepa.tasks.base import NO_ANSWER, TIMED_OUT, WRONG, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.regex import TooManyStatesError, find_difference
from stepjepa.tasks.regex_languages import Languages
from stepjepa.tasks.regex_syntax import RegexSyntaxError, parse

_RIGHT = ("same text", "equivalent")
_ERRORS = {"different": WRONG, "malformed": WRONG, "empty": NO_ANSWER, "undecided": TIMED_OUT}
# A fifth of the published expressions are equivalent to one of these.
_TRIVIAL = {"no line": "~(.*)", "every line": ".*", "every line but the empty one": ".+"}
_MOST_STATES = 10_000


def judge(answer: str, truth: str) -> tuple[str, str | None]:
    """Compare any text with an expression, without a time limit.

    Args:
        answer: the text.
        truth: the expression.

    Returns:
        ``malformed`` and the fault; ``different`` and a line that only one matches; or ``equivalent`` and the name in
        ``_TRIVIAL``, if any.
    """
    try:
        parse(answer)
    except RegexSyntaxError as error:
        return "malformed", str(error)
    line = find_difference(answer, truth)
    if line is not None:
        return "different", line
    trivial = None
    # Only a statistic, which may take far longer than the verdict: hence the limit.
    with suppress(TooManyStatesError):
        names = (name for name, regex in _TRIVIAL.items() if find_difference(truth, regex, _MOST_STATES) is None)
        trivial = next(names, None)
    return "equivalent", trivial


class NlRxTask(Task):
    """The truth is the assistant message, an expression of NL-RX's dialect (see ``tasks.regex``).

    ``equivalent``: the whole answer, without a code fence around it, matches the same lines. ``undecided``: the limits
    were reached before that was decided.
    """

    name = "nl-rx"
    headline = "equivalent"
    secondary_score = "prefix"
    used_options = ("time_limit", "memory_limit", "workers")
    system_prompt = "Convert natural language to regular expression."

    @classmethod
    def recognises(cls, record: Record) -> bool:
        prefix = re.match(r"(?:synth|turk|nl[_-]?rx)(?![a-z])", Path(record.path).name.lower())
        return bool(prefix) or super().recognises(record)

    def truth(self, record: Record) -> str:
        """Return the expression in the assistant message; UserError if it does not parse."""
        truth = right_answer(record).strip()
        try:
            parse(truth)
        except RegexSyntaxError as error:
            fault = f"the assistant message is no regular expression of NL-RX ({error})"
            raise record_error(record, f"{fault}; correct it or pass `task generic`") from None
        return truth

    def score(self, record: Record, response: Response) -> Scored:
        return self.score_all([record], [response])[0]

    def score_all(self, records: Sequence[Record], responses: Sequence[Response]) -> list[Scored]:
        """Compare as text; compare pairs that differ in processes with limits."""
        both = zip(responses, records, strict=True)
        pairs = [(strip_code_fence(response.content), self.truth(record)) for response, record in both]
        # Samples of one record often agree, so each distinct pair is decided once.
        waiting = [pair for pair in dict.fromkeys(pairs) if pair[0] not in ("", pair[1])]
        outcomes = self.run_within_limits(judge, waiting, self.options.time_limit) if waiting else []
        decided = (("undecided", result.message) if result.failure else result.value for result in outcomes)
        verdicts, scored = dict(zip(waiting, decided, strict=True)), []
        for pair, response in zip(pairs, responses, strict=True):
            verdict, reason = verdicts.get(pair, ("same text" if pair[0] else "empty", None))
            texts = text_scores(response.content, pair[1])
            scores = {"equivalent": verdict in _RIGHT, **texts, "undecided": verdict == "undecided"}
            scored.append(Scored(scores, {"verdict": verdict, "reason": reason}, _ERRORS.get(verdict)))
        return scored

    def answer_names(self, records: Sequence[Record]) -> list[str | None]:
        """Return the language of each expression: the first expression that matches the same lines.

        Expressions whose comparison needs too many states count as different.
        """
        languages = Languages(_MOST_STATES)
        return [languages.of(self.truth(record)) for record in records]

    def details(self, lines: Sequence[JsonObject]) -> JsonObject:
        """Return counts of ``verdicts``, and of ``trivially_equivalent``: other text than a truth that is trivial."""
        verdicts = [(line["extracted"]["verdict"], line["extracted"]["reason"]) for line in lines]
        counts = Counter(verdict for verdict, _ in verdicts)
        trivial = sum(verdict == "equivalent" and reason is not None for verdict, reason in verdicts)
        return {"verdicts": dict(counts.most_common()), "trivially_equivalent": trivial}
