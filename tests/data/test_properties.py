"""What holds for any file and any text: an error that names the place or a sound record, and nothing lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.template import Rendered
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
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
