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

from stepjepa.batch.prepare import prepare
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.architecture import attach_heads, base_model
from stepjepa.models.loading import add_lora, load_config, load_tokenizer, new_config, new_dtype, reported
from stepjepa.models.presets import PREFIX
from stepjepa.models.setup import make_collator, set_up_attention
from stepjepa.models.token_rows import adapter_ids, grow
from stepjepa.models.weights import parameter_counts, quantized
from stepjepa.objectives.objective import Objective
from stepjepa.run_folder import is_main_process
from stepjepa.terminal import print_rows
from stepjepa.training.flops import FlopModel, Shape
from stepjepa.training.memory import Sharding, activations, kept_bytes
from stepjepa.training.plan import Plan, equal_compute
from stepjepa.training.settings import (
    check_positions,
    lora_settings,
    refuse_data,
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
    """Print what a run of ``commands.train`` would cost, from the first of its processes.

    Args:
        args: the flags.
        config: made of them.
        records: to be trained on.
        eval_records: held out; prepared for their errors' sake.
        processes: number of them; by default torchrun's, or ``WORLD_SIZE`` where there are no such devices.
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
        how: dict[str, Any] = {"device": device, "processes": processes}
        how["sharding"] = Sharding.of(training, deepspeed, processes)
        try:
            found = _estimate(args, config, training, records, eval_records, **how)
        except ValueError as error:
            raise UserError(str(error)) from None
    print("dry run: no weights are read or made, and nothing is written")
    print_rows(describe(found))
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
    refuse_data(config, training, objective.compares_pairs)
    if sharding.name:
        refuse_sharding(config, args.eval_generate)
    encoding, reason = set_up_attention(model, config)
    attach_heads(model, objective.heads(base_model(model).config.get_text_config()))
    how: dict[str, Any] = {"encoding": encoding, "device": device, "processes": processes}
    collator = make_collator(model, tokenizer, config, objective, **how)
    check_positions(collator, prepared, held_out)
    fsdp = training.fsdp_config if isinstance(training.fsdp_config, dict) else {}
    again = training.gradient_checkpointing or str(fsdp.get("activation_checkpointing")).lower() == "true"
    ema = config.target_grad == "ema"
    try:
        flops = FlopModel.of(model, gradient_checkpointing=again, ema=ema)
    except (RuntimeError, NotImplementedError):
        flops = FlopModel()  # experts, which need weights
    of_run: dict[str, Any] = {"compares_pairs": objective.compares_pairs, "processes": processes}
    plan = Plan.of(flops, prepared.dataset, collator, config, training, **of_run)

    steps = [plan.micro_batches(step) for step in plan.keys(0)]
    tokens = [sum(Shape.of(each).tokens for each in step) for step in steps]
    batches = [each for step in steps for each in step if each["members"].lengths]
    members = [each["members"] for each in batches]
    largest = max(batches, key=lambda each: Shape.of(each).tokens)
    rows, length = max((each["input_ids"].shape for each in largest.passes), key=math.prod)
    optim = str(getattr(training.optim, "value", training.optim))
    parts = kept_bytes(model, optim, processes=processes, sharding=sharding, quantized=quantized(args), ema=ema)
    mixed = training.bf16 or training.fp16
    if (saved := activations(model, Shape.of(largest).tokens, mixed=mixed, checkpointing=again)) is not None:
        parts["activations"] = saved
    # The data may be a sample of a larger set.
    epoch = math.ceil((getattr(args, "records", None) or len(prepared.dataset)) / plan.records_per_step)
    run = int(training.max_steps) if training.max_steps > 0 else math.ceil(training.num_train_epochs * epoch)
    if args.same_flop and flops.token:
        run = round(equal_compute(plan, training.num_train_epochs).steps * epoch / plan.steps_per_epoch)
    whole, adapter = kept_bytes(model, optim), hasattr(model, "peft_config")
    folder = Path(str(training.output_dir)).absolute()
    every = training.save_steps if training.save_steps >= 1 else max(math.ceil(run * training.save_steps), 1)
    saves = {"no": 0, "epoch": math.ceil(run / epoch)}.get(str(training.save_strategy.value), run // int(every))
    base, (trained, total) = base_model(model), parameter_counts(model)
    accumulated = f"{plan.batch_size} x {training.gradient_accumulation_steps} accumulated"
    return {
        "model": f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {base.dtype}",
        "encoding": f"{encoding} ({reason})",
        "processes": processes,
        "data": {
            **prepared.counts,
            **{f"{name}_tokens": count for name, count in prepared.tokens.items()},
            "longest": int(max(prepared.dataset.lengths)),
        },
        "step": {
            "records": f"{plan.records_per_step:,} records ({accumulated} x {processes} processes)",
            "tokens": sum(tokens) / len(tokens),
            "plain_tokens": sum(each.plain_tokens for each in members) / len(steps),
            "most_tokens": max(tokens),
            "text_share": sum(each.tokens for each in members) / sum(tokens),
        },
        "steps": run,
        "steps_per_epoch": epoch,
        "memory": {
            "parts": parts,
            "largest_batch": {"rows": rows, "length": length, **Shape.of(largest)._asdict()},
            "peak": sum(parts.values()),
        },
        "flops": {
            "step": sum(map(flops.of_batch, chain(*steps))) / len(steps) if flops.token else None,
            "regular_step": plan.regular.budgets(1)[0] / len(steps) if flops.token else None,
        },
        # What is trained of the weights, and the optimizer's states.
        "checkpoint": {
            "bytes": whole["gradients" if adapter else "weights"] + whole.get("optimizer states", 0),
            "kept": min(saves, training.save_total_limit or saves),
            "free": shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free,
        },
    }


def describe(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for people."""

    def words(part: dict[str, Any]) -> str:
        told = {key: "not known" if each is None else each for key, each in part.items()}
        shown = {key: each if isinstance(each, str) else f"{each:,.6g}" for key, each in told.items()}
        return ", ".join(f"{key.replace('_', ' ')} {each}" for key, each in shown.items())

    memory, checkpoint = found["memory"], found["checkpoint"]
    parts = {"activations": None, "optimizer states": None, **memory["parts"], "sum": memory["peak"]}
    short = "; NOT ENOUGH" if checkpoint["bytes"] * checkpoint["kept"] > checkpoint["free"] else ""
    return [
        *((name, found[name]) for name in ("model", "encoding")),
        *((name, words(found[name])) for name in ("data", "step")),
        ("run", f"{found['steps']:,} steps, {found['steps_per_epoch']:,} an epoch"),
        ("GiB of a process", words({name: size and size / GIB for name, size in parts.items()})),
        ("largest batch", words(memory["largest_batch"])),
        ("FLOPs", words(found["flops"])),
        ("checkpoints", words(checkpoint) + short),
    ]


def _empty_model(args: argparse.Namespace, config: JepaConfig, records: Sequence[Record]) -> tuple[Any, Any]:
    """What ``load_model`` and ``add_lora`` give, on the meta device, with its real tokenizer."""
    name, trust, template = args.model_name, args.trust_remote_code, args.chat_template
    if args.pretrain or name.startswith(PREFIX):
        texts = (message["content"] for record in records for message in record.messages)
        new = {"chat_template": template, "trust_remote_code": trust, "plain": config.plain}
        tokenizer, found = new_config(name, texts, **new)
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
