"""How the records of a run are packed into rows: row lengths by device and attention, and the collator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepjepa.batch.collate import Collator, Encoding, Packing
from stepjepa.chat.tokens import predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import base_model
from stepjepa.models.attention import uses_flex

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Default tokens per row: under a dense mask the cost of attention grows with the square of a row's length.
CPU_ROW, DENSE_ROW, FLEX_ROW = 1024, 2048, 8192
# Row length, divided by the model's width, at which masked attention costs as much on a CPU as the rest of a layer
# (measured on ``preset:tiny``: attention takes a quarter of a step at 250 tokens without a mask).
CPU_ATTENTION = 2.8


def packing(model: PreTrainedModel, config: JepaConfig, device_type: str, processes: int = 1) -> Packing:
    """How the sequences of a micro-batch are packed for a model after ``setup.set_up``: arguments of ``Collator``."""
    base = base_model(model)
    decoder, on_cpu = base.config.get_text_config(), device_type == "cpu"
    return {
        "row_length": config.row_length or (CPU_ROW if on_cpu else FLEX_ROW if uses_flex(base) else DENSE_ROW),
        # Processes that train together must all run equally many passes, so if there are several, each runs one.
        "attention_length": round(CPU_ATTENTION * decoder.hidden_size) if on_cpu and processes == 1 else None,
        "share_prefixes": config.share_prefixes,
        "positions": getattr(decoder, "max_position_embeddings", None),
    }


def make_collator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    *,
    encoding: Encoding,
    device_type: str,
    processes: int,
    prompt_labels: bool,
) -> Collator:
    """The collator for a model after ``setup.set_up``.

    Args:
        model: that of ``set_up``.
        tokenizer: the same.
        config: the same.
        encoding: from ``set_up``.
        device_type: of the devices that train, such as ``cuda``.
        processes: number that train together.
        prompt_labels: also label the tokens of the prompt, for an objective with the term ``prompt_loss``.
    """
    return Collator.of(
        config,
        predictor_ids(tokenizer, config.used_predictors),
        encoding=encoding,
        prompt_labels=prompt_labels,
        **packing(model, config, device_type, processes),
        pad_id=tokenizer.pad_token_id or 0,
    )
