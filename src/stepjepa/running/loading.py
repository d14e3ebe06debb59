"""Load the model and the tokenizer of a run, with the tokens of its objective."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stepjepa.config.run import RunConfig
from stepjepa.models.architecture import base_model
from stepjepa.models.loading import load_model, load_tokenizer
from stepjepa.models.token_rows import add_plain_rows, add_predictor_rows
from stepjepa.models.weights import compute_dtype, quantization_options
from stepjepa.running.passed_objects import PassedObjects

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments


def load_model_and_tokenizer(
    config: RunConfig, passed: PassedObjects, texts: Iterable[str], training: TrainingArguments
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer with the tokens of the objective: the objects that were passed, or loaded ones.

    Args:
        config: of the run.
        passed: objects that were passed in Python.
        texts: the texts on which a preset's tokenizer is trained.
        training: the Trainer's arguments, which decide device and autocast.
    """
    jepa, quantization = config.jepa, config.quantized
    if passed.model is None:
        compute = compute_dtype(config.dtype, bf16=training.bf16, fp16=training.fp16)
        options = ("dtype", "pretrain", "chat_template", "attn_implementation", "trust_remote_code")
        model, tokenizer = load_model(
            str(config.model_name),
            texts=texts,
            predictors=jepa.used_predictors,
            seed=config.finetune_seed,
            plain=jepa.plain,
            quantization=None if quantization is None else quantization_options(quantization, compute, training.device),
            **{name: getattr(config, name) for name in options},
        )
        if passed.tokenizer is None:
            return model, tokenizer
    else:
        model = passed.model
    tokenizer = passed.tokenizer or load_tokenizer(str(model.config.name_or_path))
    base = base_model(model)
    if jepa.plain:
        add_plain_rows(base, tokenizer, config.finetune_seed)
    add_predictor_rows(base, tokenizer, jepa.used_predictors, config.finetune_seed)
    return model, tokenizer
