"""Check what ``JepaTrainer`` is passed, arguments of Trainer, model, objective and records, before the first step."""

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Collection
from functools import wraps
from types import NoneType
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import nn
from transformers import TrainingArguments

from stepjepa.base.similar_names import question
from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import STRATEGIES, Prepared
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.option import similar_settings
from stepjepa.config.run import GroupBy
from stepjepa.models.architecture import base_model, has_experts
from stepjepa.models.attention import uses_flex
from stepjepa.models.probe import leaves_weights_unused
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.text import LMLoss

P = ParamSpec("P")

# -- processes that train together -------------------------------------------------------------------------------------


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


# -- unsupported settings ----------------------------------------------------------------------------------------------


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
}
"""Option of Trainer that would change the loss, or the records of a step -> what to do instead."""

REMEDIES = {
    "max_length": "set it in JepaConfig(max_length=...)",
    "packing": "leave it out: rows are packed without contamination anyway, see JepaConfig(row_length=...)",
    "padding_free": "leave it out: rows are packed without padding anyway",
    "assistant_only_loss": "leave it out: the assistant's tokens alone are trained anyway, see JepaConfig(labels=...)",
    "completion_only_loss": "leave it out: the assistant's tokens alone are trained anyway, see JepaConfig(labels=...)",
    "chat_template_path": "set tokenizer.chat_template before you pass the tokenizer",
    "model_init_kwargs": "pass the model of from_pretrained(..., **model_init_kwargs)",
    "eos_token": "set tokenizer.eos_token before you pass the tokenizer",
    "router_aux_loss_coef": "set JepaConfig(router_loss=...)",
    "loss_type": "leave it out; JepaConfig and objective= choose the loss",
}
"""Field of a subclass of ``TrainingArguments``, such as TRL's ``SFTConfig`` -> what to do instead."""

ARGUMENT_REMEDIES = {
    "tokenizer": "pass processing_class=",
    "peft_config": "pass the model of peft.get_peft_model(model, peft_config)",
    "columns": "rename the two columns of train_dataset to prompt and completion",
    "data_collator": "leave it out: records become batches of trees; views= and JepaConfig(layout=...) change them",
    "formatting_func": "pass records with 'messages', or with 'prompt' and 'completion'",
    "compute_metrics": "pass answer_scores=, or evaluate the run folder with a task, since logits are not stored",
    "preprocess_logits_for_metrics": "leave it out, since logits are not stored",
    "compute_loss_func": "pass objective=Objective([LMLoss(), ...]) with a term of yours",
    "model_init": "pass the model; each trial of a search needs a trainer with an output_dir of its own",
    "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, schedule)",
    "quantization_config": "pass the model of from_pretrained(..., quantization_config=...)",
}
"""Argument of ``Trainer`` or of TRL's ``SFTTrainer`` that ``JepaTrainer`` does not have -> what to do instead.

``None``, the default that all of them have there, is accepted.
"""


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


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_objects(model: object, args: object, jepa: object) -> None:
    """Raise a ``TypeError`` for an argument of ``JepaTrainer`` of another kind, such as one in another's place."""
    for name, value, kinds, expected in (
        ("model", model, (nn.Module, str, os.PathLike), "a model, or the name of one"),
        ("args", args, (TrainingArguments,), "transformers.TrainingArguments(output_dir, ...)"),
        ("jepa", jepa, (JepaConfig, NoneType), "JepaConfig(...) or None"),
    ):
        if not isinstance(value, kinds):
            raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def optimizer_and_schedule(optimizers: object) -> tuple[Any, Any]:
    """Return an optimizer and its schedule, None for each that Trainer makes; ``TypeError`` for no such pair."""
    if optimizers is None:
        return None, None
    if isinstance(optimizers, tuple | list) and len(optimizers) == 2:
        return optimizers[0], optimizers[1]
    got = f"{len(optimizers)} values" if isinstance(optimizers, tuple | list) else type(optimizers).__name__
    raise TypeError(f"optimizers: expected (optimizer, schedule), each of which may be None, got {got}")


