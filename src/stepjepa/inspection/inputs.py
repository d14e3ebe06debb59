"""The records, tokenizer and model that ``inspect`` and ``verify`` look at, by the settings of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from stepjepa.base.errors import UserError, raising_user_errors
from stepjepa.base.terminal import note
from stepjepa.chat.special_tokens import add_plain_tokens, add_predictor_tokens
from stepjepa.config.lora import LoraSettings
from stepjepa.config.run import RunConfig
from stepjepa.data.reading_notes import describe_columns
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.inspection.verification import Subject
from stepjepa.models.loading import add_lora, load_model, load_tokenizer
from stepjepa.models.presets import PREFIX, preset_config, train_tokenizer
from stepjepa.models.token_rows import adapter_rows
from stepjepa.running.data import check_inputs, read_file, read_mixture
from stepjepa.tasks.stepmath import Difficulty, generate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def training_records(run: RunConfig) -> Sequence[Record]:
    """Read the records of the training file or of the data sets; print notes on columns and on unused parts.

    Raises:
        UserError: no data are named, or a record is wrong.
    """
    if run.train_file is None and run.dataset is None:
        raise UserError("name the data with one of `train_file` and `dataset`")
    check_inputs(run)
    records, _ = read_mixture(run) if run.dataset is not None else read_file(run, str(run.train_file))
    if (columns := describe_columns(records[0])) is not None:
        note(f"columns: {columns}")
    return records


def name_of_data(run: RunConfig) -> str | None:
    """Return the training file or the data sets of a run, as they were named; None if none were."""
    return run.train_file if run.dataset is None else " + ".join(run.dataset)


def generated_records(run: RunConfig, seed: int) -> list[Record]:
    """Return built-in problems, for a model without a training file."""
    check_inputs(run)
    generated = generate(size=200, seed=seed, difficulty=Difficulty())
    return [parse_record(value, "built-in problems", line) for line, value in enumerate(generated, start=1)]


def training_tokenizer(run: RunConfig, records: Sequence[Record]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the run with its predictor tokens; that of a preset is trained on the records."""
    name = str(run.model_name)
    if name.startswith(PREFIX):
        tokenizer = train_tokenizer(_texts(records), preset_config(name).vocab_size, run.chat_template)
    else:
        tokenizer = load_tokenizer(name, chat_template=run.chat_template, trust_remote_code=run.trust_remote_code)
    if run.jepa.plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, run.jepa.predictors or 0)
    return tokenizer


def training_subject(
    run: RunConfig, name: str, records: Sequence[Record], sample: Sequence[Record], *, seed: int, lora: bool
) -> Subject:
    """Load the model to verify, on the accelerator if there is one.

    Args:
        run: the settings.
        name: the model, or a preset, whose tokenizer is trained on all ``records``.
        records: the records of the training file.
        sample: those that are verified.
        seed: seed of random weights.
        lora: verify the optimisation step with a LoRA adapter.
    """
    config = run.jepa
    model, tokenizer = load_model(
        name,
        texts=_texts(records),
        predictors=config.used_predictors,
        seed=seed,
        plain=config.plain,
        chat_template=run.chat_template,
        trust_remote_code=run.trust_remote_code,
    )
    model = model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    with raising_user_errors():
        trained = adapter_rows(model, tokenizer, plain=config.plain)
        adapter = (lambda base: add_lora(base, LoraSettings(), trained)) if lora else None
        trusted = run.trust_remote_code
        return Subject(model.eval(), tokenizer, config, sample, lora=adapter, trust_remote_code=trusted)


def _texts(records: Sequence[Record]) -> Iterator[str]:
    return (message["content"] for record in records for message in record.messages)
