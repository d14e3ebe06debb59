"""``train --dataset``: several data sets together, each with its share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.data.sources import mix
from stepjepa.store.record import read_run


def rows(count: int, name: str) -> list[dict[str, str]]:
    return [{"question": f"{name} {index}?", "answer": f"It is {index} of {name}."} for index in range(count)]


def test_shares_are_as_wanted_and_no_record_stands_twice() -> None:
    sizes = [11, 7, 5]
    assert mix(sizes, None, 1) == [list(range(size)) for size in sizes]
    # 2 : 3 : 1 with 7 of the second, which is used up first: 4.67, 7 and 2.33.
    taken = mix(sizes, [2, 3, 1], 1)
    assert [len(part) for part in taken] == [5, 7, 2]
    for places, size in zip(taken, sizes, strict=True):
        assert places == sorted(set(places))
        assert 0 <= places[0] <= places[-1] < size
    assert mix(sizes, [2, 3, 1], 1) == taken != mix(sizes, [2, 3, 1], 2)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, 1e-9]])
def test_weights_that_do_not_fit(weights: list[float]) -> None:
    with pytest.raises(UserError, match="dataset_weights: "):
        mix([3, 2], weights, 1)


@pytest.mark.slow
def test_training_on_a_mixture_is_repeated_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, folder, run = tmp_path / "a.json", tmp_path / "b", tmp_path / "run"
    table.write_text(json.dumps(rows(13, "apples")), encoding="utf-8")
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5, "pears")), encoding="utf-8")

    def stepjepa(*command: Any) -> int:
        return main([str(each) for each in command])

    data = ["--dataset", table, folder, "--dataset_weights", 2, 1]
    model = ["--model_name", "preset:tiny", "--use_cpu", "--batch_size", 5, "--num_epochs", 1, "--regular"]
    assert stepjepa("train", *data, *model, "--output_dir", run) == 0
    about = read_run(run)["data"]["train"]
    assert (about["file"], about["records"]) == ("a.json + b", 15)
    assert [(part["records"], part["taken"]) for part in about["datasets"]] == [(13, 10), (5, 5)]
    assert stepjepa("rerun", run) == 0
    assert "weights: equal" in capsys.readouterr().out
    table.write_text(json.dumps(rows(13, "plums")), encoding="utf-8")
    assert stepjepa("rerun", run, "--output_dir", tmp_path / "third") == 2
    assert "--dataset has changed since" in capsys.readouterr().err
