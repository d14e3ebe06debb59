"""One training run from the command line: read, build, train, save, write down."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import SaveStrategy

from stepjepa.compute.equal_compute import EqualCompute, EqualComputeCallback, equal_compute
from stepjepa.config import JepaConfig
from stepjepa.data.prompts import system_prompts, write_trained_prompts
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.evaluation.answering import AnswerScores
from stepjepa.files import fingerprint, locked
from stepjepa.models.weights import parameter_counts, quantized
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
from stepjepa.terminal import print_rows
from stepjepa.training.build import build_trainer, say
from stepjepa.training.callbacks import StopCallback
from stepjepa.training.console import first_screen
from stepjepa.training.data import provenance, read_data
from stepjepa.training.dry_run import dry_run
from stepjepa.training.failures import recording_failures
from stepjepa.training.hub import upload, write_card
from stepjepa.training.plot import draw_metrics
from stepjepa.training.processes import leave_group, refuse_disagreement
from stepjepa.training.trainer import JepaTrainer

LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)

# Settings on which depends what the processes do together, and when.
_TOGETHER = (
    *("max_steps", "num_train_epochs", "learning_rate", "optim", "weight_decay", "max_grad_norm", "bf16", "fp16"),
    *("save_strategy", "save_steps", "eval_strategy", "eval_steps", "logging_strategy", "logging_steps"),
)

# Parts of run.json that a resumed run must not change.
_KEPT = ("model", "jepa", "lora", "loaded", "data", "order")


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
    level = LOG_LEVELS[min(max(args.debug, 0), 2)]
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if level == logging.WARNING:
        transformers.logging.set_verbosity_error()
    # Before anything is drawn, an adapter's weights among it.
    transformers.set_seed(args.finetune_seed)
    if args.dry_run or not is_main_process():
        return _train(args, config)
    with locked(Path(args.output_dir), "stepjepa train"):
        return _train(args, config)


def _train(args: argparse.Namespace, config: JepaConfig) -> dict[str, Any] | None:
    start = time.time()
    folder, checkpoint = open_run_folder(args.output_dir, args.resume_from_checkpoint, say)
    train_records, eval_records, files = read_data(args)
    if args.dry_run:
        return dry_run(args, config, train_records, eval_records)
    trainer, lora, told = build_trainer(args, config, train_records, eval_records)
    # Weights are read by now; a bar whenever they are written would tear that of the training.
    transformers.logging.disable_progress_bar()
    equal = _equal_compute(trainer, args) if args.same_flop else None
    if is_main_process():
        print_rows(first_screen(args, trainer, told, equal=equal, checkpoint=checkpoint))
    record = {
        **_describe(args, trainer),
        "lora": vars(lora) if lora else None,
        "data": files,
        "system_prompts": system_prompts(train_records),
        "same_flop": asdict(equal) if equal else None,
    }
    before = _begin(args, folder, checkpoint, record, train_records)
    scores = trainer.answer_scores
    with recording_failures(trainer, folder, record, before, checkpoint):
        with closing(scores) if isinstance(scores, AnswerScores) else nullcontext():
            metrics = _run(trainer, folder, checkpoint, record)
            if trainer.prepared_eval is not None:
                metrics |= _evaluated_last(trainer) or trainer.evaluate()
        save_whole(folder, partial(_save, trainer))
    _finish(trainer, folder, record, metrics, start)
    return record


def _begin(
    args: argparse.Namespace, folder: Path, checkpoint: str | None, record: dict[str, Any], records: list[Record]
) -> str | None:
    """Write down what a run begins with, and return what ``run.json`` said before.

    Raises:
        UserError: the processes were given different things, or a resumed run was begun with other settings.
    """
    refuse_disagreement(
        {
            "data": record["data"],
            "objectives": record["jepa"],
            "settings": record["order"] | {name: record["training"].get(name) for name in _TOGETHER},
            "checkpoints": None if checkpoint is None else Path(checkpoint).name,
        }
    )
    if args.resume_from_checkpoint is not None:
        launches = earlier_launches(
            folder,
            {name: record[name] for name in _KEPT},
            record["training"],
            allow_changes=args.allow_changes,
            say=say,
        )
        # Without a checkpoint it begins anew.
        record["launches"] = launches if checkpoint is not None else []
    before = text_of_run(folder)
    write_run(folder, record)
    if is_main_process():
        write_trained_prompts(folder, records)
    return before


def _finish(
    trainer: JepaTrainer, folder: Path, record: dict[str, Any], metrics: dict[str, float], start: float
) -> None:
    """Write down the results, and upload the model where that is asked for."""
    record |= {
        **data_summary(trainer),
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
    if is_main_process():
        write_card(folder, run=record)
        draw_metrics(folder)
    # Last: a run that is marked as finished is not begun again, whatever is missing.
    write_run(folder, record)
    leave_group()
    # The other processes need not wait for it.
    if trainer.args.push_to_hub and is_main_process():
        _upload(trainer, folder)


def _describe(args: argparse.Namespace, trainer: JepaTrainer) -> dict[str, Any]:
    """What ``run.json`` says of a run that begins."""
    trainable, total = parameter_counts(trainer.model)
    return {
        "status": "running",
        **provenance(args, trainer.model),
        "model": args.model_name,
        "jepa": trainer.jepa.to_dict(),
        "loaded": {
            "dtype": args.dtype,
            "pretrain": args.pretrain,
            "train_tokenizer": args.train_tokenizer,
            "quantized": quantized(args),
            "chat_template": None if args.chat_template is None else fingerprint(args.chat_template),
            "attn_implementation": args.attn_implementation,
            **({} if args.gguf_file is None else {"gguf_file": args.gguf_file}),
        },
        "encoding": {"used": trainer.encoding, "because": trainer.encoding_reason},
        "training": trainer.args.to_dict(),
        "order": _order(trainer.args),
        **data_summary(trainer),
        "eval_counts": trainer.prepared_eval.counts if trainer.prepared_eval else None,
        "on_nonfinite": trainer.guard.on_nonfinite,
        "parameters": {"trained": trainable, "total": total},
        "versions": versions(),
        "launches": [],
    }


def data_summary(trainer: JepaTrainer) -> dict[str, Any]:
    """What ``run.json`` says of the training records: ``counts``, ``tokens`` and ``template`` of ``Prepared``."""
    prepared = trainer.prepared
    assert prepared is not None
    tokens = {**prepared.tokens, "ratio": prepared.tokens["all"] / prepared.tokens["main"]}
    return {"counts": prepared.counts, "tokens": tokens, "template": prepared.template}


def _order(training: TrainingArguments) -> dict[str, Any]:
    """What decides which record is trained when: a resumed run must keep it."""
    return {
        "seed": training.seed,
        "data_seed": training.data_seed,
        "records_per_micro_step": training.per_device_train_batch_size * training.world_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "train_sampling_strategy": str(training.train_sampling_strategy),
    }


def _equal_compute(trainer: JepaTrainer, args: argparse.Namespace) -> EqualCompute:
    """Make a run as long as its compute allows, with a checkpoint wherever a regular epoch's compute is spent."""
    equal = equal_compute(trainer.plan, trainer.args.num_train_epochs)
    trainer.args.max_steps = equal.steps
    if "save_strategy" not in args.training:
        trainer.args.save_strategy = SaveStrategy.EPOCH
    trainer.add_callback(EqualComputeCallback(equal))
    return equal


