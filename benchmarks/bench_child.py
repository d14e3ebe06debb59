"""One process of the benchmark: make the shared inputs, or measure one arm. Started by ``bench.py``.

Every arm has a process of its own, so that its peak memory is its own. All of them load the same weights and the same
tokenizer, and train on the same records with the same labels.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_arms import GENERATED, Arm
from transformers import Trainer, TrainerCallback, TrainingArguments

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, parse_record, read_records
from stepjepa.errors import UserError
from stepjepa.files import write_json, write_jsonl
from stepjepa.forests.forest import IGNORE
from stepjepa.forests.preparation import Prepared, prepare
from stepjepa.models.loading import load_model
from stepjepa.tasks.stepmath import generate
from stepjepa.training.trainer import JepaTrainer

SEED = 42
LEARNING_RATE = 1e-3
# Records in reserve for those that are over length.
RESERVE = 1.25


class Stopwatch(TrainerCallback):
    """Wall clock from the end of the last warm-up step to the end of the last step, and what was trained meanwhile.

    Fetching and collating batches, the optimizer and the Trainer's bookkeeping are all inside.

    Args:
        warmup: steps that are not measured.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self._ends: list[tuple[float, float, int, int]] = []
        self._examples = 0
        self._tokens = 0

    def count(self, examples: int, tokens: int) -> None:
        """Add what a micro-batch holds."""
        self._examples += examples
        self._tokens += tokens

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self._ends.append((time.perf_counter(), time.process_time(), self._examples, self._tokens))

    def measured(self) -> dict[str, Any]:
        """Seconds, steps, examples and tokens (without padding) after the warm-up.

        ``cpu_seconds`` are those of all threads: far below seconds x threads, they tell of other work on the machine.

        Raises:
            UserError: there was no step after the warm-up.
        """
        if len(self._ends) <= self._warmup:
            raise UserError(f"{len(self._ends)} steps leave none to measure after {self._warmup} of warm-up")
        start, end = self._ends[self._warmup - 1], self._ends[-1]
        return {
            "steps": len(self._ends) - self._warmup,
            "seconds": end[0] - start[0],
            "cpu_seconds": end[1] - start[1],
            "examples": end[2] - start[2],
            "tokens": end[3] - start[3],
        }


def peak_mib() -> float:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


# -- the shared inputs ------------------------------------------------------------------------------------------------


