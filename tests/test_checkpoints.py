"""Which checkpoints are whole, and what is said of those that are not."""

import errno
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_damage import Damage, cut, drawn_damage, drop, folder_for, put
from stepjepa.checkpoints import checkpoint_fault, checkpoints, checksum_fault, write_checksums
from stepjepa.errors import UserError
from stepjepa.run_folder import open_run_folder

INDEX = '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'


def make(folder: Path) -> Path:
    """A checkpoint as the Trainer writes it, of two tensors."""
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(7)}, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.arange(11)}, folder / name)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "trainer_state.json").write_text(f'{{"global_step": {folder.name.split("-")[1]}, "log_history": [{{}}]}}')
    return folder


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut("model.safetensors", 239), "model.safetensors is damaged (239 bytes; "),
        (drop("model.safetensors"), "model.safetensors is missing"),
        (put("model.safetensors.index.json", INDEX), "names model-00002-of-00002.safetensors, which is missing"),
        (drop("rng_state.pth"), "rng_state.pth is missing"),
        (cut("optimizer.pt", 300), "optimizer.pt is damaged (300 bytes; "),
        (folder_for("optimizer.pt"), "optimizer.pt is no file"),
        (drop("trainer_state.json"), "trainer_state.json is missing"),
        (put("trainer_state.json", '{"global_step": true}'), "trainer_state.json has no global_step"),
        (put("trainer_state.json", '{"global_step": 13}'), "trainer_state.json belongs to step 13"),
        (cut("config.json", 5), "config.json is damaged (5 bytes; "),
    ],
)
def test_the_newest_whole_checkpoint_is_found_and_what_is_passed_over_is_said(
    damage: Damage, told: str, tmp_path: Path
) -> None:
    for step in (7, 13, 101):
        make(tmp_path / f"checkpoint-{step}")
    # 101 is newer than 13, which a comparison of words would not find.
    assert open_run_folder(str(tmp_path), "last") == (tmp_path, str(tmp_path / "checkpoint-101"))
    damage(tmp_path / "checkpoint-101")
    said: list[str] = []
    assert open_run_folder(str(tmp_path), "last", said.append) == (tmp_path, str(tmp_path / "checkpoint-13"))
    (line,) = said
    assert line.startswith(f"skipped checkpoint {tmp_path}/checkpoint-101 (")
    assert told in line
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        open_run_folder(str(tmp_path), str(tmp_path / "checkpoint-101"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "config.json"])
def test_a_flipped_bit_is_seen_when_a_run_is_resumed(name: str, tmp_path: Path) -> None:
    for step in (7, 13):
        write_checksums(make(tmp_path / f"checkpoint-{step}"))
    assert checksum_fault(tmp_path / "checkpoint-13") is None
    content = bytearray((tmp_path / "checkpoint-13" / name).read_bytes())
    content[-5] ^= 1
    (tmp_path / "checkpoint-13" / name).write_bytes(content)
    said: list[str] = []
    assert open_run_folder(str(tmp_path), "last", said.append)[1] == str(tmp_path / "checkpoint-7")
    assert f"{name} is" in said[0]
    with pytest.raises(UserError, match=f"{name} is"):
        open_run_folder(str(tmp_path), str(tmp_path / "checkpoint-13"))


def test_of_a_hundred_damaged_checkpoints_none_is_resumed(tmp_path: Path) -> None:
    chance = random.Random("checkpoints")
    make(tmp_path / "sound" / "checkpoint-7")
    make(tmp_path / "sound" / "checkpoint-101")
    for number in range(100):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "sound", run)
        drawn_damage(chance)(run / "checkpoint-101")
        assert open_run_folder(str(run), "last")[1] == str(run / "checkpoint-7"), number


def test_a_checkpoint_on_a_disk_that_fails_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (13, 101):
        make(tmp_path / f"checkpoint-{step}")
    opened = io.open

    def fail(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file) == str(tmp_path / "checkpoint-101" / "optimizer.pt"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", fail)
    said: list[str] = []
    assert open_run_folder(str(tmp_path), "last", said.append) == (tmp_path, str(tmp_path / "checkpoint-13"))
    assert said == [f"skipped checkpoint {tmp_path}/checkpoint-101 (can't be read (Input/output error))"]


def test_what_a_run_needs_beside_the_model(tmp_path: Path) -> None:
    make(tmp_path / "checkpoint-5")

    def fault(**run: Any) -> str:
        (tmp_path / "run.json").write_text(json.dumps(run))
        said: list[str] = []
        open_run_folder(str(tmp_path), "auto", said.append)
        return "".join(said)

    assert fault() == fault(jepa={"predictor_head": "none", "target_grad": "stop"}) == ""
    assert "(predictor_head.safetensors is missing)" in fault(jepa={"predictor_head": "mlp"})
    assert "(ema.safetensors is missing)" in fault(jepa={"target_grad": "ema"})
    (tmp_path / "checkpoint-5" / "optimizer.pt").unlink()
    assert "(optimizer.pt is missing)" in fault(training={"save_only_model": False})
    assert fault(training={"save_only_model": True}) == ""


def test_checkpoints_of_other_kinds_are_whole(tmp_path: Path) -> None:
    adapter, sharded = make(tmp_path / "checkpoint-2"), make(tmp_path / "checkpoint-3")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "rng_state.pth").rename(adapter / "rng_state_1.pth")
    (sharded / "model.safetensors").unlink()
    (sharded / "optimizer.pt").unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (sharded / name).mkdir()
    assert checkpoint_fault(adapter) is checkpoint_fault(sharded) is None
    # Only folders with a number are checkpoints.
    for name in ("checkpoint-32-backup", "checkpoint-"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]


def test_auto_begins_where_there_is_nothing_and_resumes_where_there_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert open_run_folder(str(run), "auto") == (run, None)
    run.mkdir()
    (run / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not empty"):
        open_run_folder(str(run), "auto")
    (run / "run.json").write_text("{}")
    (run / ".saving" / "checkpoint-5").mkdir(parents=True)
    (run / ".run.json.abc").touch()
    assert open_run_folder(str(run), "auto") == (run, None)
    # What a killed write had left is gone, and nothing else.
    assert sorted(path.name for path in run.iterdir()) == ["run.json", "thesis.txt"]
    make(run / "checkpoint-5")
    assert open_run_folder(str(run), "auto") == (run, str(run / "checkpoint-5"))
    shutil.rmtree(run / "checkpoint-5")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        open_run_folder(str(run), "last")