def _run(trainer: JepaTrainer, folder: Path, checkpoint: str | None, record: dict[str, Any]) -> dict[str, float]:
    """Train, and note in the record how far it came; of failures see ``recording_failures``."""
    start = time.time()

    def promise(number: int) -> None:
        name = signal.Signals(number).name
        say(f"{name}: saving a checkpoint at the end of this step, then stopping; once more to stop at once")

    def launched() -> None:
        record["launches"].append({"seconds": time.time() - start, "to_step": trainer.state.global_step})

    request = OneRequest(promise)
    trainer.add_callback(StopCallback(request, trainer.args.world_size, trainer.args.device))
    _one_tensorboard_folder(trainer, folder, resumed=checkpoint is not None)
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
        raise Stopped(stop.number, f"stopped; {saved} is saved; resume with --resume_from_checkpoint last") from None
    launched()
    return metrics


def _one_tensorboard_folder(trainer: JepaTrainer, folder: Path, *, resumed: bool) -> None:
    """Have TensorBoard's files of all launches in one folder; a resumed run voids the steps that it runs again."""
    board = next((each for each in trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback)), None)
    if board is None:
        return
    board.logging_dir = board.logging_dir or str(folder / "tensorboard")
    if resumed:
        make = board._SummaryWriter
        board._SummaryWriter = lambda log_dir: make(log_dir=log_dir, purge_step=trainer.state.global_step + 1)


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


def _upload(trainer: JepaTrainer, folder: Path) -> None:
    """Upload the model of a finished run; what goes wrong leaves the run as it is."""
    name, revision = str(trainer.hub_model_id), trainer.args.hub_revision
    try:
        address = upload(folder, name, message=f"End of training, step {trainer.state.global_step}", revision=revision)
    except UserError as error:
        branch = f" --hub_revision {revision}" if revision else ""
        again = f"stepjepa export --model_path {folder} --push_to_hub {name}{branch}"
        raise UserError(f"the run is finished and saved, but: {error}; to try again: {again}") from None
    say(f"uploaded: {address}")
