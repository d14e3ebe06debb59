"""What a step of a stream holds, and whose it is: every record once, and no more read than is trained on."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import tiny
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.data.streams import RecordStream
from stepjepa.errors import UserError
from stepjepa.forests.collate import ForestCollator
from stepjepa.forests.forest import Forest
from stepjepa.forests.grouping import GroupCollator
from stepjepa.forests.sampler import ForestDataset, Key, StepSampler
from stepjepa.forests.segments import ForestBuilder
from stepjepa.forests.shares import Met, Share, StreamCollator, StreamedForests, StreamSampler

# A record of number n has LENGTHS[n] characters, so that both samplers sort alike.
LENGTHS = np.random.default_rng(0).permutation(np.arange(5, 5 + 101)).tolist()


def record(number: int, length: int) -> Record:
    return tiny.make_record("", "q", "a" * (length - 1), line=number + 1)


def records(amount: int) -> list[Record]:
    return [record(number, LENGTHS[number]) for number in range(amount)]


def shares(source: Any, batch: int, *, buffer: int = 0, **options: Any) -> list[Share]:
    sampler = StreamSampler(RecordStream(source, buffer), batch, **{"steps": 5, **options})
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


def positions(share: Share) -> list[int]:
    return [placed.position for placed in share.records]


@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize(("batch", "accumulation", "world"), [(8, 1, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (2, 1, 4)])
def test_shares_are_those_of_the_sampler_of_prepared_records(
    batch: int, accumulation: int, world: int, tight: bool
) -> None:
    """Three epochs of 13 steps: the same micro-batches for every process, those of the short last step included."""
    prepared = StepSampler(
        LENGTHS, 8, seed=3, strategy="sequential", jepa_ratio=0.5, tight=tight, multiple=batch * world
    )
    for rank in range(world):
        found = shares(
            records(101),
            batch,
            accumulation=accumulation,
            world=world,
            rank=rank,
            steps=39,
            seed=3,
            jepa_ratio=0.5,
            tight=tight,
        )
        for epoch in range(3):
            prepared.set_epoch(epoch)
            keys = list(prepared)
            batches = [keys[at : at + batch] for at in range(0, len(keys), batch)][rank::world]
            mine = [share for share in found if share.epoch == epoch]
            assert len(mine) == 13 * accumulation
            # Where the sampler has no micro-batch any more, the stream's is empty.
            assert [positions(share) for share in mine[len(batches) :]] == [[]] * (len(mine) - len(batches))
            for share, wanted in zip(mine, batches, strict=False):
                assert positions(share) == [key.record for key in wanted if key.record >= 0]
                assert {share.with_views} >= {key.with_views for key in wanted if key.record >= 0}
            ends = [share.ends_epoch for share in mine]
            assert ends == [False] * (12 * accumulation) + [True] * accumulation


@pytest.mark.parametrize(("amount", "steps"), [(1, 3), (7, 3), (8, 3), (9, 4), (16, 5)])
def test_every_record_once_an_epoch(amount: int, steps: int) -> None:
    found = shares(records(amount), 8, buffer=5, steps=steps)
    per_epoch = -(-amount // 8)
    for epoch in range(steps // per_epoch):
        seen = [place for share in found if share.epoch == epoch for place in positions(share)]
        assert sorted(seen) == list(range(amount))
        assert [share.ends_epoch for share in found if share.epoch == epoch][:-1] == [False] * (per_epoch - 1)


def test_that_an_epoch_is_over_is_known_but_for_the_end_of_the_run() -> None:
    assert [share.ends_epoch for share in shares(records(16), 8, steps=4)] == [False, True, False, False]
    # A short step can only be a last one.
    assert [share.ends_epoch for share in shares(records(15), 8, steps=4)] == [False, True, False, True]


@pytest.mark.parametrize("buffer", [0, 1, 37])
def test_a_stream_without_end_is_read_as_far_as_it_is_trained_on(buffer: int) -> None:
    class Endless:
        read = 0

        def __iter__(self) -> Iterator[Record]:
            for number in count():
                self.read += 1
                yield record(number, 7)

    source = Endless()
    sampler = StreamSampler(RecordStream(source, buffer), 2, accumulation=2, world=3, rank=1, steps=11)
    for number, _ in enumerate(sampler):
        steps = number // 2 + 1
        # One is read ahead, to see whether the epoch goes on.
        assert steps * 12 + buffer <= source.read <= steps * 12 + buffer + 1
    assert source.read == 11 * 12 + buffer


def test_workers_are_sent_no_more_than_they_are_asked_ahead(trained_tokenizer: Any) -> None:
    class Endless:
        read = 0

        def __iter__(self) -> Iterator[Record]:
            for number in count():
                self.read += 1
                yield record(number, 7)

    source, workers, ahead = Endless(), 2, 3
    loader = DataLoader(
        StreamedForests(trained_tokenizer, JepaConfig()),
        batch_sampler=StreamSampler(RecordStream(source, 11), 5, steps=17),
        collate_fn=StreamCollator(GroupCollator(ForestCollator(0))),  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=ahead,
    )
    for number, _ in enumerate(loader, start=1):
        assert source.read <= 5 * (number + workers * ahead) + 11 + 1
    assert source.read == 5 * 17 + 11


class Text(str):
    """Text that can be watched."""


@pytest.mark.parametrize("buffer", [0, 37])
def test_no_more_records_are_held_than_a_buffer_and_a_step(buffer: int, trained_tokenizer: Any) -> None:
    alive: weakref.WeakSet[Text] = weakref.WeakSet()
    most = []

    class Endless:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in count():
                text = Text(f"{number} and so on")
                alive.add(text)
                most.append(len(alive))
                yield {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}

    sampler = StreamSampler(RecordStream(Endless(), buffer), 3, accumulation=2, steps=50)
    dataset = StreamedForests(trained_tokenizer, JepaConfig())
    collator = StreamCollator(GroupCollator(ForestCollator(0)))
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)  # type: ignore[arg-type]
    batches = len(list(loader))
    assert batches == 100
    assert len(most) == 300 + buffer
    # The buffer, the step that is run, the one that is read, and one ahead.
    assert buffer + 6 <= max(most) <= buffer + 2 * 6 + 2


def test_skipping_makes_no_forests(trained_tokenizer: Any) -> None:
    """What a resume passes over is read and nothing else: the sampler alone is asked for it."""
    whole = shares(records(40), 2, accumulation=2, steps=20, buffer=9)
    again = list(islice(StreamSampler(RecordStream(records(40), 9), 2, accumulation=2, steps=20), 26, None))
    assert whole[26:] == again
    assert whole[26].digest_before == whole[25].digest != whole[26].digest
    assert whole[24].digest == whole[25].digest


def test_the_digest_tells_records_and_orders_apart() -> None:
    usual = shares(records(40), 8)[-1].digest
    assert shares(records(40), 4, accumulation=2)[-1].digest == usual
    assert shares(records(40), 4, world=2, rank=1)[-1].digest == usual
    assert shares(records(40), 8, buffer=3)[-1].digest != usual
    assert shares(records(39), 8)[-1].digest != usual
    changed = records(40)
    changed[17] = record(17, 99)
    assert shares(changed, 8)[-1].digest != usual


def test_a_source_that_ends_for_good_is_found_out() -> None:
    class Once:
        def __init__(self) -> None:
            self.values = iter(records(9))

        def __iter__(self) -> Iterator[Record]:
            return self.values

    with pytest.raises(UserError, match="the records ended after 1 epoch, and reading them again gave none"):
        shares(Once(), 8)
    with pytest.raises(UserError, match="<memory>: holds no records"):
        shares([], 8)


def made(dataset: StreamedForests, chosen: list[Record], **options: Any) -> tuple[list[Forest], Met]:
    (share,) = shares(chosen, len(chosen), steps=1, tight=False)
    return dataset.__getitems__(replace(share, **options))


@pytest.mark.parametrize("mode", ["regular", "llm-jepa", "step-jepa"])
def test_forests_and_counts_are_those_of_preparation(mode: Any, trained_tokenizer: Any) -> None:
    config = JepaConfig(mode=mode)
    builder = ForestBuilder(trained_tokenizer, config)
    wanted = builder.build(tiny.records())
    dataset = StreamedForests(trained_tokenizer, config)
    for _ in range(2):
        forests, met = made(dataset, tiny.records())
        for forest, same in zip(forests, wanted, strict=True):
            tiny.assert_same_forest(forest, same)
            assert forest.triple is None
        tokens = {"all": sum(map(len, wanted)), "main": sum(forest.text_length for forest in wanted)}
        assert met.counts == {**builder.counts, **tokens}
        assert met.error is None
        assert not met.share.records
    dropped, met = made(dataset, tiny.records(), with_views=False)
    for forest, same in zip(dropped, wanted, strict=True):
        tiny.assert_same_forest(forest, same.without_views())
    assert met.counts["pairs"] == builder.counts["pairs"]
    assert dataset.template() == builder.template.describe()


def test_triples_are_those_of_prepared_records(trained_tokenizer: Any) -> None:
    config = JepaConfig(mode="step-jepa", stp=0.1)
    dataset = StreamedForests(trained_tokenizer, config, triple_seed=5)
    forests, _ = made(dataset, tiny.records(), epoch=2)
    prepared = ForestDataset(ForestBuilder(trained_tokenizer, config).build(tiny.records()), triple_seed=5)
    assert [forest.triple for forest in forests] == [prepared[Key(n, True, 2)].triple for n in range(3)]  # type: ignore[union-attr]
    # A record keeps its place in the file when another is skipped.
    longest = max(tiny.records(), key=lambda each: len(each.answer))
    short = JepaConfig(mode="step-jepa", stp=0.1, over_length="skip", max_length=40)
    kept, met = made(StreamedForests(trained_tokenizer, short, triple_seed=5), tiny.records(), epoch=2)
    assert met.counts["skipped"] == 1
    assert longest.line == 1
    assert [forest.line for forest in kept] == [2, 3]
    assert [forest.triple for forest in kept] == [forest.triple for forest in forests[1:]]
    # Records from memory may all be of line 0.
    alike = [replace(each, line=0) for each in tiny.records()]
    kept, _ = made(StreamedForests(trained_tokenizer, short, triple_seed=5), alike, epoch=2)
    assert [forest.triple for forest in kept] == [forest.triple for forest in forests[1:]]


def test_a_data_set_can_be_sent_to_another_process(trained_tokenizer: Any) -> None:
    dataset = StreamedForests(copy.deepcopy(trained_tokenizer), JepaConfig())
    wanted, _ = made(dataset, tiny.records())
    sent: StreamedForests = pickle.loads(pickle.dumps(dataset))
    for forest, same in zip(made(sent, tiny.records())[0], wanted, strict=True):
        tiny.assert_same_forest(forest, same)


def test_errors_wait_for_their_turn(trained_tokenizer: Any) -> None:
    dataset = StreamedForests(trained_tokenizer, JepaConfig(mode="step-jepa", require_pairs=True))
    forests, met = made(dataset, tiny.records())
    assert not forests
    assert met.error is not None
    assert met.error.startswith("memory.jsonl:3: the record has no usable pair of views")
    dataset = StreamedForests(trained_tokenizer, JepaConfig(), positions=31)
    longest = max(
        len(forest) for forest in ForestBuilder(trained_tokenizer, JepaConfig(mode="regular")).build(tiny.records())
    )
    assert longest > 31
    _, met = made(dataset, tiny.records())
    assert met.error is not None
    assert "and the model has 31 (max_position_embeddings); set max_length to 31 or less" in met.error


def test_sorting_by_characters_saves_what_sorting_by_tokens_saves(trained_tokenizer: Any) -> None:
    generator = np.random.default_rng(1)
    words = ["one", "twelve", "3+4=7.", " and so", "\n\n", "xyz"]
    chosen = [
        tiny.make_record("", "Say.", " ".join(generator.choice(words, int(generator.integers(1, 60)))) + " end", line=n)
        for n in range(400)
    ]
    lengths = {
        placed.line: len(forest)
        for placed, forest in zip(
            chosen, ForestBuilder(trained_tokenizer, JepaConfig(mode="regular")).build(chosen), strict=True
        )
    }

    def padding(batches: list[list[int]]) -> int:
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    def streamed(tight: bool) -> int:
        found = shares(chosen, 4, accumulation=10, steps=10, tight=tight)
        return padding([[lengths[placed.record.line] for placed in share.records] for share in found])

    prepared = list(StepSampler(list(lengths.values()), 40, strategy="sequential"))
    exact = padding([[lengths[key.record] for key in prepared[at : at + 4]] for at in range(0, 400, 4)])
    assert exact <= streamed(True) < 0.5 * streamed(False)
