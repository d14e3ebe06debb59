"""One training run from the command line: read, load, prepare, train, save, write down."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import SaveStrategy

from stepjepa.batch.dataset import CacheDir, Prepared, prepare
from stepjepa.batch.stream import RecordStream
from stepjepa.compute.equal_compute import EqualCompute, equal_compute
from stepjepa.compute.flop_callback import EqualComputeCallback
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.in_training import AnswerScores, spread
from stepjepa.files import fingerprint
from stepjepa.models.checkpointing import enable_selective, refuse_full
from stepjepa.models.loading import LoraSettings, add_lora, load_model
from stepjepa.models.quantization import compute_dtype, parameter_counts, quantization_options
from stepjepa.models.token_rows import adapter_ids
from stepjepa.run_folder import (
    earlier_launches,
    is_main_process,
    open_run_folder,
    save_whole,
    text_of_run,
    versions,
    write_run,
)
from stepjepa.signals import OneRequest, Stopped
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.terminal import print_rows
from stepjepa.text.predictors import all_predictor_ids
from stepjepa.text.system_prompts import common_system_prompt, describe_system_prompts, with_system_prompt
from stepjepa.training.card import CARD_FILE, is_somebodys_own
from stepjepa.training.dry_run import dry_run
from stepjepa.training.failures import cannot_start, noting_failures
from stepjepa.training.group import leave_group, refuse_disagreement
from stepjepa.training.inputs import open_stream, read_data, system_prompts, training_arguments
from stepjepa.training.provenance import provenance
from stepjepa.training.start_up import start_up_rows
from stepjepa.training.stopping import StopCallback
from stepjepa.training.trainer import JepaTrainer

logger = logging.getLogger(__name__)

LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def train(args: argparse.Namespace, config: JepaConfig) -> dict[str, Any] | None:
    """Run ``stepjepa train``.

    Args:
        args: of ``commands.train``.
        config: made of them.

    Returns:
        What ``run.json`` says of the finished run; after ``--dry_run`` the estimate, from the first process alone.

    Raises:
        UserError: something that the user can put right. Before the first step nothing stays written; later the message
            says what is saved.
    """
    start = time.time()
    level = LOG_LEVELS[min(max(args.debug, 0), 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if level == logging.WARNING:
        transformers.logging.set_verbosity_error()
    # Before anything is drawn, an adapter's weights among it.
    transformers.set_seed(args.finetune_seed)
    folder, checkpoint = open_run_folder(args.output_dir, args.resume_from_checkpoint, _say)
    train_records, eval_records, files = read_data(args)
    if args.dry_run:
        return dry_run(
            args, config, train_records, eval_records, lambda args: training_arguments(args, bool(eval_records))
        )
    trainer, told = _build(args, config, train_records, eval_records)
    # Weights are read by now; a bar whenever they are written would tear that of the training.
    transformers.logging.disable_progress_bar()
    equal = _equal_compute(trainer, args) if args.same_flop else None
    if is_main_process():
        prompts = describe_system_prompts(train_records)
        print_rows(start_up_rows(args, trainer, prompts=prompts, equal=equal, checkpoint=checkpoint, **told))
    record = {
        **_describe(args, trainer),
        "data": files,
        "system_prompts": system_prompts(train_records),
        "same_flop": asdict(equal) if equal else None,
    }
    refuse_disagreement(_agreed(record, checkpoint))
    if args.resume_from_checkpoint is not None:
        parts = ("model", "jepa", "lora", "loaded", "data", "order")
        launches = earlier_launches(folder, {name: record[name] for name in parts}, record["training"])
        # Without a checkpoint it begins anew.
        record["launches"] = launches if checkpoint is not None else []
    before = text_of_run(folder)
    write_run(folder, record)
    scores = trainer.answer_scores
    with noting_failures(trainer, folder, record, before):
        with closing(scores) if isinstance(scores, AnswerScores) else nullcontext():
            metrics = _run(trainer, folder, checkpoint, record)
            if trainer.prepared_eval is not None:
                metrics |= _evaluated_last(trainer) or trainer.evaluate()
        save_whole(folder, partial(_save, trainer))
    record |= {
        **trainer.found(),
        "status": "finished",
        "results": {
            "steps": trainer.state.global_step,
            "tokens": trainer.meter.num_tokens,
            "flops": trainer.state.total_flos,
            "nonfinite_steps": trainer.guard.skipped,
            "last_log": next((line for line in reversed(trainer.state.log_history) if "lm_loss" in line), {}),
            "train_seconds": sum(launch["seconds"] for launch in record["launches"]),
            "seconds": time.time() - start,
            **{name: value for name, value in metrics.items() if name.startswith("eval_")},
        },
    }
    write_run(folder, record)
    leave_group()
    # The other processes need not wait for it.
    address = trainer.uploads.upload_run(folder)
    if address is not None:
        _say(f"uploaded: {address}")
    return record


def _evaluated_last(trainer: JepaTrainer) -> dict[str, float] | None:
    """What the trained weights were evaluated to after the last step; None where they were not, or are others now."""
    if trainer.args.load_best_model_at_end:
        return None
    at_end = [line for line in trainer.state.log_history if line.get("step") == trainer.state.global_step]
    found: dict[str, float] = next((line for line in reversed(at_end) if "eval_lm_loss" in line), {})
    return {name: value for name, value in found.items() if name.startswith("eval_")} or None


def _save(trainer: JepaTrainer, folder: str) -> None:
    # What --push_to_hub uploads is the run folder, once all of it is there.
    trainer.save_model(folder, _internal_call=True)
    if trainer.is_world_process_zero():
        trainer.state.save_to_json(str(Path(folder) / "trainer_state.json"))
        if is_somebodys_own(Path(trainer.args.output_dir) / CARD_FILE):
            (Path(folder) / CARD_FILE).unlink(missing_ok=True)


def _build(
    args: argparse.Namespace, config: JepaConfig, train_records: list[Record], eval_records: list[Record]
) -> tuple[JepaTrainer, dict[str, str]]:
    """Everything up to the trainer, and what ``start_up_rows`` is to say of stream and answers."""
    training = training_arguments(args, bool(eval_records))
    lora = _lora_settings(args)
    assert config.predictors is not None
    model: Any
    model, tokenizer = load_model(
        args.model_name,
        texts=(message["content"] for record in train_records for message in record.messages),
        predictors=config.predictors if config.uses_views else 0,
        seed=args.finetune_seed,
        dtype=args.dtype,
        pretrain=args.pretrain,
        train_tokenizer=args.train_tokenizer,
        plain=config.plain,
        chat_template=args.chat_template,
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
        quantization=_quantization(args, training),
    )
    cache: CacheDir = False if args.no_cache else args.cache_dir
    data: Prepared | RecordStream
    told: dict[str, str] = {}
    if args.streaming:
        data = open_stream(args)
        told["stream"] = _describe_stream(data, args, len(train_records))
    else:
        data = prepare(train_records, tokenizer, config, cache_dir=cache, say=_say)
    held_out = None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data", cache_dir=cache, say=_say)
    if lora is not None:
        model = add_lora(model, lora, adapter_ids(tokenizer, plain=config.plain))
    # Generation must never produce a token that only training knows.
    model.generation_config.suppress_tokens = all_predictor_ids(tokenizer) or None
    scores = None
    if args.eval_generate is not None:
        scores, told["answers"] = _answer_scores(args, eval_records, system_prompts(train_records), model, tokenizer)
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
        trainer.selective = args.selective_checkpointing
        _refuse_unknown_metric(trainer)
    except (UserError, OSError):
        raise
    except Exception as error:  # of whatever kind: no step is taken yet, and one line says what is wrong
        raise cannot_start(error) from None
    return trainer, told


# What an evaluation logs beside the parts of the loss, and what of pairs where views are aligned.
_EVALUATED = ("loss", "runtime", "samples_per_second")
_OF_PAIRS = (
    *("matched_similarity", "shuffled_similarity", "source_rank", "target_rank", "source_rank_centred"),
    *("target_rank_centred", "retrieval_top1", "rank_pairs"),
)


def _refuse_unknown_metric(trainer: JepaTrainer) -> None:
    """Refuse to call a checkpoint the best by what no evaluation measures, which would end the run at the first one."""
    name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    pairs = _OF_PAIRS if trainer.objective.of_pairs else ()
    known = [*trainer.objective.names, *_EVALUATED, *pairs]
    # Only the task knows the names of its scores.
    answers = trainer.answer_scores is not None
    if trainer.prepared_eval is None or name in known or (answers and name.startswith("answer_")):
        return
    more = ", answer_SCORE" if answers else "; answer_SCORE needs --eval_generate"
    raise UserError(f"--metric_for_best_model {name} is unknown; evaluations log {', '.join(known)}{more}")


def _describe_stream(stream: RecordStream, args: argparse.Namespace, looked_at: int) -> str:
    size = stream.shuffle_buffer_size
    order = f"shuffled in a buffer of {size:,} records" if size else "in the order of the file"
    made = args.model_name.startswith("preset:") or args.train_tokenizer is not None
    trained = f"; the tokenizer was trained on the first {looked_at:,} records" if made else ""
    return f"streamed, {order}{trained}"


def _lora_settings(args: argparse.Namespace) -> LoraSettings | None:
    try:
        return LoraSettings(args.lora_rank, args.lora_alpha, args.lora_dropout) if args.lora else None
    except ValueError as error:
        raise UserError(f"--{error}") from None


def _describe(args: argparse.Namespace, trainer: JepaTrainer) -> dict[str, Any]:
    """What ``run.json`` says of a run that begins."""
    trainable, total = parameter_counts(trainer.model)
    lora = _lora_settings(args)
    return {
        "status": "running",
        **provenance(args, trainer.model),
        "model": args.model_name,
        "jepa": trainer.jepa.to_dict(),
        "lora": vars(lora) if lora else None,
        "loaded": {
            "dtype": args.dtype,
            "pretrain": args.pretrain,
            "train_tokenizer": args.train_tokenizer,
            "quantized": "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None,
            "chat_template": None if args.chat_template is None else fingerprint(args.chat_template),
            "attn_implementation": args.attn_implementation,
        },
        "encoding": {"used": trainer.encoding, "because": trainer.encoding_reason},
        "training": trainer.args.to_dict(),
        "order": _order(trainer.args, trainer.stream),
        **trainer.found(),
        "eval_counts": trainer.prepared_eval.counts if trainer.prepared_eval else None,
        "on_nonfinite": trainer.guard.on_nonfinite,
        "parameters": {"trained": trainable, "total": total},
        "versions": versions(),
        "launches": [],
    }


def _equal_compute(trainer: JepaTrainer, args: argparse.Namespace) -> EqualCompute:
    """Make a run as long as its compute allows, with a checkpoint wherever a regular epoch's compute is spent."""
    equal = equal_compute(trainer.plan, trainer.args.num_train_epochs)
    trainer.args.max_steps = equal.steps
    if "save_strategy" not in args.training:
        trainer.args.save_strategy = SaveStrategy.EPOCH
    trainer.add_callback(EqualComputeCallback(equal))
    return equal


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


