"""Records read as they are needed: the same as read at once, in an order that can be repeated, no further than said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node

from stepjepa.data.records import Record, read_records
from stepjepa.data.streams import Placed, RecordFile, RecordStream
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl

COUNT = 101


def row(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
    return {"messages": messages, "extra": number}


class Source:
    """Counts what is read of it, and remembers the epochs that it was told."""

    def __init__(self, count: int | None = COUNT) -> None:
        self.count = count
        self.read = 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        while self.count is None or number < self.count:
            self.read += 1
            yield row(number)
            number += 1


def positions(placed: Any) -> list[int]:
    return [each.position for each in placed]


def test_a_file_is_read_again_and_again_as_at_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [row(number) for number in range(7)])
    records = RecordFile(tmp_path / "data.jsonl")
    assert list(records) == list(records) == read_records(tmp_path / "data.jsonl")
    found = list(RecordStream(records).epoch(0, 0))
    assert positions(found) == list(range(7))
    assert [placed.record.line for placed in found] == list(range(1, 8))
    assert found[3].record.messages == next(islice(records, 3, None)).messages
    # Nothing that training does not read is carried along.
    assert all(not placed.record.extra for placed in found)


def test_an_error_waits_for_its_record_and_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [*(row(number) for number in range(3)), {"messages": []}, row(4)])
    found = RecordStream(RecordFile(path)).epoch(0, 0)
    assert positions(islice(found, 3)) == [0, 1, 2]
    with pytest.raises(UserError, match=r"data.jsonl:4: 'messages' must be a list with at least one user"):
        next(found)


def test_what_can_not_be_read_twice_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no plain file"):
        RecordFile(tmp_path / "pipe")
    with pytest.raises(UserError, match="no such data file"):
        RecordFile(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="read once an epoch, got a generator, which ends for good"):
        RecordStream(row(number) for number in range(3))
    with pytest.raises(ValueError, match="shuffle_buffer_size: expected 0 or more, got -1"):
        RecordStream([], shuffle_buffer_size=-1)


@pytest.mark.parametrize("size", [1, 2, 13, COUNT - 1, COUNT, 2 * COUNT])
def test_a_buffer_gives_every_record_once_and_none_too_early(size: int) -> None:
    orders = []
    for number in range(3):
        found = positions(RecordStream(Source(), size).epoch(number, 7))
        assert sorted(found) == list(range(COUNT))
        assert all(position <= place + size for place, position in enumerate(found))
        orders.append(found)
    assert (orders[0] == orders[1]) == (size == 1)
    assert (orders[0] == list(range(COUNT))) == (size == 1)


def test_a_buffer_of_all_records_makes_every_place_as_likely() -> None:
    firsts = [0] * 5
    for epoch in range(1000):
        firsts[positions(RecordStream(Source(5), 5).epoch(epoch, 1))[0]] += 1
    # 200 are expected, with a standard deviation of 13.
    assert all(140 < count < 260 for count in firsts)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        return positions(RecordStream(Source(), 17).epoch(epoch, seed))

    assert order(2, 5) == order(2, 5)
    assert order(2, 5) != order(1, 5)
    assert order(2, 5) != order(2, 6)


@pytest.mark.parametrize("size", [0, 1, 29])
def test_no_more_is_read_than_a_buffer_ahead(size: int) -> None:
    source = Source(None)
    stream = RecordStream(source, size).epoch(0, 3)
    assert source.read == 0
    for number in range(1, 200):
        next(stream)
        assert source.read == number + size


def test_the_source_is_told_the_epoch() -> None:
    source = Source(3)
    stream = RecordStream(source)
    for epoch in (0, 1, 5):
        list(stream.epoch(epoch, 0))
    assert source.epochs == [0, 1, 5]
    rows = datasets.Dataset.from_list([row(number) for number in range(40)]).to_iterable_dataset()
    shuffled = RecordStream(rows.shuffle(seed=3, buffer_size=40))
    contents = [[placed.record.answer for placed in shuffled.epoch(epoch, 0)] for epoch in (0, 0, 1)]
    assert contents[0] == contents[1] != contents[2]
    assert sorted(contents[0]) == sorted(contents[2]) == sorted(f"answer {number}" for number in range(40))


def test_a_data_set_that_is_split_already_is_refused() -> None:
    rows = datasets.Dataset.from_list([row(number) for number in range(4)]).to_iterable_dataset()
    with pytest.raises(ValueError, match="got a data set split by node; leave split_dataset_by_node out"):
        RecordStream(split_dataset_by_node(rows, rank=0, world_size=2))


def test_records_as_they_are_are_taken_too() -> None:
    record = Record(tuple(row(2)["messages"]), path="elsewhere.jsonl", line=5)
    assert list(RecordStream([record]).epoch(0, 0)) == [Placed(0, record)]
    assert RecordStream([record]).name == "<memory>"
    assert list(RecordStream([record])) == [record]
