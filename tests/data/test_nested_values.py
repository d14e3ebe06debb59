"""Columns of JSON, in which ``datasets`` keeps objects of different fields: nulls are the user's, files hold texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from stepjepa.data.records import as_records
from stepjepa.data.sources import each_record_of_source, read_records

if not hasattr(datasets, "Json"):
    pytest.skip("this release of datasets has no columns of JSON", allow_module_level=True)

ARGUMENTS: list[dict[str, Any]] = [{"city": None, "days": [2, None]}, {"zone": "CET"}, {"city": 3.10}]


def rows() -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}} for arguments in ARGUMENTS]
    question = {"role": "user", "content": "q"}
    return [{"messages": [question, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in calls]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A data set whose messages are JSON, since the fields of their calls differ."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    saved = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert "Json" in str(saved.features)
    return saved


def arguments(records: Iterator[Any] | list[Any]) -> list[Any]:
    return [record.messages[1]["tool_calls"][0]["function"]["arguments"] for record in records]


def test_a_null_in_json_is_the_users_own(saved: Any) -> None:
    """It was taken for one that an Arrow table has added: the model learnt a call without the argument."""
    for table in (saved, saved.to_iterable_dataset(), saved.data.table):
        assert arguments(as_records(table)) == ARGUMENTS


def test_files_with_columns_of_json_are_read(saved: Any, tmp_path: Path) -> None:
    """Each message was refused as a text: ``messages[0] is '{"role":"user",...'``."""
    saved.to_parquet(tmp_path / "a.parquet")
    saved.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for records in (read_records(tmp_path / "a.parquet"), read_records(arrow)):
        assert arguments(records) == ARGUMENTS
    assert arguments(each_record_of_source(tmp_path / "saved")) == ARGUMENTS


def test_nulls_beside_json_are_still_those_of_the_table(tmp_path: Path) -> None:
    """A field of one row's structs is null in those of the others, also around a column of JSON and within lists."""
    texts = pyarrow.array([json.dumps(value) for value in ARGUMENTS]).cast(pyarrow.json_())
    names = pyarrow.array(["f", "g", None])
    calls = pyarrow.StructArray.from_arrays([names, texts], ["name", "arguments"])
    lists = pyarrow.ListArray.from_arrays([0, 1, 3], calls)
    table = pyarrow.table({"question": ["q", "r"], "answer": ["a", "b"], "calls": lists})
    parquet.write_table(table, tmp_path / "a.parquet")
    expected = [
        [{"name": "f", "arguments": ARGUMENTS[0]}],
        [{"name": "g", "arguments": ARGUMENTS[1]}, {"arguments": ARGUMENTS[2]}],
    ]
    for records in (as_records(table), read_records(tmp_path / "a.parquet")):
        assert [record.extra["calls"] for record in records] == expected


def test_broken_json_is_named_with_its_line() -> None:
    broken = pyarrow.array(['{"role": "user", "content": "q"', "[]"]).cast(pyarrow.json_())
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1, 2], broken)})
    with pytest.raises(ValueError, match=r"<memory>:1: messages\[0\] is '{\"role\": \"user\""):
        list(itertools.islice(as_records(table), 1))
