"""Load the model, tokenizer and records that a ``JepaTrainer`` was given by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stepjepa.base.spool import Spooled
from stepjepa.batch.dataset import Prepared
from stepjepa.data.record import Data
from stepjepa.data.records import as_records
from stepjepa.data.sources import each_record_of_data
from stepjepa.models.architecture import base_model
from stepjepa.models.loading import load_model, load_tokenizer
from stepjepa.models.presets import PREFIX

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_named(
    model: PreTrainedModel | nn.Module | str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    data: Data | Prepared | None,
    *,
    predictors: int,
    seed: int,
) -> tuple[PreTrainedModel | nn.Module, PreTrainedTokenizerBase, Data | Prepared | None]:
    """Resolve names: load ``model``, ``tokenizer`` (None: the model's own) and ``data`` that were given as strings.

    A preset's tokenizer is trained on the records. A model that is loaded here gets ``predictors`` predictor tokens.

    Args:
        model: a model, or the preset, folder or hub id of one.
        tokenizer: None for the model's own; that of a preset is trained on the records.
        data: records, prepared data, or a name of records; None for none.
        predictors: number of predictor tokens that a model which is loaded here gets.
        seed: of random weights and new rows.

    Raises:
        ValueError: a preset is named without records.
    """
    if isinstance(data, str | os.PathLike):
        data = Spooled(each_record_of_data(data))
    texts: Iterator[str] = iter(())
    if isinstance(model, str | os.PathLike):
        model = os.fspath(model)
        if model.startswith(PREFIX):
            if data is None or isinstance(data, Prepared):
                kind = type(data).__name__
                raise ValueError(f"train_dataset: expected records to train the tokenizer of '{model}' on, got {kind}")
            data = records = Spooled(as_records(data))
            texts = (str(message["content"]) for record in records for message in record.messages)
        model, its_tokenizer = load_model(model, texts=texts, predictors=predictors, seed=seed)
        return model, tokenizer or its_tokenizer, data
    if tokenizer is None:
        tokenizer = load_tokenizer(str(base_model(model).config.name_or_path))
    return model, tokenizer, data