def check_subclass_fields(args: TrainingArguments) -> None:
    """Raise a ``ValueError`` for a field that a subclass of ``TrainingArguments`` adds, and that nothing here reads."""
    inherited, name = {field.name for field in dataclasses.fields(TrainingArguments)}, type(args).__name__
    for field in dataclasses.fields(args):
        if field.name in inherited:
            continue
        default = _default(field)
        # SFTConfig itself sets some to None.
        if (value := getattr(args, field.name)) not in (default, None):
            remedy = REMEDIES.get(field.name, "leave it out, or pass transformers.TrainingArguments")
            if value is False and field.name in ("assistant_only_loss", "completion_only_loss"):
                remedy = "JepaConfig(labels='all') trains all tokens"
            raise ValueError(f"{name}.{field.name}: this trainer does not read it, got {value!r}; {remedy}")


COMPILER = "ACCELERATE_DYNAMO_BACKEND"
"""Variable by which ``accelerate launch --dynamo_backend`` and ``torch_compile`` have Accelerate compile the model."""


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
    if "underflow_overflow" in list(args.debug):
        raise ValueError(
            "debug: underflow_overflow can't look into this trainer's LM head; leave it out: a loss or gradient that "
            "is not finite ends the run and names its records"
        )
    if args.max_steps == 0:
        raise ValueError("max_steps: expected 1 or more, or -1 for num_train_epochs, got 0")
    if args.torch_compile:
        # TrainingArguments has set it, for all trainers that follow in this process.
        os.environ.pop(COMPILER, None)
        raise ValueError("torch_compile: this trainer can't be compiled; leave it out")
    if os.environ.get(COMPILER, "no").lower() != "no":
        raise ValueError(f"{COMPILER}: this trainer can't be compiled; unset it, or leave --dynamo_backend out")
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, False):
            raise ValueError(f"accelerator_config: expected {name} false: it would change the records of a step")
    for field in dataclasses.fields(TrainingArguments):
        default = _default(field)
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


def check_objective(
    config: JepaConfig, args: TrainingArguments, objective: Objective, *, trains: bool, held_out: bool
) -> None:
    """Raise a ``ValueError`` if no term is trained, or one that compares pairs would see only one pair per batch.

    Args:
        config: of the run.
        args: the Trainer's arguments.
        objective: the terms, perhaps without the router loss that a model has by itself.
        trains: whether there are records to train on.
        held_out: whether there are held-out records.
    """
    with_pairs = config.uses_views and config.jepa_ratio > 0 and config.jepa_epochs != 0
    used = [term for term in objective.terms.values() if with_pairs or not term.of_pairs]
    # A user's term may have a schedule of its own.
    weights = [term.weight_at(progress) for term in used for progress in (None, 0.0, 0.5, 1.0)]
    if trains and not any((*weights, config.router_loss)):
        raise ValueError(
            "no step has a loss whose weight is above 0, so nothing would be trained; raise `gamma`, or the weight of "
            "another loss"
        )
    check_batch_size(config, args, objective.compares_pairs)
    if (
        held_out
        and objective.compares_pairs
        and config.pairs == "first"
        and args.eval_batch_size * args.world_size == 1
    ):
        raise ValueError(
            "the loss compares the pairs of a micro-batch, and a held-out batch of 1 has one, so that its loss is 0; "
            "raise `per_device_eval_batch_size`, or take another loss"
        )


def check_batch_size(
    config: JepaConfig, args: TrainingArguments, compares_pairs: bool, prepared: Prepared | None = None
) -> None:
    """Raise a ``ValueError`` if a term that compares pairs would see only one pair per batch.

    Args:
        config: of the objective.
        args: the Trainer's arguments.
        compares_pairs: whether a term compares the pairs of a micro-batch.
        prepared: records as tokens, which say whether one has several pairs with ``pairs`` 'all'; None for not yet.
    """
    if not compares_pairs or args.train_batch_size * args.world_size > 1:
        return
    one_each = config.pairs == "first"
    if not one_each and prepared is not None:
        records = (prepared.dataset[number].record for number in range(len(prepared.dataset)))
        one_each = not any(len(record.all_pairs) > 1 for record in records)
    if one_each:
        raise ValueError(
            "the loss compares the pairs of a micro-batch, and a batch of 1 has one; raise `batch_size` (and lower "
            "`grad_accum`), or take another loss"
        )


def check_adapters(model: nn.Module, *, trains: bool) -> None:
    """Raise a ``ValueError`` for adapters that a run folder can't hold, and for a model without trained weights.

    Args:
        model: as it was passed, possibly a PEFT wrapper.
        trains: whether there are records to train on.
    """
    if hasattr(model, "get_base_model") and (name := model.active_adapter) != "default":
        raise ValueError(
            f"the active adapter is {name!r}, and a run folder holds the one named 'default'; leave adapter_name "
            "out of get_peft_model or PeftModel.from_pretrained"
        )
    if trains and not any(parameter.requires_grad for parameter in model.parameters()):
        remedy = "pass is_trainable=True to PeftModel.from_pretrained" if hasattr(model, "peft_config") else ""
        remedy = remedy or "call model.requires_grad_(True); PEFT's merge_and_unload() leaves weights frozen"
        raise ValueError(f"no weight of the model is trained; {remedy}")


