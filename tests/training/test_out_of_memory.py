"""Out of memory: one line that names the longest record of the batch and what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from stepjepa.base.errors import UserError
from stepjepa.config.jepa import JepaConfig
from stepjepa.training.trainer import JepaTrainer

ON_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."


@pytest.mark.parametrize("error", [RuntimeError(ON_CPU), torch.OutOfMemoryError("CUDA out of ..."), MemoryError()])
def test_the_longest_record_is_named(error: BaseException, tiny_tokenizer: Any, tmp_path: Path) -> None:
    model, passes = tiny.make_model("llama"), iter((None, error))

    def fail(_module: Any, _args: Any) -> None:
        if (fault := next(passes)) is not None:
            raise fault

    arguments = tiny.arguments(tmp_path, per_device_train_batch_size=3, save_strategy="steps", save_steps=1)
    data, config = tiny.records() * 3, JepaConfig(mode="regular")
    trainer = JepaTrainer(model, arguments, config, train_dataset=data, processing_class=tiny_tokenizer)
    model.get_decoder().register_forward_pre_hook(fail)
    with pytest.raises(UserError) as caught:
        trainer.train()
    (batch,) = trainer.guard.batches
    longest, line = max(zip(batch.records.lengths, batch.records.lines, strict=True))
    record = f"the longest record of the micro-batch is memory.jsonl:{line}, with {longest} tokens"
    assert str(caught.value).startswith(f"out of memory in step 2; {record}; ")
    assert "`batch_size`" in str(caught.value) and "checkpoint-1 is complete: resume" in str(caught.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
