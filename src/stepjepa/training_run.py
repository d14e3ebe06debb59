"""One training run from the command line: read, load, prepare, train, save, write down."""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments

from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.evaluation.in_training import AnswerScores, spread
from stepjepa.evaluation.prompts import common_system_prompt, with_system_prompt
from stepjepa.files import fingerprint
from stepjepa.model import LoraSettings, add_lora, load_model
from stepjepa.predictors import all_predictor_ids
from stepjepa.preparation import prepare
from stepjepa.records import Record, read_records
from stepjepa.run_folder import (
    RUN_FILE,
    earlier_launches,
    is_main_process,
    open_run_folder,
    save_whole,
    versions,
    write_run,
)
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.trainer import JepaTrainer

logger = logging.getLogger(__name__)

LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def train(args: argparse.Namespace, config: JepaConfig) -> None:
    """Run ``stepjepa train``.

    Args:
        args: of ``commands.train``.
        config: made of them.

    Raises:
        UserError: something that the user can put right; nothing has been written then.
    """
    start = time.time()
    level = LOG_LEVELS[min(max(args.debug, 0), 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if level == logging.WARNING:
        transformers.logging.set_verbosity_error()
    # Before anything is drawn, an adapter's weights among it.
    transformers.set_seed(args.finetune_seed)
    folder, checkpoint = open_run_folder(args.output_dir, args.resume_from_checkpoint)
    train_records, eval_records, files = _read(args)
    training = _training_arguments(args, bool(eval_records))
    try:
        lora = LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None
    assert config.predictors is not None
    model: Any
    model, tokenizer = load_model(
        args.model_name,
        texts=(message["content"] for record in train_records for message in record.messages),
        predictors=config.predictors if config.uses_views else 0,
        seed=args.finetune_seed,
        dtype=args.dtype,
        chat_template=args.chat_template,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )
    data = prepare(train_records, tokenizer, config)
    held_out = prepare(eval_records, tokenizer, config, what="evaluation data") if eval_records else None
    _say(f"data: {data.describe()}")
    if lora is not None:
        model = add_lora(model, lora, all_predictor_ids(tokenizer))
    # Generation must never produce a token that only training knows.
    model.generation_config.suppress_tokens = all_predictor_ids(tokenizer) or None
    answer_scores = None
    if args.eval_generate is not None:
        answer_scores = _answer_scores(args, eval_records, _system_prompts(train_records), model, tokenizer)
    try:
        trainer = JepaTrainer(
            model,
            training,
            config,
            train_dataset=data,
            eval_dataset=held_out,
            processing_class=tokenizer,
            answer_scores=answer_scores,
        )
    except (ValueError, RuntimeError, ImportError) as error:
        raise UserError(str(error)) from None
    _say(f"encoding: {trainer.encoding} ({trainer.encoding_reason})")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    _say(f"model: {trainable:,} of {total:,} parameters trained")
    record: dict[str, Any] = {
        "status": "running",
        "command": sys.argv[1:],
        "model": args.model_name,
        "jepa": config.to_dict(),
        "lora": vars(lora) if lora else None,
        "encoding": {"used": trainer.encoding, "because": trainer.encoding_reason},
        "training": training.to_dict(),
        "data": files,
        "order": _order(training),
        "counts": data.counts,
        "tokens": {**data.tokens, "ratio": data.tokens["all"] / data.tokens["main"]},
        "template": data.template,
        "system_prompts": _system_prompts(train_records),
        "parameters": {"trained": trainable, "total": total},
        "versions": versions(),
        "launches": [],
    }
    if checkpoint is not None:
        parts = ("model", "jepa", "lora", "data", "order")
        record["launches"] = earlier_launches(folder, {name: record[name] for name in parts}, record["training"])
    write_run(folder, record)
    with closing(answer_scores) if answer_scores is not None else nullcontext():
        metrics = _run(trainer, folder, checkpoint, record)
        if held_out is not None:
            metrics |= trainer.evaluate()
    save_whole(folder, trainer.save_model)
    trainer.save_state()
    record |= {
        "status": "finished",
        "results": {
            "steps": trainer.state.global_step,
            "tokens": trainer.num_tokens,
            "last_log": next((line for line in reversed(trainer.state.log_history) if "lm_loss" in line), {}),
            "train_seconds": sum(launch["seconds"] for launch in record["launches"]),
            "seconds": time.time() - start,
            **{name: value for name, value in metrics.items() if name.startswith("eval_")},
        },
    }
    write_run(folder, record)
    _say(f"run folder: {folder}")
    _leave_group()


def _leave_group() -> None:
    """End the group of processes: left to the interpreter's end, its threads now and then abort the process."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _answer_scores(
    args: argparse.Namespace, records: list[Record], prompts: list[str | None], model: Any, tokenizer: Any
) -> AnswerScores:
    """What answers and scores during training, checked on the model as it is before."""
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
        )
        scores.check(model)
    except UserError as error:
        # Worded for that command, whose flags have other names here.
        raise UserError(re.sub(r"--(task|max_new_tokens)\b", r"--eval_\1", str(error))) from None
    _say(f"answers during training: {len(asked)} records, task {task.name}")
    return scores


def _run(trainer: JepaTrainer, folder: Path, checkpoint: str | None, record: dict[str, Any]) -> dict[str, float]:
    """Train, and note in the record what became of it."""
    start = time.time()
    try:
        metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
    except (ValueError, RuntimeError, ImportError) as error:
        if trainer.state.global_step == 0:
            # An optimizer or a schedule that can't be made. The folder stays free for the next try.
            if is_main_process() and checkpoint is None:
                (folder / RUN_FILE).unlink(missing_ok=True)
                if not any(folder.iterdir()):
                    folder.rmdir()
            raise UserError(f"training can't start: {error}") from None
        write_run(folder, {**record, "status": "failed", "error": str(error)})
        raise
    record["launches"].append({"seconds": time.time() - start, "to_step": trainer.state.global_step})
    return metrics


def _order(training: TrainingArguments) -> dict[str, Any]:
    """What decides which record is trained when: a resumed run must keep it."""
    return {
        "seed": training.seed,
        "data_seed": training.data_seed,
        "records_per_micro_step": training.per_device_train_batch_size * training.world_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_sampling_strategy": str(training.train_sampling_strategy),
    }


# More than this many are no system prompts but parts of the records.
_MOST_PROMPTS = 10


def _system_prompts(records: list[Record]) -> list[str | None]:
    """The different system prompts of some records, the most frequent first; None stands for having none."""
    first = (record.messages[0] for record in records)
    counts = Counter(message["content"] if message["role"] == "system" else None for message in first)
    return [prompt for prompt, _ in counts.most_common(_MOST_PROMPTS)]


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


def _read(args: argparse.Namespace) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Training records, held-out records and what identifies their files."""
    if args.data_file is not None:
        records = read_records(args.data_file)
        order = random.Random(args.split_seed).sample(range(len(records)), len(records))
        count = round(len(records) * args.eval_split)
        if not 0 < count < len(records):
            raise UserError(
                f"{len(records)} records can't be split with --eval_split {args.eval_split}; one part would be empty",
                path=args.data_file,
            )
        held = set(order[:count])
        parts = [records[i] for i in range(len(records)) if i not in held], [records[i] for i in sorted(held)]
        split = {"eval_split": args.eval_split, "split_seed": args.split_seed}
        return *parts, {"data": {**_identify(args.data_file, records), **split}}
    train_records = read_records(args.train_file)
    files = {"train": _identify(args.train_file, train_records)}
    if args.eval_file is None:
        return train_records, [], files
    eval_records = read_records(args.eval_file)
    return train_records, eval_records, {**files, "eval": _identify(args.eval_file, eval_records)}


def _identify(path: str, records: list[Record]) -> dict[str, Any]:
    return {"file": Path(path).name, "records": len(records), "sha256": fingerprint(path)}


def _training_arguments(args: argparse.Namespace, has_eval: bool) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.grad_accum,
        "learning_rate": args.learning_rate,
        "num_train_epochs": args.num_epochs,
        "seed": args.finetune_seed,
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
        # A process that only the CPU serves has nothing to pin.
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    if has_eval:
        values["eval_strategy"] = "epoch" if args.eval_steps is None else "steps"
        values["eval_steps"] = args.eval_steps
    elif args.eval_steps is not None:
        raise UserError("--eval_steps does nothing without --eval_file or --data_file; add one or leave it out")
    values.update(args.training)
    try:
        return TrainingArguments(**values)
    except (ValueError, ImportError, TypeError) as error:
        raise UserError(str(error).strip().splitlines()[0]) from None
