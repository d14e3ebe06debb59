"""Turn the responses of a reasoning model into training records whose steps are separated by blank lines."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from stepjepa.answers.scoring import marked_answers, parse_number, same_answer
from stepjepa.data.records import BadRecords
from stepjepa.errors import UserError
from stepjepa.preparing.conversion import convert_rows
from stepjepa.preparing.step_splitting import drop_thinking, split_response, tidy_step
from stepjepa.tasks.base import Unusable, chat_record

FEW_STEPS = "fewer than two steps"
QUESTION_FIELD, RESPONSE_FIELD = "question", "deepseek_response"
SYSTEM_PROMPT = (
    "Please solve the problem step by step (separate steps with double newlines), "
    "and put your final answer within \\boxed{}."
)

Splitter = Callable[[str], list[str]]


def load_splitter(name: str) -> Splitter:
    """Import a user's own splitter.

    Args:
        name: ``module:function``; the module is looked for in the current folder too.

    Returns:
        The function: takes the response without its thinking, gives the list of its steps.

    Raises:
        UserError: the name has another form, cannot be imported, or is no function.
    """
    module_name, _, function_name = name.partition(":")
    if not re.fullmatch(r"\w+(?:\.\w+)*:\w+", name):
        raise UserError(f"--custom is '{name}', expected module:function, such as my_splitter:split")
    here = str(Path.cwd())
    if here not in sys.path:
        # An installed command does not look into the current folder, where users keep such a file.
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module is the user's, and may do anything when it is loaded
        cause = str(error) if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: {error}"
        raise UserError(f"--custom {name}: cannot import '{module_name}' ({cause}); check the name") from error
    splitter = getattr(module, function_name, None)
    if splitter is None:
        raise UserError(f"--custom {name}: '{module_name}' has no '{function_name}'; check the name")
    if not callable(splitter):
        raise UserError(f"--custom {name}: '{function_name}' is {type(splitter).__name__}, expected a function")
    return cast(Splitter, splitter)


@dataclass(frozen=True)
class StepOptions:
    """How raw records become training records.

    Attributes:
        response_field: the field that holds the response to be split.
        question_field: the one that holds the question.
        system_prompt: content of the system message of every record.
        splitter: a function from a response to its steps, in place of :func:`split_response`.
        require_correct: keep a record only if its response ends in the right answer.
    """

    response_field: str = RESPONSE_FIELD
    question_field: str = QUESTION_FIELD
    system_prompt: str = SYSTEM_PROMPT
    splitter: Splitter | None = None
    require_correct: bool = False


@dataclass
class StepCounts:
    """What became of the raw records.

    Attributes:
        kept: records written.
        steps: their steps, all together.
        skipped: records left out, by reason.
        columns: the names in the first row.
    """

    kept: int = 0
    steps: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    columns: tuple[str, ...] = ()

    @property
    def read(self) -> int:
        """Records read, kept or not."""
        return self.kept + self.skipped.total()


def _text_field(value: Mapping[str, Any], name: str, path: object, line: int) -> str:
    text = value.get(name)
    if text is None:
        raise Unusable(f"no field '{name}'")
    if not isinstance(text, str):
        raise UserError(f"'{name}' is {type(text).__name__}, expected a string", path=path, line=line)
    if not text.strip():
        raise Unusable(f"'{name}' is empty")
    return text


def _ground_truth(value: Mapping[str, Any], path: object, line: int) -> str | None:
    truth, answer = value.get("ground_truth"), value.get("answer")
    for name, given in (("ground_truth", truth), ("answer", answer)):
        if isinstance(given, float) and not math.isfinite(given):
            raise UserError(f"'{name}' is {given}, expected a number or nothing", path=path, line=line)
        if given is not None and (isinstance(given, bool) or not isinstance(given, str | int | float)):
            raise UserError(f"'{name}' is {type(given).__name__}, expected a string or a number", path=path, line=line)
    if truth is not None and str(truth).strip():
        return (marked_answers(str(truth)) or [str(truth).strip()])[-1]
    text = "" if answer is None else str(answer).strip()
    marked = marked_answers(text)
    if marked:
        return marked[-1]
    return text if parse_number(text) is not None else None


def _find_steps(response: str, options: StepOptions, path: object, line: int) -> list[str]:
    if options.splitter is None:
        return split_response(response)
    try:
        steps: object = options.splitter(response)
    except Exception as error:  # whatever the user's function comes up with
        told = f"--custom: the splitter failed ({type(error).__name__}: {error}); correct it"
        raise UserError(told, path=path, line=line) from error
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        got = type(steps).__name__ if not isinstance(steps, list) else "a list with other things than strings"
        raise UserError(f"--custom: the splitter gave {got}, expected a list of strings", path=path, line=line)
    return [tidied for tidied in map(tidy_step, steps) if tidied]


def _refuse_wrong(response: str, truth: str | None) -> None:
    if truth is None:
        raise Unusable("no ground truth to compare with")
    # As in evaluation: an answer counts where it is marked and nowhere else.
    marked = marked_answers(response)
    if not marked:
        raise Unusable("no \\boxed{...} or '#### ...' answer")
    if not same_answer(marked[-1], truth):
        raise Unusable("wrong final answer")


def _prepare(value: Mapping[str, Any], options: StepOptions, path: object, line: int) -> dict[str, Any]:
    question = _text_field(value, options.question_field, path, line)
    response = drop_thinking(_text_field(value, options.response_field, path, line))
    if not response:
        raise Unusable(f"'{options.response_field}' holds only thinking")
    truth = _ground_truth(value, path, line)
    steps = _find_steps(response, options, path, line)
    if len(steps) < 2:
        raise Unusable(FEW_STEPS)
    if options.require_correct:
        _refuse_wrong(response, truth)
    record: dict[str, Any] = {"question": question}
    if value.get("answer") is not None:
        record["answer"] = value["answer"]
    if truth is not None:
        record["ground_truth"] = truth
    record["total_steps"] = len(steps)
    return record | chat_record(options.system_prompt, question, "\n\n".join(steps))


def prepare_records(
    values: Iterable[tuple[int, Mapping[str, Any]]],
    options: StepOptions,
    path: object = "<memory>",
    limit: int | None = None,
    bad: BadRecords | None = None,
) -> tuple[list[dict[str, Any]], StepCounts]:
    """Make training records of raw ones.

    Args:
        values: line numbers and raw records with a question, a response, and optionally ``answer`` and
            ``ground_truth`` (without it, taken from an answer that is a number or ends in ``#### 18`` or
            ``\\boxed{}``).
        options: what to read and what to keep.
        path: for error messages.
        limit: stop when there are so many records.
        bad: takes the rows that are wrong; None makes the first of them an error.

    Returns:
        The records, each with ``question``, ``total_steps``, ``messages`` and, where known, ``answer`` and
        ``ground_truth``; and the counts of kept and skipped ones.

    Raises:
        UserError: a field, or what the splitter gave, has the wrong type; only without ``bad``.
    """
    records, counts = convert_rows(
        values, lambda line, value: _prepare(value, options, path, line), limit=limit, path=path, bad=bad
    )
    return records, StepCounts(
        len(records), sum(record["total_steps"] for record in records), counts.dropped, tuple(counts.columns)
    )
