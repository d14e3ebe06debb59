"""What holds for any file and any text: an error that names the place or a sound record, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.template import Rendered
from stepjepa.config import JepaConfig
from stepjepa.data.records import BadRecords, parse_record
from stepjepa.data.sources import read_records
from stepjepa.errors import UserError, one_line
from stepjepa.files import read_jsonl

# The same examples every time, however slow the machine; what a test is given is never changed by it.
settings.register_profile(
    "quick",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("quick")

TEXT = st.text(st.characters(codec="utf-8"), max_size=37)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=7),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=7), inner, max_size=3),
    max_leaves=13,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["system", "user", "assistant"]) | JSON, "content": TEXT | JSON}
)
RECORD = st.fixed_dictionaries(
    {}, optional={"messages": st.lists(MESSAGE, max_size=4) | JSON, "text": TEXT | JSON, "code": TEXT | JSON}
)
PIECES = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|predictor_1|>", "<|pad|>", "<|", "|>", " ", "a", "é\n"]) | TEXT,
    max_size=5,
).map("".join)


@given(st.binary(max_size=211))
def test_any_bytes_are_rows_or_an_error_that_names_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(data)
    try:
        rows = list(read_jsonl(path))
    except UserError as error:
        assert str(error).startswith(f"{path}:")
    else:
        assert all(isinstance(row, dict) for _, row in rows)
    passed: list[UserError] = []
    try:
        rows = list(read_jsonl(path, wrong=passed.append))
    except UserError as error:
        assert " is " in str(error), "only what is no text at all is an error now"
    else:
        lines = [number for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
        assert {number for number, _ in rows} | {error.line for error in passed} <= set(lines)


@settings(max_examples=30)
@given(st.lists(RECORD, min_size=1, max_size=3))
def test_any_object_is_a_record_or_an_error_or_counted(tmp_path: Path, values: list[Any]) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    bad = BadRecords()
    try:
        found = read_records(path, bad=bad)
    except UserError as error:
        assert bad.count == len(values)
        assert one_line(error).isprintable()
        found = []
    assert len(found) + bad.count == len(values)
    for record in found:
        assert record == parse_record(values[record.line - 1], path, record.line)
    if bad.count:
        with pytest.raises(UserError, match=rf"any\.jsonl:{bad.lines[0]}: "):
            read_records(path)


@given(st.lists(st.tuples(st.sampled_from(["<|im_start|>", "user\n", "<|im_end|>\n"]), PIECES), max_size=4))
def test_no_content_becomes_a_special_token(trained_tokenizer: Any, parts: list[tuple[str, str]]) -> None:
    text, contents, written = "", [], 0
    for own, content in parts:
        text += own
        written += own != "user\n"
        contents.append((len(text), len(text) + len(content)))
        text += content
    special = [index for index, token in trained_tokenizer.added_tokens_decoder.items() if token.special]
    made = RecordTokenizer(trained_tokenizer, JepaConfig(mode="regular"))
    tokens = made.tokens(Rendered(text, tuple(contents), ()))
    assert int(np.isin(tokens.ids, special).sum()) == written
    assert trained_tokenizer.decode(tokens.ids) == text
    # The places of the tokens leave nothing out.
    assert [0, *tokens.ends][-1] == len(text)
    assert (tokens.starts[1:] <= tokens.ends[:-1]).all()
