"""Check the arguments of ``JepaTrainer`` and the fields of ``transformers.TrainingArguments``, and adjust some."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from types import NoneType
from typing import ParamSpec

import torch
from accelerate import ParallelismConfig
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from stepjepa.base.arguments import check_number, kind_of
from stepjepa.base.similar_names import question
from stepjepa.base.typed_json import default_of
from stepjepa.batch.dataset import STRATEGIES
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.option import similar_settings
from stepjepa.config.trainer import NEEDLESS
from stepjepa.models.architecture import check_unwrapped, has_experts
from stepjepa.models.probe import leaves_weights_unused
from stepjepa.objectives.objective import Objective
from stepjepa.training.recomputation import Recomputation
from stepjepa.training.refused_methods import ARGUMENT_REMEDIES

P = ParamSpec("P")

UNUSED = (
    *("include_num_input_tokens_seen", "bf16_full_eval", "fp16_full_eval", "prediction_loss_only", "label_names"),
    "include_for_metrics",
    *("eval_accumulation_steps", "batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object"),
    *("average_tokens_across_devices", "length_column_name", "hub_always_push", "hub_strategy"),
)
"""Options of Trainer that this trainer does not use: any value but the default is refused."""

UNSUPPORTED = {
    "label_smoothing_factor": "leave it at 0: the LM loss is that of hard labels; objective= takes a term of yours",
    "auto_find_batch_size": "leave it out, and lower per_device_train_batch_size or JepaConfig(row_length=...)",
    "dataloader_drop_last": "leave it out: losses are means over labels, so a smaller last batch is weighted right",
    "enable_jit_checkpoint": "leave it out: stepjepa.run and 'stepjepa train' save a checkpoint on SIGTERM anyway",
}
"""Option of Trainer that would change the loss or the records of a step, or hide a signal -> what to do instead."""

REMEDIES = {
    "max_length": "set it in JepaConfig(max_length=...)",
    **{name: f"{remedy}, see JepaConfig({ours}=...)" for name, (remedy, ours) in NEEDLESS.items()},
    "chat_template_path": "set tokenizer.chat_template before you pass the tokenizer",
    "model_init_kwargs": "pass the model of from_pretrained(..., **model_init_kwargs)",
    "eos_token": "set tokenizer.eos_token before you pass the tokenizer",
    "router_aux_loss_coef": "set JepaConfig(router_loss=...)",
    "loss_type": "leave it out; JepaConfig and objective= choose the loss",
}
"""Field of a subclass of ``TrainingArguments``, such as TRL's ``SFTConfig`` -> what to do instead."""


