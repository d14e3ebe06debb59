"""What one process and two must agree on: short runs of every objective, alone or under torchrun.

    torchrun --nproc_per_node 2 tests/processes.py few|ddp|fsdp FOLDER

Each process of the last kind holds a part of every weight (``fully_shard``), which the Trainer can't do on a CPU.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

import tiny
from own_term import Margin, NextLatent, objective_with
from stepjepa.batch.dataset import StepSampler
from stepjepa.batch.mask import Calls, Kernel, VarlenSegments
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import PredictorHead, attach_heads, load_heads, save_heads
from stepjepa.models.attention import enable_trees
from stepjepa.models.lm_head import LMHead
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.objective import Objective, jepa_loss
from stepjepa.objectives.pair_cache import cache_pairs, terms_of_steps
from stepjepa.objectives.term import Context, gather_rows, no_gather
from stepjepa.objectives.text import LMLoss
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.sequences import SampledRecord

RECORDS = 19
STEP = 4

OBJECTIVES: dict[str, dict[str, Any]] = {
    "regular": {"mode": "regular"},
    "regular with stp": {"mode": "regular", "stp": 0.7},
    "cosine": {"mode": "llm-jepa"},
    "cosine, half of the steps": {"mode": "llm-jepa", "jepa_ratio": 0.5, "layout": "branched"},
    "l2, all steps": {"mode": "step-jepa", "pairs": "all", "jepa_loss_type": "l2"},
    "mse, in place": {"mode": "step-jepa", "layout": "inplace", "jepa_loss_type": "mse"},
    "infonce": {"mode": "llm-jepa", "jepa_loss_type": "infonce"},
    "infonce on steps, most of the steps": {
        "mode": "step-jepa",
        "pairs": "all",
        "jepa_loss_type": "infonce",
        "jepa_ratio": 0.8,
    },
    "target without gradient": {"mode": "step-jepa", "target_grad": "stop"},
    "averaged target": {"mode": "step-jepa", "target_grad": "ema", "ema_decay": 0.5},
    "linear head": {"mode": "llm-jepa", "predictor_head": "linear"},
    "mlp head, stp": {"mode": "step-jepa", "predictor_head": "mlp", "stp": 0.3},
    "head on experts": {"mode": "llm-jepa", "predictor_head": "linear"},
    "layers before the LM head": {"mode": "llm-jepa", "prompt_loss_weight": 0.6},
    "averaged target, sigreg": {"mode": "step-jepa", "target_grad": "ema", "ema_decay": 0.5, "sigreg": 0.3},
    "sigreg": {"mode": "step-jepa", "pairs": "all", "sigreg": 0.3},
    "variance and covariance": {"mode": "step-jepa", "pairs": "all", "variance": 0.9, "covariance": 0.7},
    "mean pooling of layer 1": {"mode": "llm-jepa", "pooling": "mean", "jepa_layer": 1, "predictors": 2},
    "falling lbd": {"mode": "llm-jepa", "lbd_schedule": "cosine"},
    "prompts": {"mode": "llm-jepa", "prompt_loss_weight": 0.8},
    "plain rows": {"mode": "step-jepa", "encoding": "rows", "stp": 0.2},
    "short rows, nothing shared": {"mode": "llm-jepa", "row_length": 41, "share_prefixes": False, "last_token": -2},
    "a term with weights of its own": {"mode": "regular"},
    "router loss": {"mode": "regular", "router_loss": 0.9},
    "beside a vision tower": {"mode": "llm-jepa"},
    "a contrastive distance of one's own": {"mode": "llm-jepa"},
    "infonce, grouped by prompt": {"mode": "llm-jepa", "jepa_loss_type": "infonce"},
    "infonce, calls of segments": {"mode": "llm-jepa", "jepa_loss_type": "infonce", "layout": "branched"},
    "infonce of a step": {"mode": "llm-jepa", "jepa_loss_type": "infonce", "sigreg": 0.3, "compare_pairs_in": "step"},
    "all steps, one varlen call": {"mode": "step-jepa", "pairs": "all"},
}

# Those that 'make test' runs: of labels and pairs, of some steps alone; of all pairs in one call.
FEW = ["cosine, half of the steps", "all steps, one varlen call"]

# By what an objective runs trees, where it is not whatever is fastest.
KERNELS: dict[str, Kernel] = {"infonce, calls of segments": "calls", "all steps, one varlen call": "varlen"}


# Which model an objective is run on, where it is no Llama.
ARCHITECTURES = {"head on experts": "qwen3_moe", "router loss": "mixtral", "layers before the LM head": "bert"}
ARCHITECTURES |= {"beside a vision tower": "gemma3"}

# Losses of a micro-batch as a whole: one process runs the micro-batches of two, one after the other.
OF_MICRO_BATCHES = ["router loss"]


def model_of(name: str) -> Any:
    """The same weights on every process."""
    return tiny.make_model(ARCHITECTURES.get(name, "llama"), seed=3)


def tokenizer() -> Any:
    """The same on every process."""
    from stepjepa.chat.special_tokens import add_predictor_tokens
    from stepjepa.models.presets import train_tokenizer

    made = train_tokenizer([m["content"] for record in tiny.records() for m in record.messages], 290)
    add_predictor_tokens(made, 4)
    return made


def config_of(name: str) -> JepaConfig:
    """The objective, at weights that show."""
    settings = OBJECTIVES[name]
    return JepaConfig(gamma=1.3, **({} if settings["mode"] == "regular" else {"lbd": 0.7}), **settings)


def objective_of(name: str) -> Objective:
    """The terms; the tests' own term, or distance, where the name says so."""
    if name.startswith("a contrastive distance"):
        return Objective([LMLoss(1.3), Alignment(0.7, Margin())])
    more = [NextLatent(0.6)] if name.startswith("a term") else []
    return objective_with(config_of(name), *more, model=model_of(name) if name in OF_MICRO_BATCHES else None)


