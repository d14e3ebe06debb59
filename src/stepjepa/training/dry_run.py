"""``stepjepa train --dry_run``: what a run would cost, from its real data and the shapes of its model alone.

No weights are read, drawn or kept, and nothing is written. The data is prepared for real, so all its errors come to
light here, too. The formulas stand in ``compute.memory`` and ``compute.flops``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from stepjepa.batch.collate import Batch
from stepjepa.batch.dataset import prepare
from stepjepa.chat.plain_template import add_plain_tokens
from stepjepa.chat.predictors import add_predictor_tokens
from stepjepa.compute.equal_compute import Plan, equal_compute
from stepjepa.compute.flops import FlopModel, Shape
from stepjepa.compute.memory import Sharding, activations, kept_bytes
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.models.architecture import base_model
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.heads import attach_heads
from stepjepa.models.loading import LoraSettings, add_lora, load_tokenizer, new_config, new_dtype, reported
from stepjepa.models.presets import PREFIX
from stepjepa.models.setup import set_up_attention
from stepjepa.models.token_rows import adapter_ids, grow
from stepjepa.objectives.objective import Objective
from stepjepa.run_folder import is_main_process
from stepjepa.training.batches import make_collator, make_sampler
from stepjepa.training.checks import check_positions, refuse_contradictions, refuse_lonely_pairs, refuse_sharding

GIB = 2**30
MakeArguments = Callable[[argparse.Namespace], TrainingArguments]

# What torchrun tells a process of the others; a dry run needs their number alone.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def dry_run(
    args: argparse.Namespace,
    config: JepaConfig,
    records: Sequence[Record],
    eval_records: Sequence[Record],
    make_arguments: MakeArguments,
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
        make_arguments: makes the TrainingArguments of ``args``.
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
        training = make_arguments(argparse.Namespace(**{**vars(args), "training": given}))
        asked = "use_cpu" not in args.training and (training.bf16 or training.fp16 or processes > 1)
        device = "cpu" if training.device.type == "cpu" and not asked and not on_gpu else "cuda"
        planned = _Planned(args, config, training, Sharding.of(training, deepspeed, processes), processes, device)
        found = planned.prepare(records, eval_records).found()
    print("\n".join(["dry run: no weights are read or made, and nothing is written", *describe(found)]))
    return found


class _MicroBatch(NamedTuple):
    batch: Batch
    shape: Shape


@dataclass
class _Planned:
    """A run that has everything but weights.

    Attributes:
        args: see :func:`dry_run`.
        config: see there.
        training: made of ``args``.
        sharding: of weights, gradients and states.
        processes: see there.
        device: type of the devices that would train.
    """

    args: argparse.Namespace
    config: JepaConfig
    training: TrainingArguments
    sharding: Sharding
    processes: int
    device: str

    def prepare(self, records: Sequence[Record], eval_records: Sequence[Record]) -> _Planned:
        """Prepare the data, build the model on the meta device, and set everything up as ``JepaTrainer`` does."""
        args, config, training = self.args, self.config, self.training
        self.model, tokenizer = _empty_model(args, config, records)
        self.prepared = prepare(records, tokenizer, config)
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
        self.objective = objective = Objective.from_config(config)
        try:
            refuse_contradictions(training)
            refuse_lonely_pairs(objective, config, training)
            self.encoding, self.reason = set_up_attention(self.model, config)
            attach_heads(self.model, objective.heads(base_model(self.model).config.get_text_config()))
            how: dict[str, Any] = {"encoding": self.encoding, "device": self.device, "processes": self.processes}
            collator = make_collator(self.model, tokenizer, config, objective, **how)
            check_positions(collator, [self.prepared, held_out])
            if self.sharding.name:
                refuse_sharding(config, args.eval_generate)
            self._switch_checkpointing()
        except ValueError as error:
            raise UserError(str(error)) from None
        try:
            flops = FlopModel.of(self.model, ema=config.target_grad == "ema")
        except (RuntimeError, NotImplementedError):
            # Experts, which need weights.
            flops = None
        self.knows_flops = flops is not None
        self.plan = Plan(
            flops or FlopModel.unknown(),
            self.prepared.dataset,
            make_sampler(self.prepared, config, objective, training, self.processes),
            collator,
            training.per_device_train_batch_size,
            training.gradient_accumulation_steps * self.processes,
            trains_rows=config.plain,
        )
        return self

    def _switch_checkpointing(self) -> None:
        sharding = self.training.fsdp_config if isinstance(self.training.fsdp_config, dict) else {}
        if self.args.selective_checkpointing:
            refuse_full(self.training)
            enable_selective(self.model)
        elif self.training.gradient_checkpointing or str(sharding.get("activation_checkpointing")).lower() == "true":
            base = base_model(self.model)
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def found(self) -> dict[str, Any]:
        """Everything, by name."""
        training, plan = self.training, self.plan
        steps = self._steps(plan)
        batches = [each for step in steps for each in step if sum(each.batch["members"].lengths)]
        tokens = [sum(each.shape.cells for each in step) for step in steps]
        members = [each.batch["members"] for each in batches]
        mixed = torch.bfloat16 if training.bf16 else torch.float16 if training.fp16 else None
        largest = max(batches, key=lambda each: each.shape.cells)
        quantized = "4bit" if self.args.load_in_4bit else "8bit" if self.args.load_in_8bit else None
        optim = str(getattr(training.optim, "value", training.optim))
        memory = kept_bytes(
            self.model,
            optim,
            processes=self.processes,
            sharding=self.sharding,
            quantized=quantized,
            ema=self.config.target_grad == "ema",
        )
        saved = activations(self.model, largest.batch, self.objective, mixed)
        if saved is not None:
            memory["activations"] = saved
        epoch_steps = self._epoch_steps()
        run_steps = self._run_steps(epoch_steps)
        flops = regular = None
        if self.knows_flops:
            flops = sum(plan.flops.of_shape(each.shape) for step in steps for each in step) / len(steps)
            plain = plan.regular
            regular = sum(plain.flops.of_shape(each.shape) for step in self._steps(plain) for each in step) / len(steps)
        return {
            "model": _describe_model(self.model),
            "encoding": f"{self.encoding} ({self.reason})",
            "processes": self.processes,
            "data": {
                **self.prepared.counts,
                **{f"{name}_tokens": count for name, count in self.prepared.tokens.items()},
                "longest": int(max(self.prepared.dataset.lengths)),
            },
            "step": {
                "records": self._records_of_a_step(),
                "tokens": sum(tokens) / len(tokens),
                "plain_tokens": sum(each.plain_tokens for each in members) / len(steps),
                "most_tokens": max(tokens),
                "text_share": sum(each.tokens for each in members) / sum(tokens),
            },
            "steps": run_steps,
            "steps_per_epoch": epoch_steps,
            "memory": {"parts": memory, "largest_batch": largest.shape._asdict(), "peak": sum(memory.values())},
            "flops": {"step": flops, "regular_step": regular},
            "checkpoint": self._checkpoints(memory, run_steps, epoch_steps),
        }

    def _records_of_a_step(self) -> str:
        words = f"{self.processes} process{'es' * (self.processes > 1)}"
        accumulated = f"{self.training.gradient_accumulation_steps} accumulated"
        return f"{self.plan.records_per_step:,} records ({self.plan.batch_size} x {accumulated} x {words})"

    def _steps(self, plan: Plan) -> list[list[_MicroBatch]]:
        """The micro-batches of each step of the first epoch."""
        collated = ([plan.collate(keys) for keys in plan.micro_batches(step)] for step in plan.keys(0))
        return [[_MicroBatch(batch, Shape.of(batch)) for batch in step] for step in collated]

    def _epoch_steps(self) -> int:
        stands_for = getattr(self.args, "records", None)
        if stands_for is None:
            return self.plan.steps_per_epoch
        return math.ceil(stands_for / self.plan.records_per_step)

    def _run_steps(self, epoch_steps: int) -> int:
        if self.training.max_steps > 0:
            return int(self.training.max_steps)
        if self.args.same_flop and self.knows_flops:
            equal = equal_compute(self.plan, self.training.num_train_epochs).steps
            return round(equal * epoch_steps / self.plan.steps_per_epoch)
        return math.ceil(self.training.num_train_epochs * epoch_steps)

    def _checkpoints(self, memory: dict[str, int], steps: int, epoch_steps: int) -> dict[str, int]:
        """Bytes of a checkpoint (trained weights and optimizer states), how many are kept, and the free disk."""
        adapter = hasattr(self.model, "peft_config")
        weights = memory["gradients"] if adapter else memory["weights"]
        size = weights * self.sharding.weights + memory.get("optimizer states", 0) * self.sharding.states
        strategy, every = self.training.save_strategy, int(self.training.save_steps)
        made = {SaveStrategy.NO: 0, SaveStrategy.EPOCH: math.ceil(steps / epoch_steps)}.get(strategy, steps // every)
        limit = self.training.save_total_limit
        folder = Path(self.args.output_dir).absolute()
        existing = next(each for each in (folder, *folder.parents) if each.is_dir())
        return {"bytes": size, "kept": min(made, limit or made), "free": shutil.disk_usage(existing).free}


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
    from transformers import AutoConfig, AutoModelForCausalLM

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
        tokenizer = load_tokenizer(name, chat_template=args.chat_template, trust_remote_code=trust)
        with reported(f"can't load a configuration from '{name}'"):
            found = AutoConfig.from_pretrained(name, trust_remote_code=trust)
        if config.plain:
            add_plain_tokens(tokenizer)
    if config.uses_views and config.predictors:
        add_predictor_tokens(tokenizer, config.predictors)
    try:
        lora = LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None
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
    base = base_model(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
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
    text = str(value)
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--deepspeed: can't be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise UserError(f"--deepspeed: expected a JSON object, got {type(found).__name__}")
    return found
