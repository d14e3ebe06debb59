"""What a process of the benchmark does: make a suite's inputs, or measure one arm on them.

All arms load the same weights and the same tokenizer, and train on the same records with the same labels.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_arms import Arm
from bench_data import fill_vocabulary, suite_records
from bench_published import LAST_TOKEN, PublishedCollator, PublishedTrainer, Texts, tokenize
from transformers import Trainer, TrainerCallback, TrainingArguments

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, read_records
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.forests.forest import IGNORE, Forest
from stepjepa.forests.preparation import Prepared, prepare
from stepjepa.models.loading import LoraSettings, add_lora, load_model
from stepjepa.models.presets import find_preset, make_config, preset_tokenizer
from stepjepa.models.pretraining import random_model
from stepjepa.text.predictors import all_predictor_ids
from stepjepa.training.trainer import JepaTrainer

SEED = 42
LEARNING_RATE = 1e-3
LORA_RANK = 16
TEXT = "text_tokens"
# Records in reserve for those that are over length.
RESERVE = 1.4


class Stopwatch(TrainerCallback):
    """Wall clock over whole steps after the warm-up, and what was trained meanwhile; stops the run when time is up.

    Fetching and collating batches, the optimizer and the Trainer's bookkeeping are all inside.

    Args:
        warmup: steps that are not measured; fewer, but at least one, where they take longer than ``seconds``.
        seconds: how long to measure; the step under way is finished.
    """

    def __init__(self, warmup: int, seconds: float) -> None:
        self._warmup = warmup
        self._seconds = seconds
        self._ends: list[tuple[float, float, int, int, int]] = []
        self._begin: float | None = None
        self._start: int | None = None
        self._examples = 0
        self._tokens = 0
        self.text = 0

    def count(self, examples: int, tokens: int, text: int) -> None:
        """Add what a micro-batch holds: examples, tokens, and those of them that are the examples' own text."""
        self._examples += examples
        self._tokens += tokens
        self.text += text

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when the first step begins."""
        if self._begin is None:
            self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time; end the warm-up or the run."""
        now = time.perf_counter()
        self._ends.append((now, time.process_time(), self._examples, self._tokens, self.text))
        if self._start is not None:
            control.should_training_stop = now - self._ends[self._start][0] >= self._seconds
        elif len(self._ends) >= self._warmup or now - (self._begin or now) >= self._seconds:
            self._start = len(self._ends) - 1

    def measured(self) -> dict[str, Any]:
        """Seconds, steps, examples and tokens (without padding) after the warm-up.

        ``cpu_seconds`` are those of all threads: far below seconds x threads, they tell of other work on the machine.

        Raises:
            UserError: there was no step after the warm-up.
        """
        if self._start is None or len(self._ends) <= self._start + 1:
            raise UserError(f"{len(self._ends)} steps leave none to measure after the warm-up")
        start, end = self._ends[self._start], self._ends[-1]
        return {
            "steps": len(self._ends) - self._start - 1,
            "seconds": end[0] - start[0],
            "cpu_seconds": end[1] - start[1],
            "examples": end[2] - start[2],
            "tokens": end[3] - start[3],
            "text_tokens": end[4] - start[4],
        }

    def seconds_per_text_token(self, view_share: float) -> float:
        """Time for a token of the examples' own text.

        Steps with and without views are weighed as they come in a long run, not as they were drawn in this short one.

        Args:
            view_share: share of steps with views.
        """
        assert self._start is not None
        sums = {True: [0.0, 0], False: [0.0, 0]}
        for before, after in pairwise(self._ends[self._start :]):
            tokens, text = after[3] - before[3], after[4] - before[4]
            kind = sums[tokens > text]
            kind[0] += after[0] - before[0]
            kind[1] += text
        if 0 < view_share < 1 and sums[True][1] and sums[False][1]:
            with_views, without = (sums[kind][0] / sums[kind][1] for kind in (True, False))
            return view_share * with_views + (1 - view_share) * without
        return (sums[True][0] + sums[False][0]) / (sums[True][1] + sums[False][1])


def peak_mib() -> float:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


# -- the shared inputs ------------------------------------------------------------------------------------------------


