"""Drawn input for whatever reads a file or a flag: it is read, or refused on one line, within two seconds.

``make test`` draws 200 examples each, the same every time; ``make soak`` draws 10,000 new ones.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepjepa.chat.template import ChatTemplate
from stepjepa.cli import normalise
from stepjepa.commands import parse, train
from stepjepa.data.records import BadRecords, find_steps
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.experiments.evaluated_run import read_evaluated_run
from stepjepa.pages.runs import read_runs
from stepjepa.preparing.step_splitting import drop_thinking, split_response

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 200,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXT = st.text(max_size=40)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=9
)


@contextmanager
def quick() -> Iterator[None]:
    """Fails where what is inside takes more than two seconds."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 2


def messages_of(act: Callable[[], Any]) -> str | None:
    """What a user is told; None where there is no error."""
    try:
        with quick():
            act()
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


COLUMNS = ("messages", "conversations", "views", "text", "code", "tools", "question", "answer", "instruction", "input")
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | JSON,
        "content": TEXT | JSON,
        "from": st.sampled_from(["human", "gpt"]) | JSON,
        "value": TEXT | JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({"name": TEXT, "arguments": JSON}), max_size=2) | JSON,
    },
)
ROW = st.dictionaries(st.sampled_from(COLUMNS), st.lists(TURN, max_size=4) | TEXT | JSON, max_size=4)


@drawn
@given(st.lists(ROW | JSON, min_size=1, max_size=5))
def test_every_line_is_a_record_or_counted(rows: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        bad, found = BadRecords(), []
        told = messages_of(lambda: found.extend(read_records(path, bad=bad)))
        assert told is None or str(path) in told
        assert len(found) + bad.count == len(rows)


@drawn
@given(
    st.lists(st.sampled_from(["\n\n", "\n", "<think>", "</think>", "1. ", "# ", "$$", "```", "Step 2:", "x"]) | TEXT),
    st.sampled_from(["blank", "line", "Step"]),
)
def test_steps_are_parts_of_the_text(pieces: list[str], separator: str) -> None:
    text = "".join(pieces)
    with quick():
        steps = find_steps(text, separator)
        kept = drop_thinking(text)
        split = split_response(kept)
    assert [step for step in steps if not text[step.start : step.end].strip()] == []
    assert all(first.end <= second.start for first, second in pairwise(steps))
    # Nothing is made up: what the steps say stands in the text.
    letters = re.sub(r"\s", "", kept)
    assert all(re.sub(r"\s", "", line) in letters for step in split for line in step.splitlines())


JINJA = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.content }}",
    "{{ m['role'] }}",
    "{% if m.role %}",
    "{% endif %}",
)
JINJA += ("{{", "}}", "{%", "%}", "<|im_start|>", "<|im_end|>", "{{ m.content | trim }}", "{{ 1 / 0 }}", "{{ m.x.y }}")
WHOLE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE = st.lists(st.sampled_from(JINJA) | st.text(max_size=5), max_size=9).map("".join)
CHAT = st.tuples(TEXT, TEXT).map(
    lambda said: [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
)


@settings(drawn, max_examples=EXAMPLES // 10)  # each template is tried in a process of its own
@given(TEMPLATE)
def test_a_template_renders_or_is_refused(tiny_tokenizer: Any, template: str) -> None:
    tiny_tokenizer.chat_template = template
    told = messages_of(lambda: ChatTemplate(tiny_tokenizer))
    assert told is None or "chat template" in told


@drawn
@given(CHAT)
def test_any_chat_stands_whole_in_its_text(tiny_tokenizer: Any, chat: list[dict[str, str]]) -> None:
    tiny_tokenizer.chat_template = WHOLE
    rendered = ChatTemplate(tiny_tokenizer).render(chat)
    assert [rendered.text[start:end] for start, end in rendered.spans] == [message["content"] for message in chat]


NAMES = ("--lbd", "--lora", "--batch_size", "--columns", "--layout", "--predictors", "--seed", "--bf16", "--model_name")
VALUES = st.sampled_from(["1", "-1", "nan", "true", "separate", "1e400", "9" * 30, "", "--", "-", "=", "@x"]) | TEXT


@drawn
@given(st.lists(st.sampled_from(NAMES) | VALUES | st.tuples(st.sampled_from(NAMES), VALUES).map("=".join), max_size=6))
def test_flags_are_read_or_refused(flags: list[str]) -> None:
    given = [*flags, "--train_file", "a", "--model_name", "b", "--output_dir", "c"]
    messages_of(lambda: train.check(parse("train", normalise(given))))


RUN_KEYS = (
    "status",
    "model",
    "jepa",
    "training",
    "data",
    "loaded",
    "results",
    "versions",
    "launches",
    "command",
    "lora",
)
RUN = st.dictionaries(st.sampled_from(RUN_KEYS), JSON | st.dictionaries(st.sampled_from(RUN_KEYS), JSON), max_size=8)


@drawn
@given(RUN | JSON, st.text(max_size=60))
def test_a_run_folder_is_read_or_refused(run: Any, metrics: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
        (folder / "metrics.jsonl").write_text(metrics, encoding="utf-8", errors="replace")
        for read in (lambda: read_runs([folder]), lambda: read_evaluated_run(folder)):
            told = messages_of(read)
            assert told is None or name in told
