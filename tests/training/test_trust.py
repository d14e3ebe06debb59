"""Checkpoints of others are data, and checkpoints of one's own hold no token."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import tiny
from stepjepa.base.errors import UserError
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.trainer import JepaTrainer


class Touch:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def trainer(folder: Path, tokenizer: Any, **changes: Any) -> JepaTrainer:
    """A run of two steps with a checkpoint behind the first."""
    fixed = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 3}
    return JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(folder, **fixed | changes),
        JepaConfig(),
        train_dataset=tiny.records() * 3,
        processing_class=tokenizer,
    )


def test_a_token_is_in_no_file_and_is_kept_for_its_use(tiny_tokenizer: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, tiny_tokenizer, hub_token="hf_sEcReT")
    made.train()
    made.save_model(str(tmp_path / "final"))
    assert made.args.hub_token == "hf_sEcReT"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(file.name == "training_args.bin" for file in files) == 4
    assert not [file for file in files if b"sEcReT" in file.read_bytes()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "rng_state.pth"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_what_a_pickle_holds_is_never_run(name: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer(tmp_path, tiny_tokenizer, max_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran"), protocol=2))
    with pytest.raises((pickle.UnpicklingError, UserError, ValueError)):
        trainer(tmp_path, tiny_tokenizer).train(resume_from_checkpoint=str(checkpoint))
    assert not (tmp_path / "ran").exists()
