"""Check that a tokenizer, once it is saved, can be read, and is read as the one that was saved."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from transformers import CONFIG_NAME, TOKENIZER_MAPPING, AutoTokenizer

from stepjepa.base.errors import UserError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Texts that tokenizers of the same vocabulary split in different ways.
_TEXTS = [
    *["It's 3+4=7, isn't it? It'S.", "12345 and 1,234.5", "two\n\nlines\n", "  a  lot\tof   blanks ", "\r\n x"],
    *["(a)[b]{c}", "def f(x):\n    return x**2", "Hello", " Hello"],
    *["éèü naïve", "e\u0301", "ﬁ", "日本語と한국어", "🙂👍🏽"],
]


def check_saved_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Raise ``UserError`` for a tokenizer that ``AutoTokenizer`` can't read from the model's folder, or as another one.

    It reads the tokenizer of some types of models, ``qwen2`` for one, by the class of that type, whatever class the
    folder names, and such a class brings its own rules for splitting a text.

    Args:
        tokenizer: the tokenizer that is trained with.
        config: the configuration of the model in whose folder it will be saved.
    """
    _check_class_name(tokenizer)
    expected = TOKENIZER_MAPPING.get(type(config), None)
    if expected is None or type(tokenizer) is expected or not type(tokenizer).__module__.startswith("transformers."):
        return
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        (Path(folder) / CONFIG_NAME).write_text(json.dumps({"model_type": config.model_type}), encoding="utf-8")
        read = AutoTokenizer.from_pretrained(folder)
    for text in _TEXTS:
        if read(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise UserError(
                f"AutoTokenizer, by which stepjepa and servers read a folder, makes a {type(read).__name__} of this "
                f"{type(tokenizer).__name__}, since the model is a {config.model_type}; it splits {shown(text)} into "
                "other tokens. Save the model and the tokenizer to a folder, and train with "
                "AutoTokenizer.from_pretrained(folder)"
            )


def _check_class_name(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``UserError`` for a tokenizer of a model's own code whose saved folder could not be loaded.

    transformers saves ``auto_map`` in the form that it loads only if module or class has "Tokenizer" in its name.
    """
    kind = type(tokenizer)
    reference = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    if kind._auto_class is not None and "Tokenizer" not in reference:
        fault = f"transformers saves the tokenizer's class {reference} so that it can't be loaded, for its name"
        remedy = f"rename it to {kind.__name__}Tokenizer in its file and in tokenizer_config.json"
        raise UserError(f"{fault}; in a copy of the model's folder, {remedy} (tokenizer_class and auto_map)")