def _run(trainer: JepaTrainer, folder: Path, checkpoint: str | None, record: dict[str, Any]) -> dict[str, float]:
    """Train, and note in the record how far it came; of failures see ``noting_failures``."""
    start = time.time()
    request = OneRequest(_promise)
    trainer.add_callback(StopCallback(request, trainer.args.world_size, trainer.args.device))

    def launched() -> None:
        record["launches"].append({"seconds": time.time() - start, "to_step": trainer.state.global_step})

    try:
        with request:
            metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
    except Stopped as stop:
        # Those who report elsewhere close their files.
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        launched()
        write_run(folder, {**record, "status": "interrupted"})
        leave_group()
        saved = folder / f"checkpoint-{trainer.state.global_step}"
        raise Stopped(stop.number, f"stopped; {saved} is saved; go on with --resume_from_checkpoint last") from None
    launched()
    return metrics


def _promise(number: int) -> None:
    name = signal.Signals(number).name
    _say(f"{name}: saving a checkpoint at the end of this step, then stopping; once more to stop at once")


# Settings on which depends what the processes do together, and when.
_TOGETHER = (
    *("max_steps", "num_train_epochs", "learning_rate", "optim", "weight_decay", "max_grad_norm", "bf16", "fp16"),
    *("save_strategy", "save_steps", "eval_strategy", "eval_steps", "logging_strategy", "logging_steps"),
)


