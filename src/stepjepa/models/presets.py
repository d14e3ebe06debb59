"""Small models and tokenizers built on the spot, with no hub: ``preset:tiny``, ``preset:small`` ..."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.errors import UserError
from stepjepa.files import existing_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PREFIX = "preset:"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")

ROLE_WORDS = ("system\n", "user\n", "assistant\n")
ROLE_REPEATS = 1000

# Rows of the embedding kept free for predictor tokens, so that every mode and every K trains a model of one shape.
SPARE_ROWS = 32

BYTES = 256


class ChatForm(NamedTuple):
    """What a newly trained tokenizer knows of chats.

    Attributes:
        template: Jinja source.
        special: its special tokens, in the order of their ids.
        eos: the one that ends a text.
        pad: the one that fills rows up.
        bos: the one that begins a text, if any.
        frequent: what the template writes around special tokens and contents.
    """

    template: str
    special: tuple[str, ...]
    eos: str
    pad: str
    bos: str | None
    frequent: tuple[str, ...]


CHATML = ChatForm(CHAT_TEMPLATE, SPECIAL_TOKENS, eos="<|im_end|>", pad="<|pad|>", bos=None, frequent=ROLE_WORDS)


@dataclass(frozen=True)
class Preset:
    """The shape of a small model.

    Attributes:
        family: ``model_type`` of the transformers configuration.
        vocabulary: most tokens of the tokenizer trained for it.
        hidden: width.
        layers: depth.
        heads: query heads; a quarter of them, at least one, are key-value heads.
        feed_forward: inner width of the MLP.
    """

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    feed_forward: int


PRESETS = {
    "tiny": Preset("llama", 1024, 128, 4, 4, 352),
    "small": Preset("llama", 1024, 256, 4, 4, 704),
    "base": Preset("llama", 4096, 512, 8, 8, 1408),
    "tiny-qwen": Preset("qwen3", 1024, 128, 4, 4, 352),
    "small-qwen": Preset("qwen3", 1024, 256, 4, 4, 704),
    "base-qwen": Preset("qwen3", 4096, 512, 8, 8, 1408),
}


def find_preset(name: str) -> Preset:
    """The preset of a name such as ``preset:tiny``.

    Raises:
        UserError: there is none.
    """
    key = name.removeprefix(PREFIX)
    if key not in PRESETS:
        raise UserError(f"no preset '{key}'; choose one of {', '.join(PREFIX + known for known in PRESETS)}")
    return PRESETS[key]


# Learning merges takes a time that is quadratic in the length of a word: one of a million characters would take hours.
_LONG_WORD = re.compile(r"\S{200}")


def train_tokenizer(texts: Iterable[str], vocabulary: int, form: ChatForm = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on some texts.

    Every digit is a token of its own, which arithmetic needs; every byte is known, so that no text is unknown. It puts
    no token of its own before or behind a text: templates write what they need.

    Args:
        texts: what to learn merges from.
        vocabulary: most tokens, special ones and the 256 bytes included.
        form: special tokens and template.

    Raises:
        UserError: the vocabulary has no room for special tokens and bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = BYTES + len(form.special)
    if vocabulary < smallest:
        raise UserError(
            f"a tokenizer of {vocabulary} tokens is too small: expected {smallest} or more, {BYTES} bytes and "
            f"{len(form.special)} special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(form.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Every record says these words, once it is in the template; so they are as frequent as anything in the texts.
    said = (_LONG_WORD.sub(r"\g<0> ", text) for text in texts)
    tokenizer.train_from_iterator([*form.frequent * ROLE_REPEATS, *said], trainer)
    roles = {"pad_token": form.pad, "eos_token": form.eos} | ({"bos_token": form.bos} if form.bos else {})
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **roles,
        extra_special_tokens=[token for token in form.special if token not in roles.values()],
        chat_template=form.template,
        clean_up_tokenization_spaces=False,
    )


def preset_tokenizer(
    name: str, texts: Iterable[str], chat_template: str | None = None, vocabulary: int | None = None
) -> tuple[Preset, PreTrainedTokenizerFast]:
    """A preset and the tokenizer trained for it.

    Args:
        name: such as ``preset:tiny``.
        texts: what the tokenizer is trained on.
        chat_template: a Jinja file instead of the built-in template.
        vocabulary: most tokens of it; None for the preset's own number.

    Raises:
        UserError: there is no such preset or file, or the vocabulary is too small.
    """
    preset = find_preset(name)
    tokenizer = train_tokenizer(texts, preset.vocabulary if vocabulary is None else vocabulary)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return preset, tokenizer


def read_template(path: str) -> str:
    """The text of a chat template file.

    Raises:
        UserError: there is no such file.
    """
    return existing_file(path, "chat template").read_text(encoding="utf-8")


def vocabulary_rows(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the embedding of a model made for a tokenizer: some to spare, and a multiple of 64, as hardware likes."""
    return -(-(len(tokenizer) + SPARE_ROWS) // 64) * 64


def make_config(preset: Preset, tokenizer: PreTrainedTokenizerFast, positions: int = 4096) -> PretrainedConfig:
    """The transformers configuration of a preset, for a tokenizer.

    Args:
        preset: the shape.
        tokenizer: gives the vocabulary and the special ids.
        positions: longest row that the rotary embedding is declared for.
    """
    from transformers import AutoConfig

    shape: dict[str, Any] = {
        "vocab_size": vocabulary_rows(tokenizer),
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": max(1, preset.heads // 4),
        "head_dim": preset.hidden // preset.heads,
        "intermediate_size": preset.feed_forward,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return AutoConfig.for_model(preset.family, **shape)
