"""Numbers of 32 and 16 bits, such as the scores of GLUE's stsb, become the decimals that their table shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from stepjepa.data.records import as_records
from stepjepa.data.sources import each_record_of_source, read_records

NUMBERS = [3.8, 0.1, 5.0, 1e-7, 16777216.0]
TEXTS = ["3.8", "0.1", "5.0", "1e-07", "16777216.0"]
TABLE = pyarrow.table({"question": [f"q{number}" for number in range(5)], "answer": pyarrow.array(NUMBERS, "float32")})


def answers(table: Any) -> list[str]:
    return [record.answer for record in as_records(table)]


def test_tables_in_memory() -> None:
    frame = TABLE.to_pandas()
    assert str(frame.dtypes["answer"]) == "float32"
    rows = [{"question": "q", "answer": number} for number in frame["answer"].to_numpy()]
    assert isinstance(rows[0]["answer"], np.float32)
    nullable = frame.astype({"answer": "Float32"})
    for table in (TABLE, frame, nullable, datasets.Dataset(TABLE), rows):
        assert answers(table) == TEXTS
    assert answers(pandas.DataFrame({"question": ["q"], "answer": [3.799999952316284]})) == ["3.799999952316284"]


def test_a_table_of_polars() -> None:
    polars = pytest.importorskip("polars")
    assert answers(polars.from_arrow(TABLE)) == TEXTS


def test_files_and_folders(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "t.parquet")
    assert [record.answer for record in read_records(tmp_path / "t.parquet")] == TEXTS
    datasets.Dataset(TABLE).save_to_disk(tmp_path / "saved")
    assert [record.answer for record in each_record_of_source(tmp_path / "saved")] == TEXTS
    halves = TABLE.set_column(1, "answer", pyarrow.array(np.array([0.1, 3.8, 5, 7, 2], np.float16)))
    parquet.write_table(halves, tmp_path / "h.parquet")
    assert [record.answer for record in read_records(tmp_path / "h.parquet")] == ["0.1", "3.8", "5.0", "7.0", "2.0"]


def test_a_gap_stays_one() -> None:
    gaps = pyarrow.table({"question": ["q", "r"], "input": pyarrow.array([None, 0.1], "float32"), "answer": ["a", "b"]})
    assert [record.extra for record in as_records(gaps)] == [{"input": None}, {"input": 0.1}]


def test_numbers_inside_objects(tmp_path: Path) -> None:
    arguments = pyarrow.struct([("share", pyarrow.float32()), ("parts", pyarrow.list_(pyarrow.float16()))])
    kind = pyarrow.struct([("name", pyarrow.string()), ("arguments", arguments)])
    cells = [[{"name": "mix", "arguments": {"share": 3.8, "parts": np.array([0.1, 2], np.float16)}}]]
    table = pyarrow.table({"question": ["q"], "answer": ["a"], "calls": pyarrow.array(cells, pyarrow.list_(kind))})
    parquet.write_table(table, tmp_path / "t.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for records in (
        as_records(table),
        as_records(datasets.Dataset(table)),
        read_records(tmp_path / "t.parquet"),
        each_record_of_source(tmp_path / "saved"),
    ):
        (record,) = records
        assert record.extra["calls"] == [{"name": "mix", "arguments": {"share": 3.8, "parts": [0.1, 2.0]}}]
