"""Check the objective, the model and the records of a ``JepaTrainer`` before the first step."""

import math
from collections.abc import Iterable

import numpy as np
from torch import nn
from transformers import TrainingArguments

from stepjepa.batch.collate import Collator
from stepjepa.batch.dataset import Prepared
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.run import GroupBy
from stepjepa.models.architecture import base_model
from stepjepa.models.attention import uses_flex
from stepjepa.objectives.objective import Objective
from stepjepa.objectives.pair_cache import check_compared_pairs
from stepjepa.objectives.term import Term
from stepjepa.objectives.text import LMLoss


def check_objective(
    config: JepaConfig, args: TrainingArguments, objective: Objective, *, trains: bool, held_out: bool
) -> None:
    """Raise a ``ValueError`` if steps train no term, or one that compares pairs would see only one pair per batch.

    Args:
        config: of the run.
        args: the Trainer's arguments.
        objective: the terms, perhaps without the router loss that a model has by itself.
        trains: whether there are records to train on.
        held_out: whether there are held-out records.
    """
    with_pairs = config.uses_views and config.jepa_ratio > 0 and config.jepa_epochs != 0
    used = [term for term in objective.terms.values() if with_pairs or not term.of_pairs]
    if trains and not (_have_weight(used) or config.router_loss):
        raise ValueError(
            "no step has a loss whose weight is above 0, so nothing would be trained; raise `gamma`, or the weight of "
            "another loss"
        )
    # How many epochs `max_steps` are is not known yet.
    ends = config.jepa_epochs is not None and args.max_steps <= 0 and config.jepa_epochs < args.num_train_epochs
    without = "jepa_ratio" if config.jepa_ratio < 1 else "jepa_epochs" if ends else None
    of_text = [term for term in used if not term.of_pairs]
    if trains and without and not (_have_weight(of_text) or config.router_loss):
        raise ValueError(
            f"`{without}` leaves steps without views, in which no loss has a weight above 0, so they would train "
            f"nothing; leave `{without}` out, or raise `gamma`"
        )
    check_compared_pairs(config, objective.terms)
    check_batch_size(config, args, objective.compares_pairs)
    if held_out:
        check_held_out_batch(config, args, objective.compares_pairs)


def _have_weight(terms: Iterable[Term]) -> bool:
    """Return whether a term has a weight at any time; a user's term may have a schedule of its own."""
    return any(term.weight_at(progress) for term in terms for progress in (None, 0.0, 0.5, 1.0))


def check_batch_size(
    config: JepaConfig, args: TrainingArguments, compares_pairs: bool, prepared: Prepared | None = None
) -> None:
    """Raise a ``ValueError`` if a term that compares pairs would see only one pair at a time.

    Args:
        config: of the objective.
        args: the Trainer's arguments.
        compares_pairs: whether a term compares the pairs of a micro-batch, or of a step.
        prepared: records as tokens, which say whether one has several pairs with ``pairs`` 'all'; None for not yet.
    """
    of_step, accumulated = config.compare_pairs_in == "step", args.gradient_accumulation_steps
    compared = args.train_batch_size * args.world_size * (accumulated if of_step else 1)
    if not compares_pairs or compared > 1 or not _one_pair_each(config, prepared):
        return
    if of_step:
        fault, remedy = "a step, and a step of 1 record has one", "raise `batch_size` or `grad_accum`"
    else:
        fault = "a micro-batch, and a batch of 1 has one"
        remedy = "raise `batch_size` (and lower `grad_accum`), compare those of a step (`compare_pairs_in step`)"
    raise ValueError(f"the loss compares the pairs of {fault}; {remedy}, or take another loss")


def check_held_out_batch(
    config: JepaConfig, args: TrainingArguments, compares_pairs: bool, prepared: Prepared | None = None
) -> None:
    """Raise a ``ValueError`` as :func:`check_batch_size` does, for a batch of held-out records."""
    if compares_pairs and args.eval_batch_size * args.world_size == 1 and _one_pair_each(config, prepared):
        raise ValueError(
            "the loss compares the pairs of a micro-batch, and a held-out batch of 1 has one, so that its loss is 0; "
            "raise `per_device_eval_batch_size`, or take another loss"
        )


def _one_pair_each(config: JepaConfig, prepared: Prepared | None) -> bool:
    """Return whether no record has several pairs; as far as it is known, where none is prepared yet."""
    if config.pairs == "first" or prepared is None:
        return config.pairs == "first"
    records = (prepared.dataset[number].record for number in range(len(prepared.dataset)))
    return not any(len(record.all_pairs) > 1 for record in records)


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
        remedy = "call model.requires_grad_(True); PEFT's merge_and_unload() leaves weights frozen"
        if hasattr(model, "peft_config"):
            remedy = "pass is_trainable=True to PeftModel.from_pretrained, or inference_mode=False to LoraConfig"
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
