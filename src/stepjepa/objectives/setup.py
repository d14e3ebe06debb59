"""Prepare a model for an objective: add predictor tokens, switch attention to trees."""

from typing import Any

from stepjepa.batch.collate import Collator, Encoding, Packing
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.chat.tokens import predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.architecture import base_model
from stepjepa.models.attention import enable_trees, uses_flex
from stepjepa.models.encode import check_layer
from stepjepa.models.lm_head import LMHead
from stepjepa.models.probe import choose_encoding
from stepjepa.models.token_rows import added_rows, give_plain_tokens, give_predictors, train_rows

# Default tokens per row: under a dense mask the cost of attention grows with the square of a row's length.
CPU_ROW, DENSE_ROW, FLEX_ROW = 1024, 2048, 8192
# Row length, divided by the model's width, at which masked attention costs as much on a CPU as the rest of a layer
# (measured on ``preset:tiny``: attention takes a quarter of a step at 250 tokens without a mask).
CPU_ATTENTION = 2.8


def set_up(model: Any, tokenizer: Any, config: JepaConfig, seed: int = 42) -> tuple[Encoding, str]:
    """Prepare a causal language model, or a PEFT wrapper of one, and its tokenizer for an objective, in place.

    Adds tokens that they lack, with rows drawn by the seed, and switches attention to trees if the model can run them.
    ``architecture.attach_heads`` attaches the heads of terms. Returns the encoding, see ``collate.Encoding``, and the
    reason for it. ValueError if the model can't be trained with this objective; the message names the remedy.
    """
    base = base_model(model)
    new = give_plain_tokens(base, tokenizer, seed) if config.plain else []
    give_predictors(base, tokenizer, config.used_predictors, seed)
    if hasattr(model, "peft_config"):
        # Also the rows of tokens that the base lacked, whichever they are.
        new = [*predictor_ids(tokenizer, config.used_predictors), *new, *added_rows(base)]
        train_rows(model, sorted({*new}))
    chosen = set_up_attention(model, config)
    LMHead(model)  # runs the model on a few tokens, which must happen before it is wrapped
    return chosen


def set_up_attention(model: Any, config: JepaConfig) -> tuple[Encoding, str]:
    """The part of :func:`set_up` that reads no weights, so that it also works for a model on the meta device.

    The model must have rows for all tokens of the objective.
    """
    base = base_model(model)
    encoding, reason = choose_encoding(base, config.encoding)
    assert config.layout is not None
    if LAYOUTS[config.layout].changes_text and config.uses_views and encoding != "tree":
        raise ValueError(f"layout '{config.layout}' needs encoding 'tree', but {reason}; use 'branched'")
    # Plain rows run better under sdpa than under FlexAttention, and ``tree_flex`` runs them under sdpa.
    if encoding == "tree" or uses_flex(base):
        enable_trees(base)
    check_layer(int(base.config.get_text_config().num_hidden_layers), config.jepa_layer)
    return encoding, reason


def packing(model: Any, config: JepaConfig, device_type: str, processes: int = 1) -> Packing:
    """How the sequences of a micro-batch are packed for a model after :func:`set_up`: arguments of ``Collator``."""
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
    model: Any, tokenizer: Any, config: JepaConfig, objective: Any, *, encoding: Encoding, device: str, processes: int
) -> Collator:
    """The collator of a run of so many processes on devices of a type, for a model that is set up for the objective."""
    return Collator.of(
        config,
        predictor_ids(tokenizer, config.used_predictors),
        encoding=encoding,
        prompt_labels="prompt_loss" in objective.terms,
        **packing(model, config, device, processes),
        pad_id=tokenizer.pad_token_id or 0,
    )
