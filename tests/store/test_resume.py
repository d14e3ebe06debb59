"""A run is resumed with the settings that it was begun with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepjepa.base.errors import UserError
from stepjepa.store.record import Launch, Lora, Order, Results, RunRecord, Source, Training, write_record
from stepjepa.store.resume import FinishedError, earlier_launches

RECORD = RunRecord(
    status="interrupted",
    model="preset:tiny",
    jepa={"mode": "regular", "lbd": 0.5},
    lora=Lora(rank=7),
    loaded={"dtype": "float32"},
    data={"train": Source(file="train.jsonl", sha256="d" * 64)},
    order=Order(seed=3, records_per_micro_step=4),
    training=Training(num_train_epochs=3, max_steps=-1),
    launches=[Launch(seconds=1.0, to_step=5)],
)
OTHER = {"train": Source(file="train.jsonl", sha256="e" * 64)}


def check(folder: Path, now: RunRecord, *, checkpoint: Path | None = None, allow_changes: bool = False) -> list[Launch]:
    said: list[str] = []
    launches = earlier_launches(
        folder, None if checkpoint is None else str(checkpoint), now, allow_changes=allow_changes, say=said.append
    )
    return launches if not said else [*launches, Launch(to_step=len(said))]


def test_equal_settings_are_resumed_with_the_launches_before(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert check(tmp_path, replace(RECORD, launches=[])) == [Launch(seconds=1.0, to_step=5)]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "preset:small"}, "model"),
        ({"jepa": {"mode": "regular", "lbd": 0.25}}, "jepa, lbd"),
        ({"lora": Lora(rank=5)}, "lora, rank"),
        ({"lora": None}, "lora"),
        ({"loaded": {"dtype": "bfloat16"}}, "loaded, dtype"),
        ({"data": OTHER}, "data, train"),
        ({"order": Order(seed=5, records_per_micro_step=4)}, "order, seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_settings_are_refused_and_named(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    with pytest.raises(UserError, match=rf"begun with other settings \({named}\)"):
        check(tmp_path, replace(RECORD, **changed))
    assert len(check(tmp_path, replace(RECORD, **changed), allow_changes=True)) == 2


def test_the_checkpoint_of_another_run_is_of_the_same_settings(tmp_path: Path) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    write_record(run, RECORD)
    assert check(new, RECORD, checkpoint=run / "checkpoint-5") == []
    with pytest.raises(UserError, match=r"begun with other settings \(data, train\)"):
        check(new, replace(RECORD, data=OTHER), checkpoint=run / "checkpoint-5")


def test_a_finished_run_is_not_resumed_unless_it_is_longer_now(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD.finished(Results(steps=7)))
    with pytest.raises(FinishedError, match="the run is finished"):
        check(tmp_path, RECORD)
    assert check(tmp_path, replace(RECORD, training=Training(num_train_epochs=5, max_steps=-1)))
