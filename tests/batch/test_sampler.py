"""The order of records: every one once, and the same steps however they are cut into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepjepa.batch.dataset import STRATEGIES, SampleKey, StepSampler, hashed_uniform

COUNT = 101
LENGTHS = np.random.default_rng(0).integers(5, 97, COUNT).tolist()
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def epoch(number: int = 0, **options: Any) -> list[SampleKey]:
    sampler = StepSampler(options.pop("lengths", LENGTHS), options.pop("records_per_step", 8), **options)
    sampler.set_epoch(number)
    keys = list(sampler)
    assert len(keys) == len(sampler)
    return keys


def micro_batches(keys: list[SampleKey], size: int, processes: int) -> list[list[list[SampleKey]]]:
    """What each process gets, batch by batch: whole batches are dealt out in turn."""
    batches = [keys[start : start + size] for start in range(0, len(keys), size)]
    return [batches[process::processes] for process in range(processes)]


def steps(keys: list[SampleKey], size: int, processes: int, accumulation: int) -> list[set[SampleKey]]:
    """The records of each optimizer step over all processes, empty places left out."""
    shares = micro_batches(keys, size, processes)
    assert len({len(share) for share in shares}) == 1, "a process would wait for ever"
    result = []
    for start in range(0, len(shares[0]), accumulation):
        chosen = [key for share in shares for batch in share[start : start + accumulation] for key in batch]
        assert len(chosen) == len(set(chosen)) or any(key[0] < 0 for key in chosen)
        result.append({key for key in chosen if key[0] >= 0})
    return result


@each_strategy
@pytest.mark.parametrize("count", [1, 7, 8, 9, 101])
def test_every_record_once(strategy: str, count: int) -> None:
    for number in range(3):
        keys = epoch(number, lengths=LENGTHS[:count], strategy=strategy, multiple=4)
        present = [key.record for key in keys if key.record >= 0]
        assert sorted(present) == list(range(count))
        assert len(keys) == -(-count // 4) * 4
        # Empty places stand at the very end.
        assert keys[:count] == [key for key in keys if key[0] >= 0]
        assert set(keys[count:]) <= {SampleKey(-1, False, number)}


@each_strategy
def test_steps_do_not_depend_on_how_they_are_cut(strategy: str) -> None:
    options = {"strategy": strategy, "jepa_ratio": 0.5, "seed": 3}
    for number in range(3):
        whole = steps(epoch(number, multiple=8, **options), 8, 1, 1)
        assert sum(len(step) for step in whole) == COUNT
        assert steps(epoch(number, multiple=1, **options), 1, 1, 8) == whole
        assert steps(epoch(number, multiple=8, **options), 4, 2, 1) == whole
        assert steps(epoch(number, multiple=4, **options), 2, 2, 2) == whole
        assert steps(epoch(number, multiple=2, **options), 2, 1, 4) == whole


def test_views_are_dropped_by_whole_steps() -> None:
    lengths = [7] * 8000
    for ratio in (0.0, 0.25, 0.75, 1.0):
        keys = epoch(lengths=lengths, jepa_ratio=ratio)
        drawn = []
        for start in range(0, len(keys), 8):
            (views,) = {key.with_views for key in keys[start : start + 8]}
            drawn.append(views)
        assert len(drawn) == 1000
        assert np.mean(drawn) == pytest.approx(ratio, abs=0.0 if ratio in (0.0, 1.0) else 0.05)


def test_views_of_the_first_epochs_only() -> None:
    # Steps of 8 of 35 records: the fourth one begins at .69 of an epoch, the fifth one at .91.
    options = {"lengths": [7] * 35, "jepa_epochs": 1.7}
    result = [steps(epoch(number, **options), 8, 1, 1) for number in range(3)]
    views = [[{key.with_views for key in step} for step in number] for number in result]
    assert views == [[{True}] * 5, [{True}] * 4 + [{False}], [{False}] * 5]
    # An epoch begins with its number: one epoch is the first one, and no step more.
    assert {key.with_views for key in epoch(lengths=[7] * 35, jepa_epochs=1.0)} == {True}
    assert not any(key.with_views for key in epoch(1, lengths=[7] * 35, jepa_epochs=1.0))
    dropped, remaining = (
        [key.with_views for key in epoch(lengths=[7] * 800, jepa_ratio=0.5, jepa_epochs=end)] for end in (0.5, None)
    )
    assert dropped == remaining[:400] + [False] * 400


def test_records_of_a_step_come_by_length() -> None:
    keys = [key.record for key in epoch()]
    chosen = [[LENGTHS[index] for index in keys[start : start + 8]] for start in range(0, COUNT, 8)]
    assert all(lengths == sorted(lengths) for lengths in chosen)


def test_sequential_keeps_the_files_order_of_steps() -> None:
    keys = epoch(strategy="sequential")
    for number, start in enumerate(range(0, COUNT, 8)):
        chosen = [key.record for key in keys[start : start + 8]]
        assert sorted(chosen) == list(range(8 * number, min(8 * number + 8, COUNT)))


def test_the_order_is_the_one_of_published_runs() -> None:
    """Runs can be repeated with later versions: permutation and draws are fixed."""
    keys = epoch(1, lengths=[7] * 44, records_per_step=4, seed=5, jepa_ratio=0.5, sort_by_length=False)
    assert [key.record for key in keys] == np.random.default_rng([5, 1]).permutation(44).tolist()
    views, other = ([hashed_uniform(5, number, step) < 0.5 for step in range(11)] for number in (1, 0))
    assert [key.with_views for key in keys[::4]] == views != other
    assert hashed_uniform(7, 1, 2) == 0.43626019851248604
