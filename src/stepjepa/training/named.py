"""Load the model, tokenizer and records that a ``JepaTrainer`` was given by name."""

from __future__ import annotations

import os
from typing import Any

from stepjepa.base.spool import Spooled
from stepjepa.data.records import as_records
from stepjepa.data.sources import each_of_any
from stepjepa.models.loading import load_model, load_tokenizer
from stepjepa.models.presets import PREFIX


def load_named(model: Any, tokenizer: Any, data: Any, *, predictors: int, seed: int) -> tuple[Any, Any, Any]:
    """Resolve names: load ``model``, ``tokenizer`` (None: the model's own) and ``data`` that were given as strings.

    A preset's tokenizer is trained on the records. A model that is loaded here gets ``predictors`` predictor tokens.
    """
    if isinstance(data, str | os.PathLike):
        data = Spooled(each_of_any(data))
    loaded_tokenizer, texts = tokenizer, iter(())
    if isinstance(model, str):
        if model.startswith(PREFIX):
            data = Spooled(as_records(data))
            texts = (message["content"] for record in data for message in record.messages)
        model, loaded_tokenizer = load_model(model, texts=texts, predictors=predictors, seed=seed)
    elif tokenizer is None:
        loaded_tokenizer = load_tokenizer(str(model.config.name_or_path))
    return model, loaded_tokenizer if tokenizer is None else tokenizer, data
