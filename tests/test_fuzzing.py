"""Drawn input for whatever reads a file or a flag: it is read, or refused on one line, within two seconds.

``make test`` draws 200 examples each, the same every time; ``make soak`` draws 10,000 new ones.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepjepa.cli import normalise
from stepjepa.commands import parse, train
from stepjepa.data.records import BadRecords
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError
from stepjepa.experiments.evaluated_run import read_evaluated_run
from stepjepa.pages.runs import read_runs

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


def message_of(act: Callable[[], Any]) -> str | None:
    """The error, one line within two seconds; None if there is none."""
    start = time.monotonic()
    try:
        act()
        assert time.monotonic() - start < 2
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
        told = message_of(lambda: found.extend(read_records(path, bad=bad)))
        assert told is None or str(path) in told
        assert len(found) + bad.count == len(rows)


NAMES = ("--lbd", "--lora", "--batch_size", "--columns", "--layout", "--predictors", "--seed", "--bf16", "--model_name")
VALUES = st.sampled_from(["1", "-1", "nan", "true", "separate", "1e400", "9" * 30, "", "--", "-", "=", "@x"]) | TEXT


@drawn
@given(st.lists(st.sampled_from(NAMES) | VALUES | st.tuples(st.sampled_from(NAMES), VALUES).map("=".join), max_size=6))
def test_flags_are_read_or_refused(flags: list[str]) -> None:
    given = [*flags, "--train_file", "a", "--model_name", "b", "--output_dir", "c"]
    message_of(lambda: train.check(parse("train", normalise(given))))


RUN_KEYS = ("status", "model", "jepa", "training", "data", "loaded", "results", "versions", "launches", "lora")
RUN = st.dictionaries(st.sampled_from(RUN_KEYS), JSON | st.dictionaries(st.sampled_from(RUN_KEYS), JSON), max_size=8)


@drawn
@given(RUN | JSON, st.text(max_size=60))
def test_a_run_folder_is_read_or_refused(run: Any, metrics: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
        (folder / "metrics.jsonl").write_text(metrics, encoding="utf-8", errors="replace")
        for read in (lambda: read_runs([folder]), lambda: read_evaluated_run(folder)):
            told = message_of(read)
            assert told is None or name in told
