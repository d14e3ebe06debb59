"""Models with random weights from a configuration, fitted to a tokenizer: ``--pretrain``, and what presets are."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from stepjepa.chat.template import ChatTemplate
from stepjepa.errors import UserError
from stepjepa.models.presets import CHATML, SPARE_ROWS, ChatForm, vocabulary_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def chat_form(tokenizer: PreTrainedTokenizerBase | None) -> ChatForm:
    """The chats of a tokenizer, for a new one that takes its place.

    The template is kept with the special tokens that it writes and those that begin and end a text. Padding gets a
    token of its own unless the old one serves for nothing else: a padding row of an embedding is zero and not trained.

    Args:
        tokenizer: the old one; None, or one without a usable template, gives ChatML.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return CHATML
    try:
        template = ChatTemplate(tokenizer)
    except UserError:
        return CHATML
    written = template.special_tokens()
    eos = str(tokenizer.eos_token or template.end_of_turn)
    bos = None if tokenizer.bos_token is None else str(tokenizer.bos_token)
    used = dict.fromkeys([*written, template.end_of_turn, eos, *([bos] if bos else [])])
    pad = CHATML.pad if tokenizer.pad_token is None or tokenizer.pad_token in used else str(tokenizer.pad_token)
    return ChatForm(str(tokenizer.chat_template), (pad, *used), eos, pad, bos, template.own_words())


# Digits, blanks, line ends, contractions, letters outside ASCII: what tokenizers differ in.
_PROBE = "It's 3,145.92  km\n\n\tto A\u00df\u4e2d: don't\n"


def as_loaded(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """A new tokenizer as transformers will load it from a folder of a model with this configuration.

    For some families (Qwen2 is one) it cuts texts into words in their own way, whatever was saved. A model must be
    trained on the tokens that it will be shown later.

    Args:
        tokenizer: newly trained.
        config: of the model.
        trust_remote_code: run code that comes with the configuration.

    Raises:
        UserError: the family's own tokenizer does not understand this one's vocabulary.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ids = loaded(_PROBE, add_special_tokens=False)["input_ids"]
    # A token more, as some families want, is no harm.
    if not tokenizer.get_vocab().items() <= loaded.get_vocab().items() or loaded.decode(ids) != _PROBE:
        raise UserError(
            f"transformers loads tokenizers of the family '{config.model_type}' in a way of its own that a new "
            "byte-level one does not survive; leave --train_tokenizer out"
        )
    # The name is that of the temporary folder.
    loaded.name_or_path = ""
    return loaded


def fit_config(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, anew: bool) -> None:
    """Give a configuration the vocabulary and the special ids of a tokenizer.

    Args:
        config: changed in place.
        tokenizer: with all tokens but those of predictors, for which there are rows to spare.
        anew: the tokenizer is a new one, so the number of rows follows from it alone; otherwise a configuration that
            has rows enough keeps them.
    """
    decoder = config.get_text_config(decoder=True)
    enough = not anew and decoder.vocab_size >= len(tokenizer) + SPARE_ROWS
    rows = decoder.vocab_size if enough else vocabulary_rows(tokenizer)
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    # The row of the padding token is zero and not trained, so no other token may share it.
    pad = None if tokenizer.pad_token_id in used else tokenizer.pad_token_id
    for part in (config, decoder) if decoder is not config else (config,):
        part.vocab_size = rows
        part.bos_token_id, part.eos_token_id, part.pad_token_id = (*used, pad)


def random_model(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    dtype: torch.dtype,
    ends: Sequence[int],
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model with random weights, as its family draws them.

    Weights depend on the seed alone, wherever the global generator stands, which is left where it is; so they are equal
    on all processes.

    Args:
        config: fitted to the tokenizer.
        tokenizer: gives the special ids of generation.
        seed: of the weights.
        dtype: of the weights.
        ends: tokens that end an answer.
        attention: as ``attn_implementation`` in transformers.
        trust_remote_code: run code that comes with the configuration.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    add_ends(model, ends, anew=True)
    made: PreTrainedModel = model
    return made


def add_ends(model: PreTrainedModel, ends: Sequence[int], *, anew: bool = False) -> None:
    """Let a model's generation stop at some tokens.

    Args:
        model: its generation settings are changed in place.
        ends: the tokens.
        anew: at these alone; otherwise at those as well where it stops already.
    """
    settings: Any = model.generation_config
    known = settings.eos_token_id
    before = [] if anew or known is None else known if isinstance(known, list) else [known]
    every = list(dict.fromkeys([*before, *ends]))
    settings.eos_token_id = every[0] if len(every) == 1 else every
