"""NL-RX: a sentence about lines becomes a regular expression; the data sets synth and turk, and such data generated.

A generated description is a tree of productions (``nl_rx_grammar.yaml``) under the word "lines". Trees are drawn as for
the published NL-RX-Synth (Locascio et al., 2016), so many of them that the frequent ones come up again and again and
only the rare ones are still new. Phrases, productions and depths are as frequent as in the published set.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import yaml

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.data.records import Record
from stepjepa.tasks.answers import strip_code_fence, text_scores
from stepjepa.tasks.base import NO_ANSWER, TIMED_OUT, WRONG, Response, Scored, Task, record_error, right_answer
from stepjepa.tasks.regex import RegexSyntaxError, TooManyStatesError, find_difference, parse
from stepjepa.tasks.regex_languages import Languages

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


_GRAMMAR = yaml.safe_load(resources.files("stepjepa.tasks").joinpath("nl_rx_grammar.yaml").read_text("utf-8"))
PRODUCTIONS, GROUPS = _GRAMMAR["productions"], _GRAMMAR["groups"]
_LITERALS = GROUPS["literal"]
_TRIPLES = {"and, and", "either, or"}
# The strings of a description, in order.
STRINGS = ("dog", "truck", "ring", "lake")

# So many draws of a depth and size (see _draw_parts) give about 10,000 pairs, as the published set has, and small and
# large ones in its proportion. Of the small ones hardly any is new at the end.
_LARGE = (3, 7)
_DRAWS = {(2, 5): 600_000, _LARGE: 60_000}
# Draws in a row without a new tree after which the grammar counts as exhausted.
_PATIENCE = 50_000


class Tree(NamedTuple):
    """A description: the name of a production, its parts, and its number, if it has one."""

    name: str
    parts: tuple[Tree, ...] = ()
    times: int | None = None

    def names(self) -> Iterator[str]:
        yield self.name
        for part in self.parts:
            yield from part.names()


def describe(tree: Tree) -> tuple[str, str]:
    """Return the description of a tree in words, and its regular expression."""

    def put_together(tree: Tree, negated: bool) -> tuple[str, str]:
        production = PRODUCTIONS[tree.name]
        parts = [put_together(part, negated or tree.name == "not") for part in tree.parts]
        wording = production.get("negated" if negated else "wording", production["wording"])
        words, regexes = (part[0] for part in parts), (part[1] for part in parts)
        return wording.format(*words, times=tree.times), production["regex"].format(*regexes, times=tree.times)

    words, regex = put_together(tree, False)
    description = f"lines {words}"
    for clumsy, smoother in _GRAMMAR["smoother"]:
        description = description.replace(clumsy, smoother)
    for string in STRINGS:
        description, regex = (text.replace("WORD", string, 1) for text in (description, regex))
    return description, regex


def _draw_parts(
    groups: Sequence[str], draw: random.Random, depth: int, size: int, compositions: int = 2
) -> tuple[Tree, ...] | None:
    """Draw a tree for each part from its group of productions; None if one does not fit the limits.

    ``depth`` limits the nesting of productions, without literals; ``size`` the productions and their parts on one path;
    ``compositions`` the "and" and "or" on one path. At a limit only literals fit.
    """
    names = []
    for group in groups:
        full = min(depth, size, compositions) <= 0
        candidates = (_LITERALS if group != "no literal" else []) if full else GROUPS[group]
        if not candidates:
            return None
        name = candidates[int(draw.random() * len(candidates))]
        names.append(name)
        size -= 1 + len(PRODUCTIONS[name].get("parts", ()))
        compositions -= name in ("and", "or")
    trees = []
    for name in names:
        parts = _draw_parts(PRODUCTIONS[name].get("parts", ()), draw, depth - 1, size, compositions)
        if parts is None:
            return None
        trees.append(Tree(name, parts, draw.randint(2, 7) if name == "or more times" else None))
    return tuple(trees)


def is_sound(tree: Tree) -> bool:
    """Return whether the description of a tree is of the published kind."""
    counts = Counter(tree.names())
    strings = counts.pop("string", 0)
    repetitions = sum(counts[name] for name in _GRAMMAR["repetitions"])
    if strings > len(STRINGS) or max(counts.values()) > 1 or repetitions > 1:
        return False
    below = {part.name for part in tree.parts}
    # "lines with a number and a letter": are they the whole line, or in it?
    if tree.name in ("and", "or", *_TRIPLES) and below.intersection(_LITERALS):
        return False
    if "containing only" in below and tree.name != "not":
        return False
    description, _ = describe(tree)
    return not any(phrase in description for phrase in _GRAMMAR["avoided"])


def _draw_pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Yield unique descriptions and their expressions until the grammar is exhausted.

    First about 10,000 from as many draws as for the published set, shuffled, so that any number of them has the same
    distribution; then large ones, which grow with their number.
    """
    draw = random.Random(f"nl-rx {seed}")
    drawn: set[Tree] = set()
    pairs: dict[str, str] = {}

    def draw_pair(depth: int, size: int) -> bool:
        parts = _draw_parts(("no literal",), draw, depth, size)
        # Skip half of the sets of three literals, which are too frequent.
        if parts is None or (_TRIPLES.intersection(parts[0].names()) and draw.random() < 0.5) or parts[0] in drawn:
            return False
        drawn.update(parts)
        pair = describe(parts[0])
        if pair[0] in pairs or not is_sound(parts[0]):
            return False
        pairs.update([pair])
        return True

    for room, draws in _DRAWS.items():
        for _ in range(draws):
            draw_pair(*room)
    first = list(pairs.items())
    draw.shuffle(first)
    yield from first
    while any(draw_pair(*_LARGE) for _ in range(_PATIENCE)):
        yield next(reversed(pairs.items()))


def generate_split(size: int, test_size: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return training and test pairs of a description and its regular expression, without duplicates.

    No expression of a test pair is one of a training pair. A larger set begins with the pairs of a smaller one, and the
    test pairs do not depend on the size of the training set. UserError if the grammar has fewer pairs.

    Args:
        size: number of training pairs.
        test_size: number of test pairs.
        seed: the same seed gives the same pairs.
    """
    pairs = _draw_pairs(seed)

    def take(number: int, name: str, avoid: set[str]) -> list[tuple[str, str]]:
        chosen = list(islice((pair for pair in pairs if pair[1] not in avoid), number))
        if len(chosen) < number:
            fault = f"{name}: expected a size that the grammar has pairs for, got {number} and found {len(chosen)}"
            raise UserError(fault)
        return chosen

    test = take(test_size, "test_size", set())
    return take(size, "size", {regex for _, regex in test}), test
