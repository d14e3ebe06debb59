"""Give a model what an objective needs of it: predictor tokens, the forest's attention, a predictor head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepjepa.config import JepaConfig
from stepjepa.models.architecture import choose_encoding
from stepjepa.models.attention import enable_forest
from stepjepa.models.embeddings import HEAD, check_layer
from stepjepa.models.flex import uses_flex
from stepjepa.models.predictor_head import attach_head
from stepjepa.models.token_rows import give_plain_tokens, give_predictors
from stepjepa.text.predictors import all_predictor_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def base_model(model: Any) -> Any:
    """The transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def set_up(model: Any, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, seed: int) -> tuple[str, str]:
    """Make a model ready for training with an objective.

    Args:
        model: a causal language model, or a PEFT wrapper of one; changed in place.
        tokenizer: changed in place where it lacks predictor tokens.
        config: the objective.
        seed: of new embedding rows and of the head.

    Returns:
        The encoding, ``forest`` or ``rows``, and why.

    Raises:
        ValueError: the model can't be trained with this objective; the message names the remedy.
    """
    base = base_model(model)
    # One that an earlier trainer left behind.
    model._modules.pop(HEAD, None)
    assert config.predictors is not None
    if config.plain:
        give_plain_tokens(base, tokenizer, seed)
    if config.uses_views:
        missing = config.predictors - len(all_predictor_ids(tokenizer))
        if hasattr(model, "peft_config") and missing > 0:
            raise ValueError(
                f"expected a PEFT model with {config.predictors} trained predictor tokens, got {missing} too few; "
                "call load_model(..., predictors=K) and add_lora(model, settings, all_predictor_ids(tokenizer)) first"
            )
        give_predictors(base, tokenizer, config.predictors, seed)
    return set_up_shape(model, config, seed)


def set_up_shape(model: Any, config: JepaConfig, seed: int) -> tuple[str, str]:
    """The part of :func:`set_up` that needs no values, so that a model on the meta device can be set up, too.

    Args:
        model: with rows for all tokens of the objective; changed in place.
        config: the objective.
        seed: of the head.

    Returns:
        The encoding, ``forest`` or ``rows``, and why.

    Raises:
        ValueError: the model can't be trained with this objective; the message names the remedy.
    """
    base = base_model(model)
    encoding, reason = choose_encoding(base, config.encoding)
    if config.layout == "inplace" and encoding == "rows":
        raise ValueError(f"layout 'inplace' needs encoding 'forest', but {reason}; use 'branched'")
    # Plain rows under FlexAttention are better run by sdpa, which is what the forest's kind of it does.
    if encoding == "forest" and (config.uses_views or uses_flex(base)):
        enable_forest(base)
    check_layer(int(base.config.get_text_config().num_hidden_layers), config.jepa_layer)
    if config.predictor_head != "none":
        attach_head(model, config.predictor_head, seed)
    return encoding, reason
