"""Out of memory: one line that names the batch, its longest record and what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.training.trainer import JepaTrainer

ON_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."
ERRORS = [RuntimeError(ON_CPU), torch.OutOfMemoryError("CUDA out of memory. Tried ..."), MemoryError()]


def trainer_of(tokenizer: Any, folder: Path, error: BaseException, at: int, **changes: Any) -> JepaTrainer:
    """A run whose model fails in its ``at``-th pass."""
    model = tiny.make_model("llama")
    passes = 0

    def fail(_module: Any, _args: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == at:
            raise error

    trainer = JepaTrainer(
        model,
        tiny.arguments(folder, per_device_train_batch_size=3, save_strategy="steps", save_steps=1, **changes),
        JepaConfig(mode="regular"),
        train_dataset=tiny.records() * 3,
        eval_dataset=tiny.records(),
        processing_class=tokenizer,
    )
    model.get_decoder().register_forward_pre_hook(fail)
    return trainer


@pytest.mark.parametrize("error", ERRORS)
def test_the_batch_is_named(error: BaseException, tiny_tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_tokenizer, tmp_path, error, 2)
    with pytest.raises(UserError) as caught:
        trainer.train()
    message = str(caught.value)
    (batch,) = trainer.guard.batches
    longest, line = max(zip(batch["members"].lengths, batch["members"].lines, strict=True))
    told = f"out of memory in step 2, of whose records memory.jsonl:{line} is the longest, with {longest} tokens; "
    assert message.startswith(told)
    for flag in ("--batch_size", "--gradient_checkpointing true", "--max_length"):
        assert flag in message
    assert "checkpoint-1 is complete: resume" in message
    assert "\n" not in message
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()
    assert not (tmp_path / "checkpoint-2").exists()
