"""From the flags of ``stepjepa train`` to a trainer: load the model, prepare the data, score answers if asked for."""

from __future__ import annotations

import argparse
import re
from typing import Any

from transformers import TrainingArguments

from stepjepa.batch.dataset import CacheDir, prepare
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.config import JepaConfig
from stepjepa.data.prompts import common_system_prompt, system_prompts, with_system_prompt
from stepjepa.data.records import Record, describe_columns
from stepjepa.errors import UserError
from stepjepa.evaluation.answering import AnswerScores, spread
from stepjepa.models.loading import LoraSettings, add_lora, load_model
from stepjepa.models.token_rows import adapter_ids
from stepjepa.models.weights import compute_dtype, quantization_options, quantized
from stepjepa.run_folder import is_main_process
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.training.failures import cannot_start
from stepjepa.training.settings import lora_settings, training_arguments
from stepjepa.training.trainer import JepaTrainer


def build_trainer(
    args: argparse.Namespace, config: JepaConfig, train_records: list[Record], eval_records: list[Record]
) -> tuple[JepaTrainer, LoraSettings | None, dict[str, str]]:
    """Make the trainer of a run; a ``UserError`` says whatever keeps it from its first step.

    Args:
        args: of ``commands.train``.
        config: made of them.
        train_records: to be trained on.
        eval_records: held out.

    Returns:
        The trainer, the settings of its adapter, and rows for ``console.first_screen``.
    """
    training = training_arguments(args, bool(eval_records))
    lora = lora_settings(args)
    model, tokenizer = _load(args, config, training, train_records)
    cache: CacheDir = False if args.no_cache else args.cache_dir
    data = prepare(train_records, tokenizer, config, cache_dir=cache, say=say)
    held_out = None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data", cache_dir=cache, say=say)
    if lora is not None:
        model = add_lora(model, lora, adapter_ids(tokenizer, plain=config.plain))
    # Generation must never produce a token that only training knows.
    model.generation_config.suppress_tokens = all_predictor_ids(tokenizer) or None
    scores, told = None, {}
    if args.eval_generate is not None:
        scores, told["answers"] = _answer_scores(args, eval_records, system_prompts(train_records), model, tokenizer)
    try:
        trainer = JepaTrainer(
            model,
            training,
            config,
            train_dataset=data,
            eval_dataset=held_out,
            processing_class=tokenizer,
            answer_scores=scores,
            track_flop=args.track_flop,
            on_nonfinite=args.on_nonfinite,
        )
    except (UserError, OSError):
        raise
    except Exception as error:  # of whatever kind: no step is taken yet, and one line says what is wrong
        raise cannot_start(error) from None
    columns = describe_columns(train_records[0])
    if columns is not None:
        told["columns"] = columns
    return trainer, lora, told


def _load(
    args: argparse.Namespace, config: JepaConfig, training: TrainingArguments, records: list[Record]
) -> tuple[Any, Any]:
    """Model and tokenizer as the flags ask for them, without an adapter."""
    kind = quantized(args)
    compute = compute_dtype(args.dtype, bf16=training.bf16, fp16=training.fp16)
    return load_model(
        args.model_name,
        texts=(message["content"] for record in records for message in record.messages),
        predictors=(config.predictors or 0) if config.uses_views else 0,
        seed=args.finetune_seed,
        dtype=args.dtype,
        pretrain=args.pretrain,
        train_tokenizer=args.train_tokenizer,
        plain=config.plain,
        chat_template=args.chat_template,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
        allow_missing_weights=args.allow_missing_weights,
        gguf_file=args.gguf_file,
        quantization=None if kind is None else quantization_options(kind, compute, training.device),
    )


def say(line: str) -> None:
    """Print a line, from the first process alone."""
    if is_main_process():
        print(line, flush=True)


def _answer_scores(
    args: argparse.Namespace, records: list[Record], prompts: list[str | None], model: Any, tokenizer: Any
) -> tuple[AnswerScores, str]:
    """What answers and scores during training, checked on the model as it is before; and what to say of it."""
    options = TaskOptions(spider_path=args.spider_path, missing_databases=args.missing_databases)
    try:
        task = choose_task(args.eval_task, records, options)
        kept, _ = keep(task, records)
        asked = spread(list(kept.values()), args.eval_generate)
        # As 'stepjepa evaluate' will ask the trained model.
        prompt = common_system_prompt(prompts)
        scores = AnswerScores(
            asked if prompt is None else with_system_prompt(asked, prompt),
            task,
            tokenizer,
            max_new_tokens=args.eval_max_new_tokens,
            batch_size=args.batch_size,
            plain=args.plain,
        )
        scores.check(model)
    except UserError as error:
        # Worded for that command, whose flags have other names here.
        raise UserError(re.sub(r"--(task|max_new_tokens)\b", r"--eval_\1", str(error))) from None
    return scores, f"to {len(asked):,} records at every evaluation, task {task.name}"