def _agreed(record: dict[str, Any], checkpoint: str | None) -> dict[str, Any]:
    """What every process of a run must have been given."""
    return {
        "data": record["data"],
        "objectives": record["jepa"],
        "settings": record["order"] | {name: record["training"].get(name) for name in _TOGETHER},
        "checkpoints": None if checkpoint is None else Path(checkpoint).name,
    }


def _order(training: TrainingArguments, stream: RecordStream | None) -> dict[str, Any]:
    """What decides which record is trained when: a resumed run must keep it."""
    streamed = {} if stream is None else {"streaming": True, "shuffle_buffer_size": stream.shuffle_buffer_size}
    return {
        **streamed,
        "seed": training.seed,
        "data_seed": training.data_seed,
        "records_per_micro_step": training.per_device_train_batch_size * training.world_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_sampling_strategy": str(training.train_sampling_strategy),
    }


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


def _quantization(args: argparse.Namespace, training: TrainingArguments) -> dict[str, Any] | None:
    """What loads the frozen weights in 4 or 8 bits, if they are to be."""
    kind = "4bit" if args.load_in_4bit else "8bit" if args.load_in_8bit else None
    if kind is None:
        return None
    compute = compute_dtype(args.dtype, bf16=training.bf16, fp16=training.fp16)
    return quantization_options(kind, compute, training.device)
