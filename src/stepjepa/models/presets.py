"""Models with random weights: presets such as ``preset:tiny``, which train a tokenizer, and ``pretrain``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stepjepa.base.errors import UserError
from stepjepa.base.json_object import JsonObject
from stepjepa.base.similar_names import did_you_mean
from stepjepa.chat.source import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "preset:"
_SIZES = {
    "tiny": {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 352},
    "small": {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704},
    "base": {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408},
}
_FAMILIES = {"": "llama", "-qwen": "qwen3"}
PRESETS: dict[str, JsonObject] = {
    size + suffix: {"model_type": _FAMILIES[suffix], **shape} for suffix in _FAMILIES for size, shape in _SIZES.items()
}
"""Preset name -> configuration. A preset has as many attention heads as layers, and a quarter as many key-value heads;
``vocab_size`` is the maximum size of the tokenizer that is trained for it."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The chat template writes these words into every record, so the tokenizer must learn them as single tokens.
ROLE_WORDS = ("system\n", "user\n", "assistant\n") * 1000
# Spare embedding rows for predictor tokens, so that models of every mode and every K have the same shape.
SPARE_ROWS = 32

# The time of BPE training is quadratic in the length of a word: one of a million characters would take hours.
_LONG_WORD = re.compile(r"\S{200}")


def check_preset(name: str) -> None:
    """Raise UserError if there is no such preset."""
    if (key := name.removeprefix(PREFIX)) not in PRESETS:
        names = [PREFIX + preset for preset in PRESETS]
        raise UserError(f"no preset '{key}'; choose one of {', '.join(names)}{did_you_mean(PREFIX + key, names)}")


def preset_config(name: str) -> PreTrainedConfig:
    """Return the transformers configuration of a preset such as ``preset:tiny``; :func:`fit_config` completes it."""
    from transformers import AutoConfig

    check_preset(name)
    shape = PRESETS[name.removeprefix(PREFIX)]
    heads = shape["num_hidden_layers"]
    return AutoConfig.for_model(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        head_dim=shape["hidden_size"] // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Train byte-level BPE of at most ``vocabulary`` tokens on texts, with ChatML or the template of a Jinja file.

    Every digit is a token of its own, as arithmetic needs, and no token is added before or after a text. UserError if
    there is no room for the 256 bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = "<|pad|>", "<|im_start|>", "<|im_end|>"
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[pad, start, end],
        initial_alphabet=sorted(words.alphabet()),
        show_progress=False,
    )
    texts = (_LONG_WORD.sub(r"\g<0> ", text) for text in texts)
    tokenizer.train_from_iterator([*ROLE_WORDS, *texts], trainer)
    if (size := tokenizer.get_vocab_size()) > vocabulary:
        raise UserError(f"a tokenizer of {vocabulary} tokens is too small: expected {size} or more")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        extra_special_tokens=[start],
        chat_template=CHAT_TEMPLATE if chat_template is None else read_template(chat_template),
        clean_up_tokenization_spaces=False,
    )


def fit_config(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the vocabulary size and the special token ids of a configuration, in place, from a tokenizer.

    The tokenizer has all tokens except predictor tokens, which use the spare rows. A configuration with enough rows
    keeps its own number.
    """
    decoder = config.get_text_config(decoder=True)
    rows = len(tokenizer) + SPARE_ROWS
    # A new number of rows is a multiple of 64, which suits the hardware.
    rows = decoder.vocab_size if decoder.vocab_size >= rows else -(-rows // 64) * 64
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    # The row of the padding token is zero and not trained, so no other token may share it.
    pad = None if tokenizer.pad_token_id in used else tokenizer.pad_token_id
    for part in (config, decoder):
        part.vocab_size = rows
        part.bos_token_id, part.eos_token_id, part.pad_token_id = (*used, pad)


def random_model(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], seed: int, **options: Any
) -> PreTrainedModel:
    """Build a causal language model with random weights, initialised as its model family does.

    The weights depend on the seed alone, so they are equal on all processes; the state of the global generator is kept.
    Generation has the tokenizer's special tokens and stops at ``ends``. ``options`` are those of ``from_config``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from stepjepa.models.token_rows import add_stop_tokens

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, **options)
    settings = model.generation_config
    settings.bos_token_id, settings.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    settings.eos_token_id = None
    add_stop_tokens(model, ends)
    return model
