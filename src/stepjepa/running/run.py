"""One training run from the command line: read, build, train, save, write down."""

import json
import logging
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import SaveStrategy

from stepjepa.base.errors import UserError, unexpected
from stepjepa.base.files import DISK_ERRORS, atomic_write, locked
from stepjepa.base.processes import is_main_process
from stepjepa.base.signals import Interruptions, Stopped
from stepjepa.base.terminal import print_rows
from stepjepa.base.typed_json import Origin, from_json, to_json
from stepjepa.batch.prepare import CacheDir, prepare
from stepjepa.config.lora import LoraSettings
from stepjepa.config.run import PLACES, RunConfig
from stepjepa.data.records import Record, describe_columns
from stepjepa.evaluation.answering import AnswerScores, spread
from stepjepa.models.loading import add_lora, load_model
from stepjepa.models.token_rows import adapter_ids
from stepjepa.models.weights import compute_dtype, quantization_options
from stepjepa.running.data import read_data
from stepjepa.running.screen import describe_run, draw_metrics, first_screen
from stepjepa.running.transformers import training_arguments
from stepjepa.store import folder as run_folder
from stepjepa.store.hub import refuse_lone_adapter, upload, write_card
from stepjepa.store.prompts import common_system_prompt, system_prompts, with_system_prompt, write_trained_prompts
from stepjepa.store.record import Launch, Lora, Results, RunRecord, read_record, remove_start, write_record
from stepjepa.store.resume import earlier_launches
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.registry import choose_task, keep
from stepjepa.training.callbacks import StopCallback
from stepjepa.training.plan import EqualComputeCallback, equal_compute
from stepjepa.training.saving import way_back
from stepjepa.training.trainer import JepaTrainer


def train(run: RunConfig, *, command: list[str] | None = None) -> RunRecord:
    """Train, and return the record of the finished run.

    UserError for whatever went wrong: before the first step nothing stays written, later it says what is saved.
    """
    if not logging.getLogger().isEnabledFor(logging.INFO):
        transformers.logging.set_verbosity_error()
    # Before anything is drawn, an adapter's weights among it.
    transformers.set_seed(run.finetune_seed)
    alone = locked(Path(str(run.output_dir))) if is_main_process() else nullcontext()
    try:
        with alone:
            return _train(run, command)
    except (UserError, OSError):
        raise
    except Exception as error:  # of whatever kind: one line says what is wrong
        raise UserError(unexpected(error)) from None
    finally:
        _settle()


def _train(run: RunConfig, command: list[str] | None) -> RunRecord:
    start = time.time()
    folder, checkpoint = run_folder.open_run_folder(str(run.output_dir), run.resume_from_checkpoint, _say)
    train_records, eval_records, files = read_data(run)
    trainer, lora, told = _build(run, train_records, eval_records)
    # Weights are read by now; a bar whenever they are written would tear that of the training.
    transformers.logging.disable_progress_bar()
    equal = None
    if run.same_flop:
        # As long as its compute allows, with a checkpoint wherever a regular epoch's compute is spent.
        equal = equal_compute(trainer.plan, trainer.args.num_train_epochs)
        trainer.args.max_steps = equal.steps
        if "save_strategy" not in run.trainer:
            trainer.args.save_strategy = SaveStrategy.EPOCH
        trainer.add_callback(EqualComputeCallback(equal))
    if is_main_process():
        print_rows(first_screen(run, trainer, equal, {**told, "resumed from": checkpoint}))
    record = replace(
        describe_run(run, trainer, command),
        lora=from_json(Lora, vars(lora), Origin("--lora", "pass another value")) if lora else None,
        data=dict(files),
        system_prompts=system_prompts(train_records),
        same_flop=asdict(equal) if equal else None,
    )
    # Files may lie elsewhere on another machine; what is in them is compared.
    settings = {name: value for name, value in run.to_flat().items() if name not in PLACES}
    started = checkpoint and Path(checkpoint).name
    _refuse_disagreement({"data": to_json(files), "settings": settings, "checkpoints": started})
    if run.resume_from_checkpoint is not None:
        launches = earlier_launches(folder, checkpoint, record, allow_changes=run.allow_changes, say=_say)
        # Without a checkpoint it begins anew.
        record = replace(record, launches=launches if checkpoint is not None else [])
    before = read_record(folder) if (folder / run_folder.RUN_FILE).is_file() else None
    write_record(folder, record)
    if is_main_process():
        with atomic_write(folder / run_folder.CONFIG_FILE) as stream:
            stream.write(run.to_yaml())
        write_trained_prompts(folder, train_records)
    scores = trainer.answer_scores
    with _recording_failures(trainer, folder, record, before, checkpoint):
        with closing(scores) if isinstance(scores, AnswerScores) else nullcontext():
            metrics = _run(trainer, folder, checkpoint, record)
            if trainer.prepared_eval is not None:
                # Unless it was after the last step, and of these weights.
                last = not trainer.args.load_best_model_at_end and trainer.evaluated.get(trainer.state.global_step)
                metrics |= last or trainer.evaluate()
        # What --push_to_hub uploads is the run folder, once all of it is there.
        run_folder.save_whole(folder, lambda part: trainer.save_model(part, _internal_call=True))
    record = record.finished(
        Results(
            steps=trainer.state.global_step,
            tokens=trainer.meter.num_tokens,
            flops=trainer.state.total_flos,
            last_log=next((line for line in reversed(trainer.state.log_history) if "lm_loss" in line), {}),
            train_seconds=sum(launch.seconds for launch in record.launches),
            seconds=time.time() - start,
            evaluation={name: value for name, value in metrics.items() if name.startswith("eval_")},
        )
    )
    if is_main_process():
        write_card(folder, run=record)
        draw_metrics(folder)
    # Last: a run that is marked as finished is not begun again, whatever is missing.
    write_record(folder, record)
    _leave_group()
    # The other processes need not wait for it.
    if trainer.args.push_to_hub and is_main_process():
        refuse_lone_adapter(folder)
        _say(f"uploaded: {upload(folder, str(trainer.hub_model_id), revision=trainer.args.hub_revision)}")
    return record


