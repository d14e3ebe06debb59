"""Build the ``JepaTrainer`` of a run: model, tokenizer, tokenised records, adapter, answers during training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from stepjepa.base.errors import UserError
from stepjepa.batch.prepare import CacheDir, prepare
from stepjepa.config.run import RunConfig
from stepjepa.data.records import Record, describe_columns
from stepjepa.evaluation.answering import AnswerScores, spread
from stepjepa.models.architecture import base_model
from stepjepa.models.loading import add_lora, load_model, load_tokenizer
from stepjepa.models.token_rows import adapter_ids, give_plain_tokens, give_predictors
from stepjepa.models.weights import compute_dtype, quantization_options
from stepjepa.running.passed import PassedObjects
from stepjepa.running.transformers import training_arguments
from stepjepa.store.prompts import common_system_prompt, system_prompts, with_system_prompt
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.training.trainer import JepaTrainer

if TYPE_CHECKING:
    from transformers import TrainingArguments


def build_trainer(
    config: RunConfig,
    passed: PassedObjects,
    train_records: list[Record],
    eval_records: list[Record],
    say: Callable[[str], None],
) -> tuple[JepaTrainer, dict[str, str | None]]:
    """Return the trainer of a run, and rows for ``first_screen``; ``say`` is called with lines on the data."""
    jepa, training = config.jepa, training_arguments(config, bool(eval_records))
    texts = (message["content"] for record in train_records for message in record.messages)
    model, tokenizer = _load(config, passed, texts, training)
    cache: CacheDir = False if config.no_cache else config.cache_dir
    data, held_out = prepare(train_records, tokenizer, jepa, cache_dir=cache, say=say), None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, jepa, what="evaluation data", cache_dir=cache, say=say)
    if config.lora is not None:
        model = add_lora(model, config.lora, adapter_ids(model, tokenizer, plain=jepa.plain))
    rows, scores = {"columns": describe_columns(train_records[0])}, None
    if config.eval_generate is not None:
        try:
            scores, rows["answers"] = _answer_scores(config, eval_records, train_records, model, tokenizer)
        except UserError as error:
            # Worded for 'stepjepa evaluate', whose settings have other names here.
            raise UserError(re.sub(r"--(task|max_new_tokens)\b", r"--eval_\1", str(error))) from None
    trainer = JepaTrainer(
        model,
        training,
        jepa,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        objective=passed.objective,
        callbacks=passed.callbacks,
        answer_scores=scores,
        track_flop=config.track_flop,
    )
    return trainer, rows


def _load(
    config: RunConfig, passed: PassedObjects, texts: Iterable[str], training: TrainingArguments
) -> tuple[Any, Any]:
    """Return model and tokenizer, with the tokens of the objective: those that were passed, else loaded ones."""
    jepa, kind = config.jepa, config.quantized
    if passed.model is None:
        compute = compute_dtype(config.dtype, bf16=training.bf16, fp16=training.fp16)
        same = ("dtype", "pretrain", "chat_template", "attn_implementation", "trust_remote_code")
        model, tokenizer = load_model(
            str(config.model_name),
            texts=texts,
            predictors=jepa.used_predictors,
            seed=config.finetune_seed,
            plain=jepa.plain,
            quantization=None if kind is None else quantization_options(kind, compute, training.device),
            **{name: getattr(config, name) for name in same},
        )
        if passed.tokenizer is None:
            return model, tokenizer
    else:
        model = passed.model
    tokenizer = passed.tokenizer or load_tokenizer(str(model.config._name_or_path))
    base = base_model(model)
    if jepa.plain:
        give_plain_tokens(base, tokenizer, config.finetune_seed)
    give_predictors(base, tokenizer, jepa.used_predictors, config.finetune_seed)
    return model, tokenizer


def _answer_scores(
    config: RunConfig, records: list[Record], trained: list[Record], model: Any, tokenizer: Any
) -> tuple[AnswerScores, str]:
    """What answers and scores during training, checked on the model as it is before; and what to say of it."""
    task = choose_task(config.eval_task, records, TaskOptions(config.spider_path, config.missing_databases))
    asked = spread(list(keep(task, records)[0].values()), config.eval_generate or 0)
    # As 'stepjepa evaluate' will ask the trained model.
    if (prompt := common_system_prompt(system_prompts(trained))) is not None:
        asked = with_system_prompt(asked, prompt)
    scores = AnswerScores(
        asked,
        task,
        tokenizer,
        max_new_tokens=config.eval_max_new_tokens,
        batch_size=config.batch_size,
        plain=config.jepa.plain,
    )
    scores.check(model)
    return scores, f"to {len(asked):,} records at every evaluation, task {task.name}"