def check_grouping(group_by: GroupBy | None, config: JepaConfig) -> GroupBy | None:
    """Return ``group_by``; raise a ``ValueError`` if it is unknown or would save nothing."""
    if group_by not in (None, "prompt"):
        raise ValueError(f"group_by: expected 'prompt' or None, got {group_by!r}")
    if group_by is not None and not config.share_prefixes:
        raise ValueError("group_by saves nothing with share_prefixes False; leave one out")
    return group_by


def check_attention(args: TrainingArguments, model: nn.Module) -> None:
    """Raise a ``ValueError`` for a model whose attention can't be trained on the device of ``args``."""
    if args.device.type == "cpu" and uses_flex(base_model(model)):
        raise ValueError("FlexAttention has no backward pass on a CPU; train with `attn_implementation sdpa` there")


def check_sharding(config: JepaConfig, answer_scores: object | None, retrieval_scores: object | None) -> None:
    """Raise a ``ValueError`` for settings that don't work when each process holds a part of the weights.

    Args:
        config: of the objective.
        answer_scores: scores answers during training; None for no scores.
        retrieval_scores: the same of retrieval.
    """
    if retrieval_scores is not None:
        raise ValueError("retrieval_scores: expected None, since sharded weights can't embed; evaluate afterwards")
    if answer_scores is not None:
        raise ValueError("answer_scores: expected None, since sharded weights can't generate; evaluate afterwards")
    if config.target_grad == "ema":
        raise ValueError("target_grad 'ema' keeps a second set of weights, which can't be sharded; use 'stop'")


def check_positions(collator: Collator, *prepared: Prepared | None) -> None:
    """Raise an error before the first step: a record is too long for the model, or too short for ``last_token``.

    Args:
        collator: makes the sequences of a record, and raises the error.
        prepared: records as tokens; None for none.
    """
    limit = math.inf if collator.positions is None else collator.positions
    # A readout that is counted from the end may lie before the start of any view.
    least = 0 if (collator.reading.last_token or -1) < -1 else limit
    for data in prepared:
        if data is not None:
            # Making all sequences takes long, so only those of records that may be too long are made.
            for number in np.flatnonzero(data.dataset.longest_possible(len(collator.predictors)) > least).tolist():
                collator.sequences(data.dataset[number])


def check_layout(collator: Collator, objective: Objective, config: JepaConfig, *prepared: Prepared | None) -> None:
    """Raise a ``ValueError`` if the layout leaves a term without anything in all records: it would be 0 in every step.

    Args:
        collator: makes the sequences of a record.
        objective: the terms; those of weight 0 need nothing.
        config: of the run.
        prepared: records as tokens; None for none.
    """
    terms = [term for term in objective.terms.values() if term.weight]
    # Steps without views train the main text, whatever the layout.
    with_views = config.jepa_ratio == 1 and config.jepa_epochs is None
    needs_labels = with_views and any(isinstance(term, LMLoss) for term in terms)
    needs_readouts = config.uses_views and any(term.of_pairs for term in terms)
    for data in filter(None, prepared):
        has_labels, has_readouts = not needs_labels, not needs_readouts
        for number in range(len(data.dataset)):
            if has_labels and has_readouts:
                break
            sample = data.dataset[number]
            if not has_labels or sample.record.all_pairs:
                sequences = collator.sequences(sample)
                has_labels = has_labels or any(len(sequence.labels) for sequence in sequences)
                has_readouts = has_readouts or any(sequence.readouts for sequence in sequences)
        if not (has_labels and has_readouts):
            raise ValueError(f"layout '{collator.layout}': {_NO_READOUTS if has_labels else _NO_LABELS}")


_NO_LABELS = (
    "no record has a label, so the LM loss would be 0 in every step; give a sequence labels, as main_sequence(record) "
    "does, or train without it (`gamma 0`)"
)
_NO_READOUTS = (
    "no record has a readout, so the loss of its pairs would be 0 in every step; give sequences "
    "readouts=(Readout(...), ...), or train in mode `regular`"
)