def _say(line: str) -> None:
    if is_main_process():
        print(line, flush=True)


# -- before the first step ---------------------------------------------------------------------------------------------


def _build(
    run: RunConfig, train_records: list[Record], eval_records: list[Record]
) -> tuple[JepaTrainer, LoraSettings | None, dict[str, str | None]]:
    """The trainer of a run, the settings of its adapter, and rows for ``first_screen``."""
    config, lora, kind = run.jepa, run.lora, run.quantized
    training = training_arguments(run, bool(eval_records))
    compute = compute_dtype(run.dtype, bf16=training.bf16, fp16=training.fp16)
    same = ("dtype", "pretrain", "chat_template", "attn_implementation", "trust_remote_code")
    model, tokenizer = load_model(
        str(run.model_name),
        texts=(message["content"] for record in train_records for message in record.messages),
        predictors=config.used_predictors,
        seed=run.finetune_seed,
        plain=config.plain,
        quantization=None if kind is None else quantization_options(kind, compute, training.device),
        **{name: getattr(run, name) for name in same},
    )
    cache: CacheDir = False if run.no_cache else run.cache_dir
    data, held_out = prepare(train_records, tokenizer, config, cache_dir=cache, say=_say), None
    if eval_records:
        held_out = prepare(eval_records, tokenizer, config, what="evaluation data", cache_dir=cache, say=_say)
    if lora is not None:
        model = add_lora(model, lora, adapter_ids(model, tokenizer, plain=config.plain))
    told = {"columns": describe_columns(train_records[0])}
    scores = None
    if run.eval_generate is not None:
        try:
            scores, told["answers"] = _answer_scores(run, eval_records, train_records, model, tokenizer)
        except UserError as error:
            # Worded for 'stepjepa evaluate', whose settings have other names here.
            raise UserError(re.sub(r"--(task|max_new_tokens)\b", r"--eval_\1", str(error))) from None
    trainer = JepaTrainer(
        model,
        training,
        config,
        train_dataset=data,
        eval_dataset=held_out,
        processing_class=tokenizer,
        answer_scores=scores,
        track_flop=run.track_flop,
    )
    return trainer, lora, told


def _answer_scores(
    run: RunConfig, records: list[Record], trained: list[Record], model: Any, tokenizer: Any
) -> tuple[AnswerScores, str]:
    """What answers and scores during training, checked on the model as it is before; and what to say of it."""
    task = choose_task(run.eval_task, records, TaskOptions(run.spider_path, run.missing_databases))
    asked = spread(list(keep(task, records)[0].values()), run.eval_generate or 0)
    # As 'stepjepa evaluate' will ask the trained model.
    if (prompt := common_system_prompt(system_prompts(trained))) is not None:
        asked = with_system_prompt(asked, prompt)
    scores = AnswerScores(
        asked,
        task,
        tokenizer,
        max_new_tokens=run.eval_max_new_tokens,
        batch_size=run.batch_size,
        plain=run.jepa.plain,
    )
    scores.check(model)
    return scores, f"to {len(asked):,} records at every evaluation, task {task.name}"


