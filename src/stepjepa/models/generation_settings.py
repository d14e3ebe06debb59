"""The settings of ``generate`` that a model is saved with, and the chat template that is served."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from stepjepa.base.errors import UserError, one_line
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import note
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.saved_tokenizer import check_saved_tokenizer
from stepjepa.chat.template import ChatTemplate
from stepjepa.models.architecture import base_model
from stepjepa.models.token_rows import add_stop_tokens, never_generated

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def set_generation_defaults(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Make a model's ``generate`` stop at the tokens ``ends``, and never produce an id that stands for no text.

    It stops at the tokenizer's end of text, too, as ``generation.Generator`` and most servers do, even if that ends no
    turn: a model whose configuration names another token would continue behind it.
    The settings are part of the model: every folder that it is saved to has them, see :func:`save_generation_config`.
    """
    settings = model.generation_config
    if settings is None:  # the model can't generate
        return
    ends = [*ends, *([] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)])]
    add_stop_tokens(model, ends)
    suppressed = {*(settings.suppress_tokens or ())}
    # An earlier set-up suppressed the last rows, which the tokenizer may use by now.
    last = model.get_input_embeddings().weight.shape[0] - 1
    while last in suppressed:
        suppressed.remove(last)
        last -= 1
    settings.suppress_tokens = sorted(suppressed.union(never_generated(model, tokenizer)).difference(ends)) or None
    _make_savable(settings)


# Settings of ``generate`` that it uses only where it samples, or only where it searches with beams.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_BEAMS = ("early_stopping", "length_penalty")
_OF_VLLM = ("temperature", "top_p", "top_k", "min_p")  # that vLLM takes from a folder, without ``do_sample``, too


def _make_savable(settings: GenerationConfig) -> None:
    """Set generation settings without effect to None, in place.

    transformers loads such settings, but refuses to save them once any setting has been changed.

    Raises:
        UserError: transformers would refuse to save the settings for another reason, at the end of training.
    """
    try:
        settings.validate(strict=True)
        return
    except ValueError:
        before = settings.to_diff_dict()
    unused = {name: "do_sample" for name in _SAMPLING if not settings.do_sample}
    unused |= {name: "num_beams" for name in _BEAMS if settings.num_beams in (None, 1)}
    for name in unused:
        setattr(settings, name, None)
    try:
        settings.validate(strict=True)
    except ValueError as error:
        fault = f"{GENERATION_CONFIG_NAME} of the model can't be saved again ({one_line(error)})"
        raise UserError(f"{fault}; correct it in the model's folder") from None
    dropped = [f"{name} {before[name]}" for name in unused if before.get(name) is not None]
    switches = " and ".join(dict.fromkeys(unused[name] for name in unused if before.get(name) is not None))
    of_vllm = {name: before[name] for name in _OF_VLLM if name in unused and before.get(name) is not None}
    remedy = f"; vLLM would sample by them: serve with --override-generation-config '{json.dumps(of_vllm)}'"
    if is_main_process():
        fault = f"{', '.join(dropped)} left out, which transformers uses and saves only with {switches}"
        note(f"{GENERATION_CONFIG_NAME}: {fault}{remedy if of_vllm else ''}")


def serve_as_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    plain: bool,
    variables: Mapping[str, object] | None = None,
) -> None:
    """Prepare model and tokenizer so that any program that loads them from a folder uses the prompts of training.

    Writes the variables that training fixes into the chat template (see ``ChatTemplate``), and the stop tokens into
    the generation settings.

    Args:
        model: its ``generation_config`` gets the stop tokens, in place.
        tokenizer: its ``chat_template`` is replaced by the one that is served; further named templates stay.
        plain: the format without a chat template.
        variables: of the chat template, ``JepaConfig.chat_template_kwargs``.

    Raises:
        UserError: the template can't be used, or the tokenizer would not be loaded again, or not as the same one.
    """
    check_saved_tokenizer(tokenizer, model.config)
    if plain:
        stop_ids = PlainTemplate(tokenizer).stop_ids
    else:
        template = ChatTemplate(tokenizer, variables)
        tokenizer.chat_template, stop_ids = template.saved, template.stop_ids
    set_generation_defaults(model, tokenizer, stop_ids)


def save_generation_config(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the generation settings of a model beside its adapter: PEFT does not save them, as transformers does."""
    settings = getattr(base_model(model), "generation_config", None)
    if hasattr(model, "peft_config") and settings is not None:
        settings.save_pretrained(folder)


def load_generation_config(model: PreTrainedModel, folder: str | Path) -> None:
    """Load the generation settings of an adapter's folder into a model, if the folder has any."""
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
