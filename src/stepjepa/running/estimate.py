"""Estimate the cost of a run from its real data and the shapes of its model (``stepjepa train --dry_run``).

No weights are read or created, and nothing is written but prepared data, to a ``cache_dir`` that is named. The data is
prepared as in training, so its errors show here, too. FLOPs are those of ``flops.py``, the memory of a process is that
of ``memory.py``.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments

from stepjepa.base.counting import counted
from stepjepa.base.errors import unexpected_as_user_errors, visible
from stepjepa.base.processes import as_single_process, is_main_process
from stepjepa.base.terminal import print_rows
from stepjepa.batch.dataset import Prepared
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.prepare import CacheDir, prepare
from stepjepa.batch.tokenize import WITHOUT_PAIR
from stepjepa.chat.special_tokens import add_predictor_tokens
from stepjepa.config.run import RunConfig
from stepjepa.data.record import Record
from stepjepa.models.architecture import base_model, hidden_size
from stepjepa.models.loading import add_lora, as_user_error, new_dtype, tokenizer_and_config
from stepjepa.models.presets import PREFIX
from stepjepa.models.token_rows import adapter_rows, resize_embedding, rows_of
from stepjepa.models.weights import autocast_dtype, parameter_counts
from stepjepa.objectives.jepa import Jepa
from stepjepa.objectives.objective import Objective
from stepjepa.running.estimate_text import describe
from stepjepa.running.estimated import CheckpointEstimate, Estimate, MemoryEstimate, PairsEstimate, StepEstimate
from stepjepa.running.held_out_scores import check_metric
from stepjepa.running.memory import Sharding, activations, averaged, converted_bytes, resident_bytes
from stepjepa.running.precision import bf16_advice, bf16_by_default, with_launched_precision
from stepjepa.running.training_arguments import training_arguments
from stepjepa.training.checks import (
    check_batch_size,
    check_held_out_batch,
    check_objective,
    check_positions,
    check_sharding,
)
from stepjepa.training.flops import FlopModel, Shape
from stepjepa.training.plan import Plan, equal_compute
from stepjepa.training.recomputation import Recomputation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def dry_run(
    run: RunConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    *,
    processes: int | None = None,
    on_gpu: bool = False,
    all_records: int | None = None,
) -> Estimate | None:
    """Print and return the estimated cost of a run; None from all processes but the first.

    Args:
        run: the configuration.
        records: the training records, or a sample of them.
        eval_records: the held-out records.
        processes: their number; by default torchrun's ``WORLD_SIZE``, or 1.
        on_gpu: estimate for a GPU also on a machine without one.
        all_records: size of the data set, where ``records`` are a sample of it.

    Raises:
        UserError: the run itself would be refused before its first step.
    """
    if not is_main_process():
        return None
    run = with_launched_precision(run)
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    with as_single_process():
        # DeepSpeed's configuration is read without its package. use_cpu, because TrainingArguments refuses 16 bits on a
        # machine without a GPU, where the run is only estimated.
        deepspeed = run.trainer.get("deepspeed")
        use_cpu = run.trainer.get("use_cpu", not torch.accelerator.is_available())
        training = training_arguments(run, bool(eval_records), deepspeed=None, use_cpu=use_cpu)
        check_metric(run, training)
        needs_gpu = "use_cpu" not in run.trainer and (training.bf16 or training.fp16 or processes > 1)
        device = "cpu" if training.device.type == "cpu" and not needs_gpu and not on_gpu else "cuda"
        if device == "cuda" and bf16_by_default(run):
            training.bf16 = True
        sharding = Sharding.of(training, deepspeed, processes)
        with unexpected_as_user_errors():
            set_up = _set_up(
                run, training, records, eval_records, device=device, processes=processes, sharding=sharding
            )
            estimated = _estimate(set_up, all_records, device)
    stored = "" if run.no_cache or run.cache_dir is None else f" but prepared data, to {visible(run.cache_dir)}"
    print(f"dry run: no weights are read or made, and nothing is written{stored}")
    print_rows(describe(estimated))
    return estimated


@dataclass(frozen=True)
class _SetUp:
    """What ``JepaTrainer`` sets up before the first step, with the model on the meta device."""

    run: RunConfig
    training: TrainingArguments
    processes: int
    sharding: Sharding | None
    model: nn.Module
    jepa: Jepa
    prepared: Prepared
    plan: Plan
    recomputed: Recomputation | None  # in the backward pass

    @property
    def flops(self) -> FlopModel:
        """The cost of a micro-batch; all of it is 0 if it is unknown."""
        return self.plan.flops


def _set_up(
    run: RunConfig,
    training: TrainingArguments,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    *,
    device: str,
    processes: int,
    sharding: Sharding | None,
) -> _SetUp:
    """Prepare the data and set up the model on the meta device, with the checks of ``JepaTrainer``."""
    config = run.jepa
    model, tokenizer = _empty_model(run, records)
    # A folder that is named is prepared for the runs to come; the user's own cache is not written to.
    cache: CacheDir = False if run.no_cache or run.cache_dir is None else run.cache_dir
    prepared, held_out = prepare(records, tokenizer, config, cache_dir=cache), None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data", cache_dir=cache)
    objective = Objective.from_config(config, model)
    check_objective(config, training, objective, trains=True, held_out=held_out is not None)
    check_batch_size(config, training, objective.compares_pairs, prepared)
    if held_out is not None:
        check_held_out_batch(config, training, objective.compares_pairs, held_out)
    if sharding:
        check_sharding(config, run.eval_generate, run.eval_retrieval or None)
    jepa = Jepa(
        model,
        tokenizer,
        config,
        objective=objective,
        device=device,
        processes=processes,
        autocast=autocast_dtype(bf16=training.bf16, fp16=training.fp16),
        rows=False,
    )
    check_positions(jepa.collator, prepared, held_out)
    try:
        flops = FlopModel.of_training(model, config, training)
    except (RuntimeError, NotImplementedError):
        flops = FlopModel()  # unknown: a mixture of experts routes by its weights
    plan = Plan.of(
        flops,
        prepared.dataset,
        jepa.collator,
        config,
        training,
        compares_pairs=objective.compares_pairs,
        processes=processes,
        group_by=run.group_by,
    )
    recomputed = Recomputation.of(training)
    if recomputed is not None and device == "cpu":
        # The host's memory is the one that is estimated.
        recomputed = recomputed._replace(offload=False)
    return _SetUp(run, training, processes, sharding, model, jepa, prepared, plan, recomputed)


def _estimate(set_up: _SetUp, all_records: int | None, device: str) -> Estimate:
    """Return the estimate of a run, from all micro-batches of its first epoch."""
    run, plan, prepared, jepa = set_up.run, set_up.plan, set_up.prepared, set_up.jepa
    steps = [plan.micro_batches(step) for step in plan.keys(0)]
    regular = [batch for step in plan.regular.keys(0) for batch in plan.regular.micro_batches(step)]
    # The records may be a sample of the data set.
    epoch = math.ceil((all_records or len(prepared.dataset)) / plan.records_per_step)
    total_steps = _number_of_steps(set_up, epoch)
    (trained, total), base = parameter_counts(set_up.model), base_model(set_up.model)
    has_flops = bool(set_up.flops.token)
    return {
        "model": f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {base.dtype}",
        "encoding": f"{jepa.encoding} ({jepa.encoding_reason})",
        "precision": bf16_advice(run, hidden_size(set_up.model), device),
        "processes": set_up.processes,
        "data": {
            **prepared.counts,
            **{f"{name}_tokens": count for name, count in prepared.tokens.items()},
            "longest": int(max(prepared.dataset.lengths)),
        },
        "step": _step(set_up, steps, sum(Shape.of(batch).tokens for batch in regular)),
        "pairs": _pairs(steps, prepared.template.get(WITHOUT_PAIR)) if run.jepa.uses_views else None,
        "steps": total_steps,
        "steps_per_epoch": epoch,
        "memory": _memory(set_up, chain(*steps)),
        "flops": {
            "step": sum(map(set_up.flops.of_batch, chain(*steps))) / len(steps) if has_flops else None,
            "regular_step": sum(map(plan.regular.flops.of_batch, regular)) / len(steps) if has_flops else None,
        },
        "checkpoint": _checkpoint(set_up, total_steps, epoch),
    }


def _number_of_steps(set_up: _SetUp, epoch: int) -> int:
    """Return the number of optimizer steps of a run with ``epoch`` steps an epoch."""
    training, plan = set_up.training, set_up.plan
    if set_up.run.same_flop and set_up.flops.token:
        return round(equal_compute(plan, training.num_train_epochs).steps * epoch / plan.steps_per_epoch)
    return int(training.max_steps) if training.max_steps > 0 else math.ceil(training.num_train_epochs * epoch)


def _step(set_up: _SetUp, steps: Sequence[Sequence[Batch]], regular_tokens: int) -> StepEstimate:
    """Return records and tokens of an optimizer step, over all processes.

    Args:
        set_up: of the run.
        steps: the micro-batches of each step of an epoch.
        regular_tokens: those of an epoch of plain training, padding included.
    """
    plan, batches = set_up.plan, [batch for step in steps for batch in step]
    tokens = [sum(Shape.of(batch).tokens for batch in step) for step in steps]
    accumulated = f"{plan.batch_size} x {set_up.training.gradient_accumulation_steps} accumulated"
    processes = counted(set_up.processes, "process")
    return {
        "records": f"{counted(plan.records_per_step, 'record')} ({accumulated} x {processes})",
        "tokens": sum(tokens) / len(tokens),
        "plain_tokens": regular_tokens / len(steps),
        "most_tokens": max(tokens),
        "text_share": sum(batch.num_tokens for batch in batches) / sum(tokens),
    }


def _pairs(steps: Sequence[Sequence[Batch]], missing: str | None) -> PairsEstimate:
    """Return the pairs of an optimizer step; ``missing`` says how many records have none, and why."""
    pairs = [sum(batch.pairs for batch in step) for step in steps]
    return {"mean": sum(pairs) / len(pairs), "least": min(pairs), "most": max(pairs), "missing": missing}


def _memory(set_up: _SetUp, batches: Iterable[Batch]) -> MemoryEstimate:
    """Return the bytes of a process, part by part and in total, and the micro-batch that needs the most."""
    run, training, model = set_up.run, set_up.training, set_up.model
    largest = max(batches, key=lambda batch: Shape.of(batch).tokens)
    rows, length = max((one_pass.input_ids.shape for one_pass in largest.passes), key=math.prod)
    parts = resident_bytes(
        model,
        _optimizer(training),
        processes=set_up.processes,
        sharding=set_up.sharding,
        quantized=run.quantized,
        ema=run.jepa.target_grad == "ema",
    )
    mixed, tokens = training.bf16 or training.fp16, Shape.of(largest).tokens
    if (saved := activations(model, tokens, mixed=mixed, recomputed=set_up.recomputed)) is not None:
        parts["activations"] = saved
        if mixed and set_up.sharding is None and run.quantized is None:
            parts["16-bit copies of weights"] = converted_bytes(model, recomputed=set_up.recomputed)
    return {
        "parts": parts,
        "largest_batch": {"rows": rows, "length": length, **Shape.of(largest)._asdict()},
        "peak": sum(parts.values()),
    }


def _checkpoint(set_up: _SetUp, total_steps: int, epoch: int) -> CheckpointEstimate:
    """Return the bytes of a checkpoint, the number of checkpoints on the disk, and its free bytes."""
    training, sizes = set_up.training, resident_bytes(set_up.model, _optimizer(set_up.training))
    folder = Path(str(training.output_dir)).absolute()
    every = training.save_steps if training.save_steps >= 1 else max(math.ceil(total_steps * training.save_steps), 1)
    saves = {"no": 0, "epoch": math.ceil(total_steps / epoch)}.get(
        str(training.save_strategy.value), math.ceil(total_steps / every)
    )
    # Trained weights and the optimizer's states; an adapter's weights are as many as their gradients.
    size = sizes["gradients" if hasattr(set_up.model, "peft_config") else "weights"]
    if not training.save_only_model:
        size += sizes.get("optimizer states", 0)
    if set_up.run.jepa.target_grad == "ema" and (not training.save_only_model or training.load_best_model_at_end):
        # Averaged weights are saved in float32.
        size += sum(4 * parameter.numel() for parameter in averaged(set_up.model))
    return {
        "bytes": size,
        "kept": min(saves, training.save_total_limit or saves),
        "free": shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free,
    }


def _optimizer(training: TrainingArguments) -> str:
    return str(getattr(training.optim, "value", training.optim))


def _empty_model(run: RunConfig, records: Sequence[Record]) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Build the model of ``load_model`` and ``add_lora`` on the meta device; return it with its real tokenizer."""
    name, config, lora = str(run.model_name), run.jepa, run.lora
    texts = (message["content"] for record in records for message in record.messages)
    tokenizer, model_config = tokenizer_and_config(
        name,
        texts,
        fit=run.pretrain or name.startswith(PREFIX),
        chat_template=run.chat_template,
        plain=config.plain,
        trust_remote_code=run.trust_remote_code,
    )
    add_predictor_tokens(tokenizer, config.used_predictors)
    with as_user_error(f"can't build a model from '{name}'"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            model_config,
            dtype=new_dtype(model_config, run.dtype),
            attn_implementation=run.attn_implementation,
            trust_remote_code=run.trust_remote_code,
        )
        resize_embedding(model, rows_of(tokenizer))
        if lora is not None:
            model = add_lora(model, lora, adapter_rows(model, tokenizer, plain=config.plain))
    return model.train(), tokenizer