def make_inputs(task: dict[str, Any]) -> dict[str, Any]:
    """Draw the records, build or load the model, and save both for the arms.

    Args:
        task: ``suite``, ``train_file``, ``max_length``, ``model``, ``vocabulary``, ``records`` (how many) and
            ``folder`` (where to).

    Returns:
        What there is to say about the data.

    Raises:
        UserError: there are too few records.
    """
    wanted, folder = int(task["records"]), Path(task["folder"])
    records = suite_records(task["suite"], task["train_file"], round(wanted * RESERVE), SEED)
    model, tokenizer = _make_model(task, records)
    config = JepaConfig(mode="regular", max_length=task["max_length"])
    drawn = random.Random(SEED).sample(records, min(len(records), round(wanted * RESERVE)))
    kept = [record for record in drawn if not _is_over_length(record, tokenizer, config)][:wanted]
    if len(kept) < wanted:
        raise UserError(
            f"{len(kept)} usable records, but {wanted} are wanted; lower --records", path=task["train_file"]
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


def _make_model(task: dict[str, Any], records: list[Record]) -> tuple[Any, Any]:
    texts = [message["content"] for record in records for message in record.messages]
    if not task["vocabulary"]:
        return load_model(task["model"], texts=texts, seed=SEED)
    _, small = preset_tokenizer(task["model"], texts)
    tokenizer = fill_vocabulary(small, task["vocabulary"], SEED)
    config = make_config(find_preset(task["model"]), tokenizer)
    ends = [tokenizer.eos_token_id]
    return random_model(config, tokenizer, seed=SEED, dtype=torch.float32, ends=ends), tokenizer


def _is_over_length(record: Record, tokenizer: Any, config: JepaConfig) -> bool:
    ids = tokenizer.apply_chat_template(list(record.messages), tokenize=True, return_dict=True)["input_ids"]
    return len(ids) > config.max_length


def _to_line(record: Record) -> dict[str, Any]:
    views = {} if record.text is None else {"text": record.text, "code": record.code}
    return {"messages": list(record.messages), **views}


# -- one arm ----------------------------------------------------------------------------------------------------------


def common_settings(task: dict[str, Any], arm: Arm) -> dict[str, Any]:
    """Arguments of the Trainer that all sides get alike: nothing is evaluated, saved or logged on the way."""
    batch = arm.batch or task["batch_size"]
    micro = arm.micro_batch or batch
    return {
        "output_dir": str(Path(task["folder"]) / "out"),
        # The stopwatch ends the run.
        "num_train_epochs": 100_000,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": batch // micro,
        "train_sampling_strategy": arm.sampling,
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
    """Train one arm on the shared records until its time is up.

    Args:
        task: ``arm``, ``folder`` (with the inputs), ``batch_size``, ``warmup``, ``seconds``, ``round`` and
            ``max_length``.

    Returns:
        What the stopwatch measured, examples per second (of the mean length of all records), peak memory with and
        before training, and for an arm of ours the price of its views in tokens.
    """
    arm = Arm(**task["arm"])
    records = read_records(Path(task["folder"]) / "records.jsonl")
    stopwatch = Stopwatch(task["warmup"], task["seconds"] * arm.patience)
    trainer, prepared = make_trainer(arm, task, records)
    result = {} if prepared is None else {"token_ratio": prepared.tokens["all"] / prepared.tokens["main"]}
    trainer.add_callback(stopwatch)
    text_per_record = sum(map(text_tokens, _features(trainer))) / len(records)
    count_batches(trainer, stopwatch)
    baseline = peak_mib()
    trainer.train()
    measured = stopwatch.measured()
    if arm.pad_to:
        # All rows are alike, however long their texts are.
        speed = measured["examples"] / measured["seconds"]
    else:
        # Which records fall into the time, long ones or short ones, is chance, above all where they are sorted.
        speed = 1 / (stopwatch.seconds_per_text_token(arm.view_share) * text_per_record)
    return result | measured | {"examples_per_second": speed, "peak_mib": peak_mib(), "baseline_mib": baseline}


def make_trainer(arm: Arm, task: dict[str, Any], records: list[Record]) -> tuple[Trainer, Prepared | None]:
    """The trainer of an arm, and its prepared records if it is ours."""
    if arm.is_trl:
        return _make_trl(arm, task, *_load(arm, task), records), None
    if arm.published is not None:
        return _make_published(arm, task, *_load(arm, task), records), None
    return _make_ours(arm, task, *_load(arm, task), records)


def _load(arm: Arm, task: dict[str, Any]) -> tuple[Any, Any]:
    """The shared model and tokenizer, with what the arm needs of them."""
    predictors = 1 if arm.published is not None else JepaConfig(**arm.jepa).predictors if arm.jepa is not None else 0
    model, tokenizer = load_model(str(Path(task["folder"]) / "model"), predictors=predictors or 0)
    if arm.lora:
        return add_lora(model, LoraSettings(LORA_RANK), all_predictor_ids(tokenizer)), tokenizer
    return model, tokenizer


def _make_ours(
    arm: Arm, task: dict[str, Any], model: Any, tokenizer: Any, records: list[Record]
) -> tuple[JepaTrainer, Prepared]:
    assert arm.jepa is not None
    trainer = JepaTrainer(
        model,
        TrainingArguments(**common_settings(task, arm)),
        JepaConfig(**arm.jepa),
        train_dataset=records,
        processing_class=tokenizer,
    )
    assert trainer.prepared is not None
    return trainer, trainer.prepared


def _make_published(arm: Arm, task: dict[str, Any], model: Any, tokenizer: Any, records: list[Record]) -> Trainer:
    assert arm.published is not None
    return PublishedTrainer(
        lbd=JepaConfig(last_token=LAST_TOKEN).lbd,
        model=model,
        args=TrainingArguments(**common_settings(task, arm), remove_unused_columns=False),
        data_collator=PublishedCollator(tokenizer, arm.published, arm.pad_to),
        train_dataset=tokenize(records, tokenizer, 1),
        processing_class=tokenizer,
    )


def _make_trl(arm: Arm, task: dict[str, Any], model: Any, tokenizer: Any, records: list[Record]) -> Trainer:
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_caching()
    disable_progress_bars()
    prepared = prepare(records, tokenizer, JepaConfig(mode="regular", max_length=task["max_length"]))
    forests = prepared.dataset.forests
    settings = common_settings(task, arm)
    if arm.packing:
        # As many rows as hold the records of a step on average.
        rows_per_step = task["batch_size"] * prepared.tokens["main"] / len(forests) / arm.packing
        settings["gradient_accumulation_steps"] = max(1, round(rows_per_step))
    # The same tokens with the same labels as ours: the loss is on the assistant's content and end of turn.
    rows = [
        {"input_ids": forest.input_ids.tolist(), "labels": [IGNORE, *forest.shift_labels[:-1].tolist()]}
        for forest in forests
    ]
    config = SFTConfig(**settings, max_length=arm.packing or task["max_length"], packing=bool(arm.packing))
    trainer: Trainer = SFTTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    return trainer


def _features(trainer: Trainer) -> Iterable[Any]:
    return trainer.prepared.dataset.forests if isinstance(trainer, JepaTrainer) else trainer.train_dataset  # type: ignore[union-attr]


def text_tokens(feature: Any) -> int:
    """Tokens of the own text of what a collator is given: a forest, texts of the published way, a row of TRL."""
    if feature is None:
        return 0
    if isinstance(feature, Forest):
        return feature.text_length
    return len(feature.chat if isinstance(feature, Texts) else feature["input_ids"])


def count_batches(trainer: Any, stopwatch: Stopwatch) -> None:
    """Have the stopwatch see every micro-batch."""
    collate, step = trainer.data_collator, trainer.training_step

    def counting(features: Any) -> Any:
        batch = collate(features)
        batch[TEXT] = torch.tensor(sum(map(text_tokens, features)))
        return batch

    def counted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        text = int(inputs.pop(TEXT))
        stopwatch.count(*batch_size(inputs), text)
        return step(model, inputs, *args, **kwargs)

    trainer.data_collator, trainer.training_step = counting, counted


def batch_size(inputs: dict[str, Any]) -> tuple[int, int]:
    """Examples, and tokens without padding, of a batch: ours, the published one, TRL's padded or packed one."""
    if "groups" in inputs:
        records = sum(int(group["num_records"][0]) for group in inputs["groups"])
        return records, sum(int(group["num_tokens"].sum()) for group in inputs["groups"])
    if "num_records" in inputs:
        return int(inputs["num_records"]), int(inputs["num_tokens"])
    if "attention_mask" in inputs:
        return len(inputs["input_ids"]), int(inputs["attention_mask"].sum())
    return int((inputs["position_ids"] == 0).sum()), inputs["input_ids"].numel()