def compares_pairs_of_micro_batches(name: str) -> bool:
    """Whether the loss depends on which records share a micro-batch."""
    return objective_of(name).compares_pairs and config_of(name).compare_pairs_in == "micro-batch"


def trained(name: str, folder: Path, batch: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and lines of losses of a run of the Trainer over two epochs, ``batch`` records a process at once."""
    if name in KERNELS:
        with patch("stepjepa.objectives.packing.segment_kernel", return_value=KERNELS[name]):
            return _trained(name, folder, batch)
    return _trained(name, folder, batch)


def _trained(name: str, folder: Path, batch: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    more = batch * 2 // STEP if name in OF_MICRO_BATCHES else 1
    batch //= more
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=1 if compares_pairs_of_micro_batches(name) else 2 * more,
        num_train_epochs=2,
        learning_rate=0.05,
        optim="sgd",
        logging_steps=1,
        # Saving is done by one process while the others go on.
        save_strategy="steps" if "head" in name or "own" in name else "no",
        save_steps=3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo" if dist.is_torchelastic_launched() else None,
    )
    records = (tiny.records() * RECORDS)[:RECORDS]
    trainer = JepaTrainer(
        model_of(name),
        arguments,
        config_of(name),
        train_dataset=records,
        eval_dataset=records[:7],
        processing_class=tokenizer(),
        objective=objective_of(name),
        group_by="prompt" if "grouped" in name else None,
    )
    if name in KERNELS:
        trees = trainer.data_collator(trainer.prepared.dataset[index] for index in range(3)).trees
        assert type(trees.segments) is {"calls": Calls, "varlen": VarlenSegments}[KERNELS[name]]
    trainer.train()
    if name not in OF_MICRO_BATCHES:  # two processes cut held-out records into other batches
        trainer.evaluate()
    lines = [
        {
            key: value
            for key, value in line.items()
            if key.endswith(("loss", "matched_similarity", "_rank", "rank_pairs"))
        }
        for line in trainer.state.log_history
    ]
    return {key: value.clone() for key, value in trainer.model.state_dict().items()}, [line for line in lines if line]


def sharded(name: str, world: int, rank: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and losses of a loop of SGD over the sampler's order, on a model that is sharded where world is 2."""
    config, made, objective = config_of(name), tokenizer(), objective_of(name)
    model = model_of(name).train()
    if config.encoding != "rows":
        enable_trees(model)
    attach_heads(model, objective.heads(model.config.get_text_config(), 3))
    # Tried out where the weights are whole.
    LMHead(model)
    if world > 1:
        decoder = model.get_decoder()
        for layer in decoder.encoder.layer if name == "layers before the LM head" else decoder.layers:
            fully_shard(layer)
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    records = tiny.tokenized(made, config, (tiny.records() * RECORDS)[:RECORDS])
    encoding = "rows" if config.encoding == "rows" else "tree"
    collator = tiny.collator(
        made,
        config,
        encoding=encoding,
        row_length=config.row_length or 97,
        share_prefixes=config.share_prefixes,
        prompt_labels="prompt_loss" in objective.names,
    )
    ratio = config.jepa_ratio if config.uses_views else 1.0
    lengths = [len(record.ids) for record in records]
    tight = not objective.compares_pairs
    sampler = StepSampler(lengths, STEP, seed=3, jepa_ratio=ratio, sort_by_length=tight, multiple=STEP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    keys, lines = list(sampler), []
    parts = 2 if name in OF_MICRO_BATCHES else world
    share = STEP // parts
    for step, start in enumerate(range(0, len(keys), STEP)):
        batches = [
            collator(
                None if number < 0 else SampledRecord(records[number], with_views, (epoch, number))
                for number, with_views, epoch in keys[start + part * share : start + (part + 1) * share]
            )
            for part in range(rank, parts, world)
        ]
        counts = torch.tensor(list(objective.counts(batches).values()), dtype=torch.float64)
        if world > 1:
            dist.all_reduce(counts)
        gather = gather_rows if objective.compares_pairs else no_gather
        context = Context(step, 3, step * STEP / len(keys), gather)
        terms, cached = terms_of_steps(config, objective.terms), [None] * len(batches)
        if terms:
            cached = cache_pairs(model, batches, terms, context, layer=objective.layer, every_batch=True)
        sums = torch.zeros(len(objective.names) + 1)
        for batch, of_batch in zip(batches, cached, strict=True):
            means = dict(zip(objective.names, counts.tolist(), strict=True))
            losses = jepa_loss(model, batch, objective, means, replace(context, cached=of_batch))
            (losses.loss * world).backward()
            sums += torch.stack([part.detach() for part in (*losses.parts.values(), losses.loss)])
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(sums)
        lines.append(dict(zip((*objective.names, "loss"), sums.tolist(), strict=True)))
    state = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()
    }
    return {key: value.detach().clone() for key, value in state.items()}, lines


def load_into_shards(folder: Path) -> None:
    """Heads that were saved whole are loaded into some of which every process holds a part."""
    whole, parts = PredictorHead("mlp", 6), PredictorHead("mlp", 6)
    if dist.get_rank() == 0:
        save_heads({f"some_head.{name}": value for name, value in whole.state_dict().items()}, folder)
    dist.barrier()
    fully_shard(parts)
    load_heads(nn.ModuleDict({"some_head": parts}), folder)
    for name, value in load_file(folder / "some_head.safetensors").items():
        weight = parts.state_dict()[name]
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.full_tensor(), value), name


def main(kind: str, folder: Path) -> None:
    """Run all objectives; the first process writes what came of them."""
    torch.set_num_threads(1)
    results = {}
    if kind == "fsdp":
        dist.init_process_group("gloo")
        load_into_shards(folder)
    for number, name in enumerate(OBJECTIVES):
        if kind == ("few" if name in FEW else "ddp"):
            results[name] = trained(name, folder / kind / str(number), STEP // 2)
        elif kind == "fsdp" and config_of(name).target_grad != "ema":
            results[name] = sharded(name, dist.get_world_size(), dist.get_rank())
    if dist.get_rank() == 0:
        torch.save(copy.deepcopy(results), folder / f"{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    if sys.argv[1] == "fsdp":
        # All is written. In the interpreter's end threads of the groups that FSDP made now and then abort the process.
        os._exit(0)
