"""Streams: every record once, the same order on any number of processes and workers, resumed by reading past."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import pytest
from torch.utils.data import IterableDataset

import tiny
from stepjepa.batch.dataset import prepare
from stepjepa.batch.sampler import draw
from stepjepa.batch.stream import (
    RecordStream,
    StreamDataset,
    StreamedBatch,
    StreamSampler,
    as_stream,
    refuse_for_stream,
    stream_loader,
)
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.training import stream_counts
from stepjepa.training.stream_counts import StreamCounts

STEPS = JepaConfig(mode="step-jepa", jepa_ratio=0.5)


def records(amount: int) -> list[Record]:
    return [tiny.make_record("S", f"q{number}", "a\n\nb", line=number + 1) for number in range(amount)]


def lines(batches: list[StreamedBatch]) -> list[int]:
    return [record.line for batch in batches for record in batch.records]


class Endless:
    """Counts what was read of it."""

    read = 0

    def __iter__(self) -> Iterator[Record]:
        for number in count(1):
            self.read = number
            yield tiny.make_record("S", "q", "a\n\nb", line=number)


# -- the order of records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("amount", "buffer"), [(1, 0), (11, 7), (12, 0), (12, 100), (24, 1)])
def test_every_record_once_an_epoch_on_any_number_of_processes(amount: int, buffer: int) -> None:
    stream = RecordStream(records(amount), buffer)
    steps = 2 * -(-amount // 12)
    whole = list(StreamSampler(stream, 12, steps, seed=3))
    assert sorted(lines(whole[: steps // 2])) == sorted(lines(whole[steps // 2 :])) == list(range(1, amount + 1))
    assert [batch.ends_epoch for batch in whole[: steps // 2]] == [False] * (steps // 2 - 1) + [True]
    for size, accumulation, world in [(2, 3, 2), (3, 1, 4), (6, 2, 1)]:
        options = {"accumulation": accumulation, "world": world, "seed": 3}
        parts = [list(StreamSampler(stream, size, steps, rank=rank, **options)) for rank in range(world)]  # type: ignore[arg-type]
        assert {len(part) for part in parts} == {steps * accumulation}
        for step in range(steps):
            own = [batch for part in parts for batch in part[step * accumulation : (step + 1) * accumulation]]
            assert sorted(lines(own)) == sorted(lines(whole[step : step + 1]))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    stream = RecordStream(records(50), 20)
    orders = [[record.line for record in stream.epoch(*place)] for place in [(0, 1), (0, 1), (1, 1), (0, 2)]]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert [record.line for record in RecordStream(records(9)).epoch(5, 1)] == list(range(1, 10))


def test_views_are_dropped_as_in_prepared_runs() -> None:
    batches = list(StreamSampler(RecordStream(records(10)), 4, 9, seed=5, jepa_ratio=0.5))
    places = [(epoch, number) for epoch in range(3) for number in range(3)]
    assert [batch.with_views for batch in batches] == [draw(5, *place) < 0.5 for place in places]
    assert [(batch.epoch, batch.first) for batch in batches] == [(epoch, 4 * number) for epoch, number in places]


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_stream_without_end_is_read_as_far_as_it_is_trained_on(buffer: int) -> None:
    source = Endless()
    assert len(lines(list(islice(StreamSampler(RecordStream(source, buffer), 3, 10), 4)))) == 12
    assert source.read <= 12 + 2 + buffer


# -- sources -----------------------------------------------------------------------------------------------------------


def test_what_is_streamed_and_what_is_prepared(trained_tokenizer: Any) -> None:
    class Torch(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(records(3))

    library = datasets.Dataset.from_list([{"messages": list(each.messages)} for each in records(3)])
    stream = RecordStream(records(1))
    assert as_stream(stream) is stream
    for source in (Torch(), library.to_iterable_dataset(), Endless()):
        found = as_stream(source)
        assert found is not None and len(list(islice(found.epoch(0, 1), 3))) == 3
    prepared = prepare(records(3), trained_tokenizer, STEPS)
    assert not any(map(as_stream, (None, records(3), library, iter(records(3)), "file.jsonl", prepared)))


def test_a_user_s_own_shuffling_is_told_the_epoch() -> None:
    rows = [{"messages": list(record.messages)} for record in records(20)]
    shuffled = datasets.Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=1, buffer_size=20)
    stream = RecordStream(shuffled)
    orders = [[record.messages[1]["content"] for record in stream.epoch(number, 0)] for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        RecordStream(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match="which ends for good"):
        RecordStream(iter(records(1)))
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        RecordStream(records(1), -1)
    with pytest.raises(UserError, match="holds no records"):
        list(StreamSampler(RecordStream([]), 1, 1))


@pytest.mark.parametrize(
    ("match", "changes", "track"),
    [
        ("max_steps", {"max_steps": -1}, False),
        ("group_by_length", {"train_sampling_strategy": "group_by_length"}, False),
        ("sequential", {"train_sampling_strategy": "sequential"}, False),
        ("track_flop", {}, True),
    ],
)
def test_wrong_settings_are_refused(match: str, changes: dict[str, Any], track: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        refuse_for_stream(tiny.arguments(tmp_path, **changes), RecordStream(records(1), 5), track)


# -- batches -----------------------------------------------------------------------------------------------------------


def collate(items: list[Any]) -> dict[str, Any]:
    return {"items": [(i.record.line, i.record.ids.tolist(), len(i.record.pairs), i.with_views, i.draw) for i in items]}


def batches(tokenizer: Any, folder: Path, workers: int = 0, **options: Any) -> Any:
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5, "seed": 3}
    args = tiny.arguments(folder, dataloader_num_workers=workers, dataloader_pin_memory=False, **changes)
    loader = stream_loader(RecordStream(records(11), 6), tokenizer, JepaConfig(**options), args, collate)
    counts = StreamCounts()
    found = [counts.meet(batch)["items"] for batch in loader]
    counts.sum_over_processes()
    return found, counts


def test_batches_and_counts_are_those_of_preparation(trained_tokenizer: Any, tmp_path: Path) -> None:
    found, counts = batches(trained_tokenizer, tmp_path, mode="step-jepa")
    assert [len(batch) for batch in found] == [2, 2, 2, 2, 2, 1, 2, 2, 2, 2]
    prepared = prepare(records(11), trained_tokenizer, JepaConfig(mode="step-jepa"))
    wanted = {item.record.line: item.record.ids.tolist() for item in map(prepared.dataset.__getitem__, range(11))}  # type: ignore[union-attr]
    assert {line: ids for batch in found[:6] for line, ids, *_ in batch} == wanted
    assert [each[-1] for batch in found for each in batch] == [(0, n) for n in range(11)] + [(1, n) for n in range(8)]
    assert counts.columns() == {"data_epoch": 1.0, "data_records": 19.0, "data_pairs": 19.0}
    dataset = StreamDataset(trained_tokenizer, JepaConfig(mode="step-jepa"))
    assert dataset.template() == prepared.template
    whole = StreamCounts()
    whole.meet({"streamed": dataset.__getitems__(StreamedBatch(tuple(records(11))))[1]})
    whole.sum_over_processes()
    told = whole.found(RecordStream([]))
    assert {name: told["counts"][name] for name in prepared.counts} == prepared.counts
    assert told["tokens"] == prepared.tokens


def test_workers_change_nothing(trained_tokenizer: Any, tmp_path: Path) -> None:
    alone, counts = batches(trained_tokenizer, tmp_path)
    workers, other = batches(trained_tokenizer, tmp_path, workers=1)
    assert workers == alone
    assert (other.totals, other.last) == (counts.totals, counts.last)
    dataset = StreamDataset(trained_tokenizer, STEPS)
    dataset.__getitems__(StreamedBatch(tuple(records(1))))
    pickle.dumps(dataset)


def test_counts_are_saved_and_loaded(tmp_path: Path) -> None:
    counts = StreamCounts()
    counts.meet({"streamed": StreamedBatch(epoch=2, ends_epoch=True, counts=Counter(records=2, pairs=1, main=9))})
    counts.sum_over_processes()
    counts.save(tmp_path)
    again = StreamCounts.load(tmp_path)
    assert (again.totals, again.epochs) == (counts.totals, 3)
    with pytest.raises(ValueError, match="made without a stream"):
        StreamCounts.load(tmp_path / "none")


def test_errors_of_one_process_are_raised_by_all(trained_tokenizer: Any, monkeypatch: Any) -> None:
    dataset = StreamDataset(trained_tokenizer, JepaConfig(mode="step-jepa", max_length=5))
    items, batch = dataset.__getitems__(StreamedBatch(tuple(records(2))))
    assert items == [] and batch.error is not None
    monkeypatch.setattr(stream_counts, "gather_object", lambda own: [*own, (Counter(), (0, 0), batch.error)])
    with pytest.raises(UserError, match=r"memory\.jsonl:1: the record has"):
        StreamCounts().sum_over_processes()
    monkeypatch.setattr(stream_counts, "gather_object", lambda own: [*own, (Counter(), (0, 77), None)])
    with pytest.raises(UserError, match="the processes read different records"):
        StreamCounts().sum_over_processes()


def test_a_checkpoint_tells_another_stream_apart(tmp_path: Path) -> None:
    steps, others = (list(StreamSampler(RecordStream(each), 2, 4)) for each in (records(9), records(9)[::-1]))
    counts = StreamCounts()
    for batch in steps[:2]:
        counts.meet({"streamed": batch})
    counts.sum_over_processes()
    counts.save(tmp_path)
    for following, check in ((steps[2], True), (others[2], True), (others[2], False)):
        again = StreamCounts.load(tmp_path, check=check)
        again.meet({"streamed": following})
        if following is others[2] and check:
            with pytest.raises(UserError, match="other records than those that were trained on before"):
                again.sum_over_processes()
        else:
            again.sum_over_processes()
