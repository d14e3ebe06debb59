"""``stepjepa train --dry_run``: what a run would cost, from its real data and the shapes of its model alone.

No weights are read, drawn or kept, and nothing is written. The data is prepared for real, so all its errors come to
light here, too. The formulas stand in ``memory.py`` and ``flops.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from stepjepa.batch.dataset import prepare
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.architecture import base_model
from stepjepa.models.heads import attach_heads
from stepjepa.models.loading import add_lora, load_config, load_tokenizer, new_config, new_dtype, reported
from stepjepa.models.presets import PREFIX
from stepjepa.models.quantization import parameter_counts, quantized
from stepjepa.models.setup import set_up_attention
from stepjepa.models.token_rows import adapter_ids, grow
from stepjepa.objectives.objective import Objective
from stepjepa.run_folder import is_main_process
from stepjepa.training.flops import FlopModel, Shape
from stepjepa.training.memory import Sharding, activations, kept_bytes
from stepjepa.training.plan import Plan, equal_compute, make_collator, make_sampler
from stepjepa.training.settings import (
    check_positions,
    lora_settings,
    refuse_lonely_pairs,
    refuse_sharding,
    training_arguments,
)

GIB = 2**30

# What torchrun tells a process of the others; a dry run needs their number alone.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def dry_run(
    args: argparse.Namespace,
    config: JepaConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    *,
    processes: int | None = None,
    on_gpu: bool = False,
) -> dict[str, Any] | None:
    """Print what a run would cost, from the first of its processes.

    Args:
        args: of ``commands.train``.
        config: made of them.
        records: to be trained on.
        eval_records: held out; prepared for their errors' sake.
        processes: number of them; by default torchrun's, for which ``WORLD_SIZE=8 stepjepa train ... --dry_run``
            stands in where there are no eight devices.
        on_gpu: plan for a GPU also where there is none.

    Returns:
        The same for programs: bytes, FLOPs, tokens. None from the other processes.

    Raises:
        UserError: what the run itself would raise before its first step.
    """
    if not is_main_process():
        return None
    processes = processes or int(os.environ.get("WORLD_SIZE", "1"))
    with _alone():
        given = dict(args.training)
        # Its package need not be there to read its configuration.
        deepspeed = _read_deepspeed(given.pop("deepspeed", None))
        # Without this, 16 bits would be refused on a machine that is only asked.
        given.setdefault("use_cpu", not torch.accelerator.is_available())
        training = training_arguments(argparse.Namespace(**{**vars(args), "training": given}), bool(eval_records))
        asked = "use_cpu" not in args.training and (training.bf16 or training.fp16 or processes > 1)
        device = "cpu" if training.device.type == "cpu" and not asked and not on_gpu else "cuda"
        sharding = Sharding.of(training, deepspeed, processes)
        try:
            found = _estimate(
                args, config, training, records, eval_records, device=device, processes=processes, sharding=sharding
            )
        except ValueError as error:
            raise UserError(str(error)) from None
    print("\n".join(["dry run: no weights are read or made, and nothing is written", *describe(found)]))
    return found


def _estimate(
    args: argparse.Namespace,
    config: JepaConfig,
    training: TrainingArguments,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    *,
    device: str,
    processes: int,
    sharding: Sharding,
) -> dict[str, Any]:
    """Prepare the data, set a model of shapes up as ``JepaTrainer`` does, and estimate everything, by name."""
    model, tokenizer = _empty_model(args, config, records)
    prepared = prepare(records, tokenizer, config)
    held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
    objective = Objective.from_config(config)
    refuse_lonely_pairs(config, training, compares_pairs=objective.compares_pairs)
    encoding, reason = set_up_attention(model, config)
    attach_heads(model, objective.heads(base_model(model).config.get_text_config()))
    prompt_labels = "prompt_loss" in objective.terms
    collator = make_collator(
        model, tokenizer, config, encoding, device=device, processes=processes, prompt_labels=prompt_labels
    )
    check_positions(collator, prepared, held_out)
    if sharding.name:
        refuse_sharding(config, args.eval_generate)
    fsdp = training.fsdp_config if isinstance(training.fsdp_config, dict) else {}
    again = training.gradient_checkpointing or str(fsdp.get("activation_checkpointing")).lower() == "true"
    try:
        flop_model = FlopModel.of(model, gradient_checkpointing=again, ema=config.target_grad == "ema")
    except (RuntimeError, NotImplementedError):
        flop_model = None  # experts, which need weights
    sampler = make_sampler(prepared.dataset, config, training, processes, compares_pairs=objective.compares_pairs)
    batch_size, accumulated = training.per_device_train_batch_size, training.gradient_accumulation_steps
    per_step = accumulated * processes
    plan = Plan(flop_model or FlopModel(), prepared.dataset, sampler, collator, batch_size, per_step, config.plain)

    steps = [plan.micro_batches(step) for step in plan.keys(0)]
    tokens = [sum(Shape.of(each).tokens for each in step) for step in steps]
    batches = [each for step in steps for each in step if each["members"].lengths]
    members = [each["members"] for each in batches]
    largest = max(batches, key=lambda each: Shape.of(each).tokens)
    rows, length = max((each["input_ids"].shape for each in largest.passes), key=math.prod)
    optim = str(getattr(training.optim, "value", training.optim))
    memory = kept_bytes(
        model,
        optim,
        processes=processes,
        sharding=sharding,
        quantized=quantized(args),
        ema=config.target_grad == "ema",
    )
    mixed = training.bf16 or training.fp16
    if (saved := activations(model, Shape.of(largest).tokens, mixed=mixed, checkpointing=again)) is not None:
        memory["activations"] = saved
    flops = regular = None
    if flop_model is not None:
        flops = sum(map(flop_model.of_batch, chain(*steps))) / len(steps)
        regular = plan.regular.budgets(1)[0] / len(steps)
    # The data may be a sample of a larger set.
    epoch = math.ceil((getattr(args, "records", None) or len(prepared.dataset)) / plan.records_per_step)
    run = math.ceil(training.num_train_epochs * epoch)
    if training.max_steps > 0:
        run = int(training.max_steps)
    elif args.same_flop and flop_model is not None:
        run = round(equal_compute(plan, training.num_train_epochs).steps * epoch / plan.steps_per_epoch)
    base, (trained, total) = base_model(model), parameter_counts(model)
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    words = f"{batch_size} x {accumulated} accumulated x {processes} process{'es' * (processes > 1)}"
    return {
        "model": f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {dtype}",
        "encoding": f"{encoding} ({reason})",
        "processes": processes,
        "data": {
            **prepared.counts,
            **{f"{name}_tokens": count for name, count in prepared.tokens.items()},
            "longest": int(max(prepared.dataset.lengths)),
        },
        "step": {
            "records": f"{plan.records_per_step:,} records ({words})",
            "tokens": sum(tokens) / len(tokens),
            "plain_tokens": sum(each.plain_tokens for each in members) / len(steps),
            "most_tokens": max(tokens),
            "text_share": sum(each.tokens for each in members) / sum(tokens),
        },
        "steps": run,
        "steps_per_epoch": epoch,
        "memory": {
            "parts": memory,
            "largest_batch": {"rows": rows, "length": length, **Shape.of(largest)._asdict()},
            "peak": sum(memory.values()),
        },
        "flops": {"step": flops, "regular_step": regular},
        "checkpoint": _checkpoints(training, run, epoch, kept_bytes(model, optim), hasattr(model, "peft_config")),
    }


def _checkpoints(
    args: TrainingArguments, steps: int, epoch: int, parts: dict[str, int], adapter: bool
) -> dict[str, int]:
    """Bytes of a checkpoint (trained weights and optimizer states), how many are kept, and free bytes of the disk."""
    every = args.save_steps if args.save_steps >= 1 else max(math.ceil(steps * args.save_steps), 1)
    made = {SaveStrategy.NO: 0, SaveStrategy.EPOCH: math.ceil(steps / epoch)}.get(
        SaveStrategy(args.save_strategy), steps // int(every)
    )
    folder = Path(str(args.output_dir)).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    return {
        "bytes": parts["gradients" if adapter else "weights"] + parts.get("optimizer states", 0),
        "kept": min(made, args.save_total_limit or made),
        "free": shutil.disk_usage(existing).free,
    }


def describe(found: dict[str, Any]) -> list[str]:
    """Model, data, memory and FLOPs as lines of one screen."""
    data, step, memory, checkpoint = (found[name] for name in ("data", "step", "memory", "checkpoint"))
    shape, flops = memory["largest_batch"], found["flops"]
    lines = [
        f"model      {found['model']}",
        f"encoding   {found['encoding']}",
        f"data       {data['records']:,} records, {data['all_tokens']:,} tokens, {data['longest']:,} in the longest",
        f"step       {step['records']}: {step['tokens']:,.0f} tokens on average, {step['most_tokens']:,} at most",
        f"           {1 - step['text_share']:.1%} of it padding; {step['plain_tokens']:,.0f} as plain rows",
        f"run        {found['steps']:,} steps, {found['steps_per_epoch']:,} an epoch",
        f"memory     GiB of {'each process' if found['processes'] > 1 else 'the process'}",
        *(f"  {name:<18}{size / GIB:>9.3f}" for name, size in memory["parts"].items()),
        f"  {'sum':<18}{memory['peak'] / GIB:>9.3f}",
        f"  the largest micro-batch has {shape['rows']} rows of {shape['length']} tokens and {shape['labels']} labels",
    ]
    lines += [
        f"  without {part}: not known" for part in ("activations", "optimizer states") if part not in memory["parts"]
    ]
    if flops["step"] is None:
        lines.append("compute    not known: this model can't be run on shapes alone")
    else:
        lines.append(
            f"compute    {flops['step']:.4g} FLOPs a step, {flops['step'] * found['steps']:.4g} in all; "
            f"{flops['step'] / flops['regular_step']:.3f} of regular training on the same records"
        )
    short = "  NOT ENOUGH" if checkpoint["bytes"] * checkpoint["kept"] > checkpoint["free"] else ""
    lines.append(
        f"disk       {checkpoint['kept']} checkpoints of {checkpoint['bytes'] / GIB:.3f} GiB; "
        f"{checkpoint['free'] / GIB:.1f} GiB free{short}"
    )
    return lines


def _empty_model(args: argparse.Namespace, config: JepaConfig, records: Sequence[Record]) -> tuple[Any, Any]:
    """What ``load_model`` and ``add_lora`` give, on the meta device, with its real tokenizer."""
    name, trust, template = args.model_name, args.trust_remote_code, args.chat_template
    if args.pretrain or name.startswith(PREFIX):
        texts = (message["content"] for record in records for message in record.messages)
        new = {"chat_template": template, "trust_remote_code": trust, "plain": config.plain}
        tokenizer, found = new_config(name, texts, args.train_tokenizer, **new)
    else:
        file = args.gguf_file
        tokenizer = load_tokenizer(name, chat_template=template, trust_remote_code=trust, gguf_file=file)
        found = load_config(name, trust_remote_code=trust, gguf_file=file)
        if config.plain:
            add_plain_tokens(tokenizer)
    if config.uses_views and config.predictors:
        add_predictor_tokens(tokenizer, config.predictors)
    lora = lora_settings(args)
    with reported(f"can't build a model from '{name}'"), torch.device("meta"):
        kind = {"dtype": new_dtype(found, args.dtype), "attn_implementation": args.attn_implementation}
        model: Any = AutoModelForCausalLM.from_config(found, trust_remote_code=trust, **kind)
        grow(model, len(tokenizer))
        if lora is not None:
            model = add_lora(model, lora, adapter_ids(tokenizer, plain=config.plain))
    return model.train(), tokenizer


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from libraries that there are other processes, so that they do not wait for them."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _read_deepspeed(value: Any) -> dict[str, Any] | None:
    """DeepSpeed's configuration: a file, or JSON itself."""
    if value is None or isinstance(value, dict):
        return value
    try:
        text = value if str(value).lstrip().startswith("{") else Path(value).read_text(encoding="utf-8")
        return dict(json.loads(text))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"--deepspeed: can't be read as a JSON object ({error})") from None
