"""From the flags of ``stepjepa train`` to a trainer: settings, model, prepared data, scores of answers if asked for."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from stepjepa.batch.dataset import CacheDir, prepare
from stepjepa.batch.stream import RecordStream
from stepjepa.chat.predictors import all_predictor_ids
from stepjepa.chat.system_prompts import MOST_PROMPTS, common_system_prompt, count_system_prompts, with_system_prompt
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.in_training import AnswerScores, spread
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.loading import LoraSettings, add_lora, load_model
from stepjepa.models.quantization import compute_dtype, quantization_options
from stepjepa.models.token_rows import adapter_ids
from stepjepa.run_folder import is_main_process
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.training.data import open_stream
from stepjepa.training.failures import cannot_start
from stepjepa.training.hub import refuse_offline
from stepjepa.training.preparation import refuse_contradictions
from stepjepa.training.processes import launched_together, open_group
from stepjepa.training.trainer import JepaTrainer


def training_arguments(args: argparse.Namespace, has_eval: bool) -> TrainingArguments:
    """Our flags and those of transformers as one.

    Args:
        args: of ``commands.train``.
        has_eval: there are held-out records.

    Raises:
        UserError: transformers refuses them, or ``--eval_steps`` has nothing to act on.
    """
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "learning_rate": args.learning_rate,
        "num_train_epochs": args.num_epochs,
        "seed": args.finetune_seed,
        "logging_steps": 10,
        "report_to": ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none",
        # All processes say as much as the first.
        "log_level_replica": "passive",
        "disable_tqdm": not sys.stderr.isatty(),
    }
    if has_eval:
        values["eval_strategy"] = "epoch" if args.eval_steps is None else "steps"
        values["eval_steps"] = args.eval_steps
    elif args.eval_steps is not None:
        raise UserError("--eval_steps does nothing without --eval_file or --data_file; add one or leave it out")
    values.update(args.training)
    unused = sorted(name for name in args.training if name.startswith("hub_"))
    if values.get("push_to_hub"):
        refuse_offline()
    elif unused:
        raise UserError(f"--{unused[0]} does nothing without --push_to_hub; add it or leave it out")
    if str(values.get("fsdp")).lower() == "true":
        # A configuration file says 'fsdp: true'; as a word it would be taken for one of the old options.
        values["fsdp"] = True
    if values.get("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise UserError("--deepspeed requires deepspeed, which is not installed: pip install deepspeed")
    if launched_together() and not torch.accelerator.is_available() and not values.get("use_cpu"):
        # Without it transformers would have every process train a model of its own.
        values["use_cpu"] = True
        if is_main_process():
            print("note: no accelerator here, so the processes train on CPUs (--use_cpu)", file=sys.stderr)
    open_group(cpu=bool(values.get("use_cpu")), seconds=values.get("ddp_timeout", TrainingArguments.ddp_timeout))
    try:
        made = TrainingArguments(**values)
        # Wrong settings and trackers that are unknown or not installed would end the run only after data and model are
        # prepared.
        refuse_contradictions(made)
        for tracker in get_reporting_integration_callbacks(made.report_to):
            tracker()
    except (ValueError, ImportError, TypeError, RuntimeError) as error:
        raise UserError(" ".join(str(error).split())) from None
    return made


def lora_settings(args: argparse.Namespace) -> LoraSettings | None:
    """Of the adapter that ``--lora`` asks for; None without."""
    try:
        return LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None


def quantized(args: argparse.Namespace) -> str | None:
    """How the frozen weights are quantized: ``4bit``, ``8bit`` or None."""
    return "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None


def build_trainer(
    args: argparse.Namespace, config: JepaConfig, train_records: list[Record], eval_records: list[Record]
) -> tuple[JepaTrainer, LoraSettings | None, dict[str, str]]:
    """Make the trainer of a run; a ``UserError`` says whatever keeps it from its first step.

    Args:
        args: of ``commands.train``.
        config: made of them.
        train_records: of a stream the first ones.
        eval_records: held out.

    Returns:
        The trainer, the settings of its adapter, and rows for ``console.first_screen``.
    """
    training = training_arguments(args, bool(eval_records))
    lora = lora_settings(args)
    model, tokenizer = _load(args, config, training, train_records)
    cache: CacheDir = False if args.no_cache else args.cache_dir
    stream = open_stream(args) if args.streaming else None
    data = stream or prepare(train_records, tokenizer, config, cache_dir=cache, say=say)
    held_out = None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data", cache_dir=cache, say=say)
    if lora is not None:
        model = add_lora(model, lora, adapter_ids(tokenizer, plain=config.plain))
    # Generation must never produce a token that only training knows.
    model.generation_config.suppress_tokens = all_predictor_ids(tokenizer) or None
    scores, told = None, {}
    if args.eval_generate is not None:
        scores, told["answers"] = _answer_scores(args, eval_records, prompts_of(train_records), model, tokenizer)
    try:
        if args.selective_checkpointing:
            refuse_full(training)
            enable_selective(model)
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
    if stream is not None:
        told["data"] = _describe_stream(stream, args, len(train_records))
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
        quantization=None if kind is None else quantization_options(kind, compute, training.device),
    )


def prompts_of(records: list[Record]) -> list[str | None]:
    """The different system prompts of some records, the most frequent first; None stands for having none."""
    return [prompt for prompt, _ in count_system_prompts(records).most_common(MOST_PROMPTS)]


def say(line: str) -> None:
    """Print a line, from the first process alone."""
    if is_main_process():
        print(line, flush=True)


def _describe_stream(stream: RecordStream, args: argparse.Namespace, looked_at: int) -> str:
    size = stream.shuffle_buffer_size
    order = f"shuffled in a buffer of {size:,} records" if size else "in the order of the file"
    made = args.model_name.startswith("preset:") or args.train_tokenizer is not None
    trained = f"; the tokenizer was trained on the first {looked_at:,} records" if made else ""
    return f"streamed, {order}{trained}"


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