def _refuse_disagreement(parts: Mapping[str, Any]) -> None:
    """Have all processes end with the same error where they were not given the same, by the names of its parts.

    Without it they would wait for each other in vain, or train on gradients that do not belong together.
    """
    if torch.distributed.is_initialized():
        given: list[dict[str, str]] = [{}] * torch.distributed.get_world_size()
        own = {name: json.dumps(value, default=str, sort_keys=True) for name, value in parts.items()}
        torch.distributed.all_gather_object(given, own)
        for name in parts:
            if len({each[name] for each in given}) > 1:
                raise UserError(f"the processes were given different {name}; start all with the same command and files")


# -- training ----------------------------------------------------------------------------------------------------------


def _run(trainer: JepaTrainer, folder: Path, checkpoint: str | None, record: RunRecord) -> dict[str, float]:
    """Train, and note in the record how far it came."""
    start = time.time()

    def promise(number: int) -> None:
        name = signal.Signals(number).name
        _say(f"{name}: saving a checkpoint at the end of this step, then stopping; once more to stop at once")

    def launched() -> None:
        record.launches.append(Launch(seconds=time.time() - start, to_step=trainer.state.global_step))

    request = Interruptions(promise)
    trainer.add_callback(StopCallback(request, trainer.args.world_size, trainer.args.device))
    for board in trainer.callback_handler.callbacks:
        if isinstance(board, TensorBoardCallback):
            board.logging_dir = board.logging_dir or str(folder / "tensorboard")
    try:
        with request:
            metrics = dict(trainer.train(resume_from_checkpoint=checkpoint).metrics)
    except Stopped as stop:
        # Those who report elsewhere close their files.
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        launched()
        write_record(folder, replace(record, status="interrupted"))
        _leave_group()
        saved = folder / f"checkpoint-{trainer.state.global_step}"
        way = "it holds the model only" if trainer.args.save_only_model else "resume with --resume_from_checkpoint last"
        raise Stopped(stop.number, f"stopped; {saved} is saved; {way}") from None
    launched()
    return metrics


@contextmanager
def _recording_failures(
    trainer: JepaTrainer, folder: Path, record: RunRecord, before: RunRecord | None, checkpoint: str | None
) -> Iterator[None]:
    """Note in ``run.json`` that a run failed; put back what it held ``before`` where this launch took no step."""
    try:
        yield
    except Exception as error:  # of whatever kind: the record must not say for ever that the run goes on
        for callback in trainer.callback_handler.callbacks:
            # The thread of TensorBoard's writer would go on writing into a folder that is removed.
            if getattr(callback, "tb_writer", None) is not None:
                callback.tb_writer.close()
        trained = trainer.state.global_step > getattr(trainer, "_initial_global_step", math.inf)
        with suppress(OSError):
            if trained or (isinstance(error, OSError) and before is None):
                write_record(folder, replace(record, status="failed", error=str(error)))
            elif before is not None:
                write_record(folder, before)
            else:
                shutil.rmtree(folder / "tensorboard", ignore_errors=True)
                remove_start(folder)
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            way = way_back(folder, "once it can be written to, ")
            raise UserError(f"{error.strerror}; {way}", path=error.filename or folder) from None
        if isinstance(error, UserError | OSError):
            raise
        told = unexpected(error)
        if trained:
            told = f"the run failed after step {trainer.state.global_step} ({told}); {way_back(folder)}"
        raise UserError(f"{told}; --debug 2 shows where it was", path=None if trained else checkpoint) from None


def _leave_group() -> None:
    """End the group of processes: left to the interpreter's end, its threads now and then abort the process."""
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):  # another process is gone
            torch.distributed.barrier()
        _settle()
        torch.distributed.destroy_process_group()


def _settle() -> None:
    """Give gloo's threads 0.4 seconds to release their tensors, for which they need the interpreter.

    Whoever drops the group waits for these threads without releasing the interpreter: a deadlock (torch 2.13: 6 of 40
    launches of two processes that train for three steps and leave).
    """
    if torch.distributed.is_initialized():
        time.sleep(0.4)
