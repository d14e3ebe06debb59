"""Selective checkpointing: the same gradients, no product twice, less kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import tiny
from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.config import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.loading import LoraSettings, add_lora
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.training.flops import measure
from stepjepa.training.memory import LiveBytes

CONFIG = JepaConfig(mode="step-jepa", lbd=0.7)

# The newer name, where transformers has it already.
NAME = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)

WIDE = {"hidden_size": 66, "head_dim": 22, "intermediate_size": 190, "num_hidden_layers": 3}


def full(model: Any) -> None:
    """Checkpointing of whole blocks, by its newer name where transformers has it already."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})


WAYS: dict[str, Any] = {"none": lambda model: None, "selective": enable_selective, "full": full}


def make(architecture: str, way: str, *, lora: bool = False, tokenizer: Any = None, **shape: Any) -> Any:
    model = tiny.make_model(architecture, seed=3, **shape)
    if lora:
        torch.manual_seed(5)
        model = add_lora(model, LoraSettings(3), all_predictor_ids(tokenizer)[:2])
    enable_trees(model.get_base_model() if lora else model)
    WAYS[way](model)
    return model.train()


def loss_of(model: Any, tokenizer: Any) -> torch.Tensor:
    return jepa_loss(model, tiny.batch_of(tokenizer, CONFIG), Objective.from_config(CONFIG)).loss


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_window", "gpt_neox"])
def test_gradients_are_those_without_checkpointing(architecture: str, lora: bool, tiny_tokenizer: Any) -> None:
    found = []
    for way in ("none", "selective"):
        model = make(architecture, way, lora=lora, tokenizer=tiny_tokenizer)
        found.append(tiny.gradients(model, loss_of(model, tiny_tokenizer)))
    tiny.assert_same_gradients(found[1], found[0], 1e-6)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_no_product_is_run_twice(lora: bool, tiny_tokenizer: Any) -> None:
    flops = {}
    for way in WAYS:
        model = make("llama", way, lora=lora, tokenizer=tiny_tokenizer)
        flops[way] = measure(lambda model=model: loss_of(model, tiny_tokenizer).backward())  # type: ignore[misc]
    assert flops["none"] == flops["selective"] < flops["full"]


def test_it_keeps_less_than_no_checkpointing_and_more_than_full(tiny_tokenizer: Any) -> None:
    kept = {}
    for way in WAYS:
        model = make("llama", way, **WIDE)
        with LiveBytes(model) as live:
            loss = loss_of(model, tiny_tokenizer)
            kept[way] = live.total
            loss.backward()
    assert kept["full"] < kept["selective"] < 0.8 * kept["none"]


def test_another_checkpointing_beside_it_is_refused(tmp_path: Path) -> None:
    refuse_full(TrainingArguments(str(tmp_path), report_to="none"))
    with pytest.raises(ValueError, match="selective_checkpointing and gradient_checkpointing exclude each other"):
        refuse_full(TrainingArguments(str(tmp_path), report_to="none", **{NAME: True}))


def two_processes(folder: Path) -> None:
    """Under torchrun: gradients under DDP and with sharded weights, each process with records of its own."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from processes import tokenizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = tokenizer()
    for kind in KINDS:
        for way in ("none", "selective"):
            model = make("llama", way)
            if kind == "fsdp":
                for layer in model.model.layers:
                    fully_shard(layer)
                fully_shard(model)
            else:
                model = DistributedDataParallel(model)
            batch = tiny.batch_of(made, CONFIG, tiny.records()[dist.get_rank() :: 2])
            objective = Objective.from_config(CONFIG)
            counts = objective.counts([batch])
            summed = torch.tensor(list(counts.values()), dtype=torch.float64)
            dist.all_reduce(summed)
            jepa_loss(model, batch, objective, dict(zip(counts, summed.tolist(), strict=True))).loss.backward()
            gradients = [p.grad.full_tensor() if kind == "fsdp" else p.grad for p in model.parameters()]
            if dist.get_rank() == 0:
                torch.save(gradients, folder / f"{kind}-{way}.pt")
    dist.barrier()
    dist.destroy_process_group()


KINDS = ("ddp", "fsdp")


def test_gradients_under_ddp_and_fsdp(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, __file__, str(tmp_path)]
    # What the tests share lies one folder up.
    shared = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=shared)
    assert done.returncode == 0, done.stderr[-5000:]
    found = {path.stem: torch.load(path) for path in tmp_path.glob("*.pt")}
    assert len(found) == 4
    for name, gradients in found.items():
        for one, other in zip(gradients, found["ddp-none"], strict=True):
            tiny.assert_same(one, other, 1e-5 if name.startswith("fsdp") else 1e-6, name)
    for plain, selective in zip(found["fsdp-none"], found["fsdp-selective"], strict=True):
        tiny.assert_same(selective, plain, 1e-6)


if __name__ == "__main__":
    two_processes(Path(sys.argv[1]))
    # All is written. In the interpreter's end threads of the groups that FSDP made now and then abort the process.
    os._exit(0)
