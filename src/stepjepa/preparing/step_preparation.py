"""Convert the responses of a reasoning model to training records whose steps are separated by blank lines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from stepjepa.data.records import BadRecords
from stepjepa.errors import UserError
from stepjepa.options import option
from stepjepa.own_code import load
from stepjepa.preparing.conversion import Counts, Rows, convert_rows
from stepjepa.preparing.step_splitting import drop_thinking, split_response, thinking_steps, tidy_step
from stepjepa.tasks.answers import marked_answers, parse_number, same_answer
from stepjepa.tasks.raw_values import Unusable, chat_record, read_text_field

FEW_STEPS = "fewer than two steps"
SYSTEM_PROMPT = (
    "Please solve the problem step by step (separate steps with double newlines), "
    "and put your final answer within \\boxed{}."
)

Splitter = Callable[[str], list[str]]


def load_splitter(name: str) -> Splitter:
    """Import the user's splitter ``module:function``, which takes a response and returns the list of its steps."""
    splitter = load("--custom", name, "function, such as my_splitter:split")
    if not callable(splitter):
        raise UserError(f"--custom: '{name}' is {type(splitter).__name__}; expected module:function")
    return cast(Splitter, splitter)


@dataclass(frozen=True)
class StepOptions:
    """Options of :func:`prepare_records`.

    Attributes:
        splitter: the user's function from a response to its steps, instead of :func:`split_response`.
        thinking: ``remove`` or ``keep`` text in ``<think>...</think>``, or split it into ``steps`` at blank lines.
    """

    question_field: str = option("question", "field of the question", metavar="NAME")
    response_field: str = option("deepseek_response", "field of the response", metavar="NAME")
    system_prompt: str = option(SYSTEM_PROMPT, metavar="TEXT")
    require_correct: bool = option(False, "leave out records whose final answer is not the ground truth")
    splitter: Splitter | None = None
    thinking: Literal["remove", "keep", "steps"] = "remove"


def _text_field(value: Mapping[str, Any], name: str) -> str:
    if value.get(name) is None or isinstance(value[name], str):
        return read_text_field(value, name)
    raise UserError(f"'{name}' is {type(value[name]).__name__}, expected a string")


def _ground_truth(value: Mapping[str, Any]) -> str | None:
    """The answer in ``ground_truth``; else the marked answer in ``answer``, or ``answer`` itself if it is a number."""
    texts = {}
    for name in ("ground_truth", "answer"):
        given = value.get(name)
        if isinstance(given, bool | list | dict) or (isinstance(given, float) and not math.isfinite(given)):
            got = given if isinstance(given, float) else type(given).__name__
            raise UserError(f"'{name}' is {got}, expected a string or a number")
        texts[name] = "" if given is None else str(given).strip()
    truth, answer = texts["ground_truth"], texts["answer"]
    if truth:
        return (marked_answers(truth) or [truth])[-1]
    if marked := marked_answers(answer):
        return marked[-1]
    return answer if parse_number(answer) is not None else None


def _find_steps(response: str, options: StepOptions) -> list[str]:
    if options.splitter is None:
        return thinking_steps(response) if options.thinking == "steps" else split_response(response)
    try:
        steps: object = options.splitter(response)
    except Exception as error:  # the user's function may raise anything
        raise UserError(f"--custom: the splitter failed ({type(error).__name__}: {error}); correct it") from error
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        got = type(steps).__name__ if not isinstance(steps, list) else "a list with other things than strings"
        raise UserError(f"--custom: the splitter gave {got}, expected a list of strings")
    return [tidied for tidied in map(tidy_step, steps) if tidied]


def _prepare(value: Mapping[str, Any], options: StepOptions) -> dict[str, Any]:
    question = _text_field(value, options.question_field)
    whole = _text_field(value, options.response_field)
    response = drop_thinking(whole)
    if not response:
        raise Unusable(f"'{options.response_field}' holds only thinking")
    truth = _ground_truth(value)
    steps = _find_steps(response if options.thinking == "remove" else whole, options)
    if len(steps) < 2:
        raise Unusable(FEW_STEPS)
    if options.require_correct:
        # As in evaluation, only a marked answer counts.
        marked = marked_answers(response)
        if truth is None:
            raise Unusable("no ground truth to compare with")
        if not marked:
            raise Unusable("no \\boxed{...} or '#### ...' answer")
        if not same_answer(marked[-1], truth):
            raise Unusable("wrong final answer")
    record: dict[str, Any] = {"question": question}
    if value.get("answer") is not None:
        record["answer"] = value["answer"]
    if truth is not None:
        record["ground_truth"] = truth
    record["total_steps"] = len(steps)
    return record | chat_record(options.system_prompt, question, "\n\n".join(steps))


def prepare_records(
    rows: Rows,
    options: StepOptions,
    path: object = "<memory>",
    limit: int | None = None,
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], Counts]:
    """Convert raw rows to training records; for ``limit``, ``path`` and ``bad`` see :func:`convert_rows`.

    Returns:
        The records, each with ``question``, ``total_steps``, ``messages`` and, if known, ``answer`` and
        ``ground_truth`` (by default the marked answer in ``answer``, or ``answer`` if it is a number); and the counts.
    """
    changed: Counter[str] = Counter()

    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        record = _prepare(value, options)
        if options.thinking == "remove" and re.search("</?think>", value[options.response_field]):
            changed["thinking removed (--keep_thinking, --think_steps)"] += 1
        return record

    records, counts = convert_rows(rows, convert, limit=limit, path=path, bad=bad)
    counts.changed.update(changed)
    return records, counts