def make_inputs(task: dict[str, Any]) -> dict[str, Any]:
    """Draw the records, build or load the model, and save both for the arms.

    Args:
        task: ``train_file``, ``max_length``, ``model``, ``records`` (how many) and ``folder`` (where to).

    Returns:
        What there is to say about the data.

    Raises:
        UserError: there are too few records.
    """
    wanted, folder = int(task["records"]), Path(task["folder"])
    records = _read_or_generate(task["train_file"], wanted)
    texts = (message["content"] for record in records for message in record.messages)
    model, tokenizer = load_model(task["model"], texts=texts, seed=SEED)
    config = JepaConfig(mode="regular", max_length=task["max_length"])
    drawn = random.Random(SEED).sample(records, min(len(records), round(wanted * RESERVE)))
    kept = [record for record in drawn if not _is_over_length(record, tokenizer, config)][:wanted]
    if len(kept) < wanted:
        raise UserError(
            f"{len(kept)} usable records, but the steps need {wanted}; lower --steps or --batch_size",
            path=task["train_file"],
        )
    lengths = [len(forest) for forest in prepare(kept, tokenizer, config).dataset.forests]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_jsonl(folder / "records.jsonl", map(_to_line, kept))
    return {
        "records": len(kept),
        "tokens_per_example": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _read_or_generate(train_file: str, wanted: int) -> list[Record]:
    if train_file == GENERATED:
        return [parse_record(value) for value in generate(round(wanted * RESERVE), SEED)]
    return read_records(train_file)


def _is_over_length(record: Record, tokenizer: Any, config: JepaConfig) -> bool:
    ids = tokenizer.apply_chat_template(list(record.messages), tokenize=True, return_dict=True)["input_ids"]
    return len(ids) > config.max_length


def _to_line(record: Record) -> dict[str, Any]:
    views = {} if record.text is None else {"text": record.text, "code": record.code}
    return {"messages": list(record.messages), **views}


# -- one arm ----------------------------------------------------------------------------------------------------------


def common_settings(task: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer that both sides get alike: nothing is evaluated, saved or logged on the way."""
    return {
        "output_dir": str(Path(task["folder"]) / "out"),
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "seed": SEED + task["round"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train one arm for one epoch of the shared records.

    Args:
        task: ``arm``, ``folder`` (with the inputs), ``batch_size``, ``warmup``, ``round`` and ``max_length``.

    Returns:
        What the stopwatch measured, examples per second, peak memory with and before training, and for an arm of ours
        the price of its views in tokens.
    """
    arm = Arm(**task["arm"])
    model, tokenizer = load_model(str(Path(task["folder"]) / "model"))
    records = read_records(Path(task["folder"]) / "records.jsonl")
    stopwatch = Stopwatch(task["warmup"])
    result: dict[str, Any] = {}
    trainer: Trainer
    if arm.is_trl:
        trainer = _make_trl(arm, task, model, tokenizer, records)
    else:
        trainer, prepared = _make_ours(arm, task, model, tokenizer, records)
        result["token_ratio"] = prepared.tokens["all"] / prepared.tokens["main"]
    trainer.add_callback(stopwatch)
    _count_batches(trainer, stopwatch)
    baseline = peak_mib()
    trainer.train()
    measured = stopwatch.measured()
    speed = measured["examples"] / measured["seconds"]
    return result | measured | {"examples_per_second": speed, "peak_mib": peak_mib(), "baseline_mib": baseline}


def _batches(arm: Arm, task: dict[str, Any]) -> dict[str, int]:
    micro = arm.micro_batch or task["batch_size"]
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": task["batch_size"] // micro}


def _make_ours(
    arm: Arm, task: dict[str, Any], model: Any, tokenizer: Any, records: list[Record]
) -> tuple[JepaTrainer, Prepared]:
    assert arm.jepa is not None
    trainer = JepaTrainer(
        model,
        TrainingArguments(
            **common_settings(task),
            **_batches(arm, task),
            train_sampling_strategy=arm.sampling,
        ),
        JepaConfig(**arm.jepa),
        train_dataset=records,
        processing_class=tokenizer,
    )
    assert trainer.prepared is not None
    return trainer, trainer.prepared


def _make_trl(arm: Arm, task: dict[str, Any], model: Any, tokenizer: Any, records: list[Record]) -> Trainer:
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    disable_progress_bars()
    prepared = prepare(records, tokenizer, JepaConfig(mode="regular", max_length=task["max_length"]))
    forests = prepared.dataset.forests
    batches = _batches(arm, task)
    if arm.packing:
        # As many rows as hold the records of a step on average.
        rows_per_step = task["batch_size"] * prepared.tokens["main"] / len(forests) / task["max_length"]
        batches["gradient_accumulation_steps"] = max(1, round(rows_per_step))
    # The same tokens with the same labels as ours: the loss is on the assistant's content and end of turn.
    rows = [
        {"input_ids": forest.input_ids.tolist(), "labels": [IGNORE, *forest.shift_labels[:-1].tolist()]}
        for forest in forests
    ]
    config = SFTConfig(
        **common_settings(task),
        **batches,
        train_sampling_strategy=arm.sampling,
        max_length=task["max_length"],
        packing=arm.packing,
    )
    trainer: Trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    return trainer


def _count_batches(trainer: Trainer, stopwatch: Stopwatch) -> None:
    """Have the stopwatch see every micro-batch."""
    inner = trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        stopwatch.count(*batch_size(inputs))
        return inner(model, inputs, *args, **kwargs)

    trainer.training_step = counted


def batch_size(inputs: dict[str, Any]) -> tuple[int, int]:
    """Examples, and tokens without padding, of a batch: ours, TRL's padded one, or TRL's packed one."""
    if "groups" in inputs:
        records = sum(int(group["num_records"][0]) for group in inputs["groups"])
        return records, sum(int(group["num_tokens"].sum()) for group in inputs["groups"])
    if "attention_mask" in inputs:
        return len(inputs["input_ids"]), int(inputs["attention_mask"].sum())
    return int((inputs["position_ids"] == 0).sum()), inputs["input_ids"].numel()


def main(task_file: str) -> int:
    """Do what a task file says and write the result to the file that it names."""
    task = json.loads(Path(task_file).read_text(encoding="utf-8"))
    torch.set_num_threads(task["threads"])
    try:
        result = measure(task) if "arm" in task else make_inputs(task)
    except UserError as error:
        result = {"error": str(error)}
    write_json(task["result"], result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
