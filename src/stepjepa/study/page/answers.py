"""The section of generated answers, which ``templates/answers.js`` shows one by one."""

import re
from collections.abc import Iterable, Sequence

from stepjepa.base.common_beginning import common_length
from stepjepa.base.files import read_jsonl
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import visible_lines
from stepjepa.evaluation.summary_text import score_words
from stepjepa.study.page.logged_run import LoggedRun
from stepjepa.study.page.markup import json_block
from stepjepa.study.page.parts import Part, Section

LONGEST = 4000
"""Maximum number of characters shown of an answer."""


def answers_section(runs: Sequence[LoggedRun]) -> Section:
    """Make the section of the answers of all evaluations; raise ``UserError`` if a file of answers can't be read."""
    evaluations = list(filter(None, [_answers(run, name) for run in runs for name in run.evaluations]))
    data = json_block("answers-data", evaluations)
    return Section("answers", "Generated answers", [Part(answers=data)] if evaluations else [])


def _answers(run: LoggedRun, evaluation: str) -> JsonObject:
    """Return one evaluation for ``answers.js``, which documents the fields; empty if nothing was generated."""
    file, summary = run.folder / f"{evaluation}.jsonl", run.evaluations[evaluation]
    lines = [line for _, line in read_jsonl(file) if isinstance(line.get("generated"), str)] if file.is_file() else []
    if not lines:
        return {}
    headline = summary["headline"]
    prompts = [shown_text(line.get("prompt")) for line in lines]
    begin, end = _common_ends(prompts)
    names = list(dict.fromkeys(name for line in lines for name in line["scores"]))
    answers = [
        [
            line["index"],
            prompt[len(begin) : len(prompt) - len(end)],
            shown_text(line.get("truth")),
            shown_text(line["generated"]),
            # The mean over samples.
            line["scores"][headline] > 0.5,
            None if line.get("stopped") is None else line["stopped"] == 1,
            shown_text(line.get("error")),
            [round(float(line["scores"][name]), 4) for name in names],
        ]
        for line, prompt in zip(lines, prompts, strict=True)
    ]
    return {
        "run": visible_lines(run.name),
        "name": visible_lines(evaluation),
        "test": summary.get("test_fingerprint"),
        "headline": shown_text(score_words(headline)),
        "scores": [visible_lines(name) for name in names],
        "samples": max(len(line.get("samples") or ()) for line in lines),
        "begin": begin,
        "end": end,
        "answers": answers,
    }


def _common_ends(prompts: Sequence[str]) -> tuple[str, str]:
    """Return the common beginning of all prompts (the system prompt, up to a line end), and their common end.

    The end starts at a line end or at a bracket, as a template's markers do: letters that questions happen to share
    stay in them.
    """
    if len(prompts) < 2:
        return "", ""
    begin = _common_beginning(prompts)
    begin = begin[: begin.rfind("\n") + 1]
    reversed_rests = [prompt[len(begin) :][::-1] for prompt in prompts]
    end = _common_beginning(reversed_rests)[::-1]
    marker = re.search(r"[\n<\[]", end)
    return begin, "" if marker is None else end[marker.start() :]


def _common_beginning(texts: Sequence[str]) -> str:
    """Return the longest text with which all texts begin."""
    # All texts sort between these two, so the common beginning of the two is that of all.
    first, last = min(texts), max(texts)
    return first[: common_length(first, last)]


def shown_text(value: object) -> str:
    """Return a field as the page shows it: one line per right answer, control characters escaped, cut to fit."""
    if isinstance(value, Iterable) and not isinstance(value, str | dict):
        return "\n".join(map(shown_text, value))
    text = "" if value is None else str(value)
    more = len(text) - LONGEST
    return visible_lines(text) if more <= 0 else f"{visible_lines(text[:LONGEST])}\n[... {more:,} more characters]"
