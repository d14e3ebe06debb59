"""Records in a temporary file are the records that were written, in any order, and take no memory."""

from __future__ import annotations

import errno
import io
import tempfile
from pathlib import Path

import pytest

from stepjepa.base import spool
from stepjepa.base.files import write_jsonl
from stepjepa.base.spool import Spooled
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.data.sources import read_records


def made(count: int) -> list[Record]:
    values = [
        {
            "messages": [
                {"role": "user", "content": f"q{index} ÿ \ud83d\ude00"},
                {"role": "assistant", "content": "a"},
            ],
            "views": [["q", f"a{index}"]],
            "other": {"number": index, "list": [None, 0.5]},
        }
        for index in range(count)
    ]
    return [parse_record(value, "some.jsonl", line) for line, value in enumerate(values, start=1)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_it_is_the_list_that_was_written(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BLOCK", 3)
    records = made(count)
    spooled = Spooled(iter(records))
    assert len(spooled) == count
    assert list(spooled) == records == list(spooled)
    assert spooled == records
    assert spooled != [*records, *made(1)]
    assert [spooled[index] for index in reversed(range(count))] == records[::-1]
    assert [spooled[-1 - index] for index in range(count)] == records[::-1]
    assert spooled[1:-1] == records[1:-1]
    assert spooled[::-2] == records[::-2]
    with pytest.raises(IndexError):
        spooled[count]


def test_two_may_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "BLOCK", 2)
    records = made(7)
    spooled = Spooled(records)
    assert [*zip(spooled, spooled, strict=True)] == [*zip(records, records, strict=True)]


def test_an_error_of_a_record_is_that_of_reading(tmp_path: Path) -> None:
    def broken() -> object:
        yield from made(2)
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        Spooled(broken())  # type: ignore[arg-type]


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spooled = Spooled(made(3))
    assert len(spooled) == 3
    assert not [*tmp_path.iterdir()]


def test_a_file_is_read_as_by_read_records(tmp_path: Path) -> None:
    from stepjepa.data.sources import each_record

    write_jsonl(tmp_path / "a.jsonl", [{"question": f"q{index}", "answer": "a"} for index in range(5)])
    assert Spooled(each_record(tmp_path / "a.jsonl")) == read_records(tmp_path / "a.jsonl")


def test_a_full_disk_names_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: Full())
    with pytest.raises(OSError, match="No space left") as error:
        Spooled(made(1))
    assert error.value.filename == f"{tempfile.gettempdir()} (TMPDIR)"
