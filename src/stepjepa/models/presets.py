"""Models with random weights and newly trained tokenizers: presets such as ``preset:tiny``, and ``--pretrain``."""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stepjepa.chat.template import ChatTemplate
from stepjepa.errors import UserError
from stepjepa.files import existing_file
from stepjepa.offline import use_cache_if_unreachable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

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

# Learning merges takes a time that is quadratic in the length of a word: one of a million characters would take hours.
_LONG_WORD = re.compile(r"\S{200}")

# Digits, blanks, line ends, contractions, letters outside ASCII: what tokenizers differ in.
_MIXED_TEXT = "It's 3,145.92  km\n\n\tto A\u00df\u4e2d: don't\n"


class ChatForm(NamedTuple):
    """What a newly trained tokenizer knows of chats."""

    template: str  # Jinja source
    special: tuple[str, ...]  # special tokens, in the order of their ids
    eos: str
    pad: str
    bos: str | None
    frequent: tuple[str, ...]  # what the template writes around special tokens and contents


CHATML = ChatForm(CHAT_TEMPLATE, SPECIAL_TOKENS, eos="<|im_end|>", pad="<|pad|>", bos=None, frequent=ROLE_WORDS)


class Preset(NamedTuple):
    """The shape of a small model."""

    family: str  # ``model_type`` of the transformers configuration
    vocabulary: int  # most tokens of the tokenizer trained for it
    hidden: int
    layers: int
    heads: int  # of queries; a quarter of them, at least one, are key-value heads
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
    """The preset of a name such as ``preset:tiny``; UserError if there is none."""
    key = name.removeprefix(PREFIX)
    if key not in PRESETS:
        raise UserError(f"no preset '{key}'; choose one of {', '.join(PREFIX + known for known in PRESETS)}")
    return PRESETS[key]


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
) -> PreTrainedTokenizerFast:
    """The tokenizer of a preset, trained on some texts.

    Args:
        name: such as ``preset:tiny``.
        texts: what to learn merges from.
        chat_template: a Jinja file instead of the built-in template.
        vocabulary: most tokens; None for the preset's own number.

    Raises:
        UserError: there is no such preset or file, or the vocabulary is too small.
    """
    tokenizer = train_tokenizer(texts, find_preset(name).vocabulary if vocabulary is None else vocabulary)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(path: str) -> str:
    """The text of a chat template file; UserError if there is none."""
    return existing_file(path, "chat template").read_text(encoding="utf-8")


def preset_config(name: str) -> PretrainedConfig:
    """The transformers configuration of a preset, to be fitted to a tokenizer by :func:`fit_config`."""
    from transformers import AutoConfig

    preset = find_preset(name)
    shape: dict[str, Any] = {
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": max(1, preset.heads // 4),
        "head_dim": preset.hidden // preset.heads,
        "intermediate_size": preset.feed_forward,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return AutoConfig.for_model(preset.family, **shape)


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


def as_loaded(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """A new tokenizer as transformers will load it from a folder of a model with this configuration.

    For some families (Qwen2 is one) it cuts texts into words in their own way, whatever was saved. A model must be
    trained on the tokens that it will be shown later.

    Raises:
        UserError: the family's own tokenizer does not understand this one's vocabulary.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ids = loaded(_MIXED_TEXT, add_special_tokens=False)["input_ids"]
    # A token more, as some families want, is no harm.
    if not tokenizer.get_vocab().items() <= loaded.get_vocab().items() or loaded.decode(ids) != _MIXED_TEXT:
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
    rows = len(tokenizer) + SPARE_ROWS
    # A multiple of 64, as hardware likes.
    rows = decoder.vocab_size if not anew and decoder.vocab_size >= rows else -(-rows // 64) * 64
    used = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    # The row of the padding token is zero and not trained, so no other token may share it.
    pad = None if tokenizer.pad_token_id in used else tokenizer.pad_token_id
    for part in (config, decoder) if decoder is not config else (config,):
        part.vocab_size = rows
        part.bos_token_id, part.eos_token_id, part.pad_token_id = (*used, pad)


def random_model(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], seed: int, **options: Any
) -> PreTrainedModel:
    """A causal language model with random weights, as its family draws them.

    Weights depend on the seed alone, wherever the global generator stands, which is left where it is; so they are equal
    on all processes.

    Args:
        config: fitted to the tokenizer.
        tokenizer: gives the special ids of generation.
        ends: tokens at which generation stops.
        seed: of the weights.
        options: of ``AutoModelForCausalLM.from_config``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    settings: Any = model.generation_config
    settings.bos_token_id, settings.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    settings.eos_token_id = None
    add_ends(model, ends)
    return model


def add_ends(model: PreTrainedModel, ends: Sequence[int]) -> None:
    """Let a model's generation stop at some tokens as well, by its generation settings, changed in place."""
    settings: Any = model.generation_config
    known = settings.eos_token_id
    before = [] if known is None else known if isinstance(known, list) else [known]
    every = list(dict.fromkeys([*before, *ends]))
    settings.eos_token_id = every[0] if len(every) == 1 else every


def is_hub_id(name: str) -> bool:
    """Whether a model would be asked of the hub: neither a preset, nor a folder, nor what can only be a path.

    A name such as ``runs/one`` is a path where there is a folder ``runs``.
    """
    if ":" in name or Path(name).is_dir() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def refuse_missing(name: str) -> None:
    """Say of a folder that it is missing, and of a preset that it is misspelt, before it is taken for a hub id.

    Raises:
        UserError: it is no folder, and no hub id either.
    """
    if Path(name).is_dir():
        return
    if is_hub_id(name):
        use_cache_if_unreachable()
        return
    if ":" in name:
        near = difflib.get_close_matches(name, [PREFIX + preset for preset in PRESETS], n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]}?" if near else f"presets begin with {PREFIX}, such as {PREFIX}tiny"
        raise UserError(f"no model '{name}', and no hub id holds a colon; {remedy}")
    parent = Path(name).expanduser().parent
    folders = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(Path(name).name, folders, n=1)
    remedy = f"did you mean {Path(name).parent / near[0]}?" if near else "check the path"
    raise UserError(f"no such model folder; {remedy}", path=name)