def naming_remedies(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the constructor of ``JepaTrainer``: its TypeError for an unknown argument says what to do instead."""
    known = [*inspect.signature(init).parameters]

    @wraps(init)
    def checked(*arguments: P.args, **values: P.kwargs) -> None:
        for name in [name for name in ARGUMENT_REMEDIES if name in values and values[name] is None]:
            del values[name]
        if unknown := [name for name in values if name not in known]:
            raise TypeError(f"JepaTrainer has no argument '{unknown[0]}'; {_remedy(unknown[0], known)}")
        init(*arguments, **values)

    return checked


def _remedy(name: str, known: Collection[str]) -> str:
    """Return what to do instead of passing an unknown argument to ``JepaTrainer``."""
    if name in ARGUMENT_REMEDIES:
        return ARGUMENT_REMEDIES[name]
    for config in (JepaConfig, TrainingArguments):
        if name in {field.name for field in dataclasses.fields(config)}:
            return f"pass {config.__name__}({name}=...)"
    return question(similar_settings(name, known)) or "help(JepaTrainer) lists all"


_OBJECTS: dict[str, tuple[tuple[type, ...], str]] = {
    "model": ((nn.Module, str, os.PathLike), "a model, or the name of one"),
    "args": ((TrainingArguments,), "transformers.TrainingArguments(output_dir, ...)"),
    "jepa": ((JepaConfig, NoneType), "JepaConfig(...) or None"),
    "objective": ((Objective, NoneType), "Objective([LMLoss(), ...]) or None"),
}
"""Argument of ``JepaTrainer`` or ``run`` -> the classes of its values, and the words for them."""


def check_objects(**values: object) -> None:
    """Raise a ``TypeError`` for an argument of another kind, a ``ValueError`` for a model inside a wrapper."""
    for name, value in values.items():
        kinds, expected = _OBJECTS[name]
        if not isinstance(value, kinds):
            raise TypeError(f"{name}: expected {expected}, got {kind_of(value)}")
        if isinstance(value, nn.Module):
            check_unwrapped(value)


def as_callbacks(callbacks: Sequence[TrainerCallback] | None) -> list[TrainerCallback]:
    """Return callbacks as a list, an empty one for None; ``TypeError`` for a single one."""
    given: object = callbacks
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(f"callbacks: expected a list of callbacks, got {kind_of(given)}; put it into a list")
    return [*(callbacks or ())]


def check_subclass_fields(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` for a field that a subclass of ``TrainingArguments`` adds, and that nothing here reads."""
    inherited, name = {field.name for field in dataclasses.fields(TrainingArguments)}, type(args).__name__
    for field in dataclasses.fields(args):
        if field.name in inherited:
            continue
        default = default_of(field)
        # SFTConfig itself sets some to None.
        if (value := getattr(args, field.name)) not in (default, None):
            remedy = REMEDIES.get(field.name, "leave it out, or pass transformers.TrainingArguments")
            if value is False and field.name in ("assistant_only_loss", "completion_only_loss"):
                remedy = "JepaConfig(labels='all') trains all tokens"
            raise ValueError(f"{name}.{field.name}: this trainer does not read it, got {value!r}; {remedy}")


COMPILER = "ACCELERATE_DYNAMO_BACKEND"
"""Variable by which ``accelerate launch --dynamo_backend`` and ``torch_compile`` have Accelerate compile the model."""


SPLIT = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence"}
"""Field of ``ParallelismConfig`` -> the parallelism by which several processes compute the same records."""


def _check_parallelism(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` if processes would split layers or rows, by the arguments or by ``accelerate launch``."""
    parallelism: object = args.parallelism_config
    if parallelism is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        parallelism = ParallelismConfig()  # of the launcher's variables
    remedy = "leave it out: fsdp shards the weights"
    if not isinstance(parallelism, ParallelismConfig | None):
        raise ValueError(f"parallelism_config: expected accelerate.ParallelismConfig, got {parallelism!r}; {remedy}")
    for name, kind in SPLIT.items():
        if (processes := getattr(parallelism, name, 1)) > 1:
            raise ValueError(
                f"parallelism_config: not with {kind} parallelism, got {name} {processes}: every process of this "
                f"trainer computes whole rows, of records of its own; {remedy}"
            )


def check_arguments(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` for options of Trainer that would be ignored or wrong here."""
    check_subclass_fields(args)
    strategy = str(args.train_sampling_strategy)
    if strategy not in STRATEGIES:
        by_length = "; the records of a step are sorted by length anyway" if strategy == "group_by_length" else ""
        known = ", ".join(STRATEGIES)
        raise ValueError(f"train_sampling_strategy: expected one of {known}, got '{strategy}'{by_length}")
    for name, remedy in UNSUPPORTED.items():
        if value := getattr(args, name):
            raise ValueError(f"{name}: not with this trainer, got {value}; {remedy}")
    _check_parallelism(args)
    Recomputation.of(args)  # its errors
    if "underflow_overflow" in list(args.debug):
        raise ValueError(
            "debug: underflow_overflow can't look into this trainer's LM head; leave it out: a loss or gradient that "
            "is not finite ends the run and names its records"
        )
    for name in ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
        check_number(name, getattr(args, name))
    if args.max_steps == 0:
        raise ValueError("max_steps: expected 1 or more, or -1 for num_train_epochs, got 0")
    if args.torch_compile:
        # TrainingArguments has set it, for all trainers that follow in this process.
        os.environ.pop(COMPILER, None)
        remedy = "leave it out, and torch_compile_backend and torch_compile_mode, which imply it"
        raise ValueError(f"torch_compile: this trainer can't be compiled; {remedy}")
    if os.environ.get(COMPILER, "no").lower() != "no":
        raise ValueError(f"{COMPILER}: this trainer can't be compiled; unset it, or leave --dynamo_backend out")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, False):
            raise ValueError(f"accelerator_config: expected {name} false: it would change the records of a step")
    for field in dataclasses.fields(TrainingArguments):
        default = default_of(field)
        if field.name in UNUSED and getattr(args, field.name) != default:
            raise ValueError(f"{field.name}: has no effect with this trainer; leave it at {default}")


def adjust(args: TrainingArguments, model: nn.Module) -> None:
    """Set, in place, the arguments of Trainer that this objective and this model determine."""
    args.remove_unused_columns = False
    # That of `accelerate launch`, which is in the environment, changes the loss and is recorded as any other.
    args.bf16, args.fp16 = args.mixed_precision == "bf16", args.mixed_precision == "fp16"
    # Trainer's filter waits for the device in every micro-batch, and hides losses that are not finite.
    args.logging_nan_inf_filter = False
    # Pinned memory is of no use without an accelerator.
    args.dataloader_pin_memory = args.dataloader_pin_memory and torch.accelerator.is_available()
    if args.ddp_find_unused_parameters is None and not has_experts(model):
        # DDP searches the graph for unused weights at every step; that is needed only if a step leaves some unused.
        args.ddp_find_unused_parameters = leaves_weights_unused(model)


def launched_together() -> bool:
    """Return whether torchrun, or another launcher, has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def check_processes(args: TrainingArguments, processes: int) -> None:
    """Raise a ``ValueError`` if a process has several devices, or if each process would train a model of its own.

    Args:
        args: the Trainer's arguments.
        processes: the number of processes that accelerate trains with.
    """
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one device per process, got {args.n_gpu} under DataParallel, which can't carry this objective; "
            "start with torchrun, or set CUDA_VISIBLE_DEVICES to one device"
        )
    if launched_together() and processes != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"expected {os.environ['WORLD_SIZE']} processes that train one model, got {processes}; without an "
            "accelerator pass use_cpu=True to TrainingArguments"
        )
