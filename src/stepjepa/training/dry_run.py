"""``stepjepa train --dry_run``: what a run would cost, from its real data and the shapes of its model alone.

No weights are read, drawn or kept, and nothing is written. The data is prepared for real, so all its errors come to
light here, too. The formulas stand in ``compute.memory`` and ``compute.flops``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from stepjepa.batch.collate import Batch
from stepjepa.batch.dataset import prepare
from stepjepa.chat.tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.compute.equal_compute import equal_compute
from stepjepa.compute.flops import FlopModel, Shape
from stepjepa.compute.memory import Sharding, activations, kept_bytes
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.architecture import attach_heads, base_model
from stepjepa.models.loading import add_lora, load_config, load_tokenizer, new_config, new_dtype, reported
from stepjepa.models.presets import PREFIX
from stepjepa.models.setup import set_up_attention
from stepjepa.models.token_rows import adapter_ids, grow
from stepjepa.models.weights import parameter_counts, quantized
from stepjepa.objectives.objective import Objective
from stepjepa.run_folder import is_main_process
from stepjepa.training.checkpoint_space import GIB, checkpoint_bytes, checkpoint_space
from stepjepa.training.preparation import (
    check_positions,
    make_collator,
    make_plan,
    make_sampler,
    refuse_lonely_pairs,
    refuse_sharding,
)
from stepjepa.training.settings import lora_settings, training_arguments

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
        run = _Run(args, config, training, Sharding.of(training, deepspeed, processes), processes)
        try:
            run.set_up(records, eval_records, device)
        except ValueError as error:
            raise UserError(str(error)) from None
        found = run.found()
    print("\n".join(["dry run: no weights are read or made, and nothing is written", *describe(found)]))
    return found


@dataclass
class _Run:
    """A run that has everything but weights."""

    args: argparse.Namespace
    config: JepaConfig
    training: TrainingArguments
    sharding: Sharding
    processes: int

    def set_up(self, records: Sequence[Record], eval_records: Sequence[Record], device: str) -> None:
        """Prepare the data, build the model on the meta device, and set everything up as ``JepaTrainer`` does."""
        args, config, training = self.args, self.config, self.training
        self.model, tokenizer = _empty_model(args, config, records)
        self.prepared = prepare(records, tokenizer, config)
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
        self.objective = objective = Objective.from_config(config)
        refuse_lonely_pairs(objective, config, training)
        encoding, reason = set_up_attention(self.model, config)
        self.encoding = f"{encoding} ({reason})"
        attach_heads(self.model, objective.heads(base_model(self.model).config.get_text_config()))
        how: dict[str, Any] = {"encoding": encoding, "device": device, "processes": self.processes}
        collator = make_collator(self.model, tokenizer, config, objective, **how)
        check_positions(collator, [self.prepared, held_out])
        if self.sharding.name:
            refuse_sharding(config, args.eval_generate)
        self._switch_checkpointing()
        try:
            flops = FlopModel.of(self.model, ema=config.target_grad == "ema")
        except (RuntimeError, NotImplementedError):
            # Experts, which need weights.
            flops = None
        self.knows_flops = flops is not None
        sampler = make_sampler(self.prepared, config, objective, training, self.processes)
        self.plan = make_plan(
            flops or FlopModel(), self.prepared, config, sampler, collator, args=training, processes=self.processes
        )
        # The data may be a sample of a larger set.
        count = getattr(args, "records", None) or len(self.prepared.dataset)
        self.epoch = math.ceil(count / self.plan.records_per_step)

    def _switch_checkpointing(self) -> None:
        fsdp = self.training.fsdp_config if isinstance(self.training.fsdp_config, dict) else {}
        if self.training.gradient_checkpointing or str(fsdp.get("activation_checkpointing")).lower() == "true":
            base = base_model(self.model)
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def found(self) -> dict[str, Any]:
        """Everything, by name."""
        plan, prepared = self.plan, self.prepared
        steps = [plan.micro_batches(step) for step in plan.keys(0)]
        tokens = [sum(Shape.of(each).tokens for each in step) for step in steps]
        batches = [each for step in steps for each in step if each["members"].lengths]
        members = [each["members"] for each in batches]
        largest = max(batches, key=lambda each: Shape.of(each).tokens)
        rows, length = max((each["input_ids"].shape for each in largest.passes), key=math.prod)
        shape = {"rows": rows, "length": length, **Shape.of(largest)._asdict()}
        memory, steps_of_run = self._memory(largest), self._steps()
        flops = regular = None
        if self.knows_flops:
            flops = sum(map(plan.flops.of_batch, chain(*steps))) / len(steps)
            regular = plan.regular.budgets(1)[0] / len(steps)
        made = f"{plan.batch_size} x {self.training.gradient_accumulation_steps} accumulated"
        words = f"{self.processes} process{'es' * (self.processes > 1)}"
        return {
            "model": _describe_model(self.model),
            "encoding": self.encoding,
            "processes": self.processes,
            "data": {
                **prepared.counts,
                **{f"{name}_tokens": count for name, count in prepared.tokens.items()},
                "longest": int(max(prepared.dataset.lengths)),
            },
            "step": {
                "records": f"{plan.records_per_step:,} records ({made} x {words})",
                "tokens": sum(tokens) / len(tokens),
                "plain_tokens": sum(each.plain_tokens for each in members) / len(steps),
                "most_tokens": max(tokens),
                "text_share": sum(each.tokens for each in members) / sum(tokens),
            },
            "steps": steps_of_run,
            "steps_per_epoch": self.epoch,
            "memory": {
                "parts": memory,
                "largest_batch": shape,
                "peak": sum(memory.values()),
            },
            "flops": {"step": flops, "regular_step": regular},
            "checkpoint": self._checkpoints(steps_of_run),
        }

    def _memory(self, largest: Batch) -> dict[str, int]:
        """Bytes of a process by part; activations and optimizer states are missing where they are not known."""
        training = self.training
        memory = kept_bytes(
            self.model,
            str(getattr(training.optim, "value", training.optim)),
            processes=self.processes,
            sharding=self.sharding,
            quantized=quantized(self.args),
            ema=self.config.target_grad == "ema",
        )
        mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
        saved = activations(self.model, largest, self.objective, mixed)
        return memory if saved is None else memory | {"activations": saved}

    def _steps(self) -> int:
        epochs = self.training.num_train_epochs
        if self.training.max_steps > 0:
            return int(self.training.max_steps)
        if self.args.same_flop and self.knows_flops:
            return round(equal_compute(self.plan, epochs).steps * self.epoch / self.plan.steps_per_epoch)
        return math.ceil(epochs * self.epoch)

    def _checkpoints(self, steps: int) -> dict[str, int]:
        optim = str(getattr(self.training.optim, "value", self.training.optim))
        size = checkpoint_bytes(kept_bytes(self.model, optim), adapter=hasattr(self.model, "peft_config"))
        return checkpoint_space(self.training, size, steps, self.epoch)


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
    if "activations" not in memory["parts"]:
        lines.append("  without activations: this model can't be run on shapes alone")
    if "optimizer states" not in memory["parts"]:
        lines.append("  without the optimizer's states, which are not known")
    if flops["step"] is None:
        lines.append("compute    not known: this model can't be run on shapes alone")
    else:
        lines.append(
            f"compute    {flops['step']:.4g} FLOPs a step, {flops['step'] * found['steps']:.4g} in all; "
            f"{flops['step'] / flops['regular_step']:.3f} of regular training on the same records"
        )
    needed = checkpoint["bytes"] * checkpoint["kept"]
    short = "  NOT ENOUGH" if needed > checkpoint["free"] else ""
    lines.append(
        f"disk       {checkpoint['kept']} checkpoints of {checkpoint['bytes'] / GIB:.3f} GiB; "
        f"{checkpoint['free'] / GIB:.1f} GiB free{short}"
    )
    return lines


def _empty_model(args: argparse.Namespace, config: JepaConfig, records: Sequence[Record]) -> tuple[Any, Any]:
    """What ``load_model`` and ``add_lora`` give, on the meta device, with its real tokenizer."""
    from transformers import AutoModelForCausalLM

    name, trust, tokenizer = args.model_name, args.trust_remote_code, None
    if args.pretrain or name.startswith(PREFIX):
        texts = (message["content"] for record in records for message in record.messages)
        tokenizer, found = new_config(
            name,
            texts,
            args.train_tokenizer,
            chat_template=args.chat_template,
            trust_remote_code=trust,
            plain=config.plain,
        )
    else:
        file = args.gguf_file
        tokenizer = load_tokenizer(name, chat_template=args.chat_template, trust_remote_code=trust, gguf_file=file)
        found = load_config(name, trust_remote_code=trust, gguf_file=file)
        if config.plain:
            add_plain_tokens(tokenizer)
    if config.uses_views and config.predictors:
        add_predictor_tokens(tokenizer, config.predictors)
    lora = lora_settings(args)
    with reported(f"can't build a model from '{name}'"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            found,
            dtype=new_dtype(found, args.dtype),
            attn_implementation=args.attn_implementation,
            trust_remote_code=trust,
        )
        grow(model, len(tokenizer))
        if lora is not None:
            model = add_lora(model, lora, adapter_ids(tokenizer, plain=config.plain))
    return model.train(), tokenizer


def _describe_model(model: Any) -> str:
    base, (trained, total) = base_model(model), parameter_counts(model)
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    return f"{type(base).__name__}, {total:,} parameters, {trained:,} trained, {dtype}"


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
