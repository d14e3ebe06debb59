"""A tokenizer that would be read back as another one is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tiny
from stepjepa import Jepa, JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.chat.saved_tokenizer import check_saved_tokenizer

RECORDS = [
    {"messages": [{"role": "user", "content": f"{n}+1"}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(7)
]


def test_another_split_is_refused_and_the_remedy_works(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model("qwen2")
    fault = (
        r"makes a Qwen2Tokenizer of this TokenizersBackend, since the model is a qwen2; it splits .* into other tokens"
    )
    with pytest.raises(UserError, match=fault):
        check_saved_tokenizer(tiny_tokenizer, model.config)
    arguments = {"args": tiny.arguments(tmp_path / "run"), "jepa": JepaConfig(mode="regular"), "train_dataset": RECORDS}
    with pytest.raises(ValueError, match=fault):
        JepaTrainer(model, processing_class=tiny_tokenizer, **arguments)
    model.save_pretrained(tmp_path / "both")
    tiny_tokenizer.save_pretrained(tmp_path / "both")
    read = AutoTokenizer.from_pretrained(tmp_path / "both")
    check_saved_tokenizer(read, model.config)
    trainer = JepaTrainer(model, processing_class=read, **arguments)
    trainer.save_model(str(tmp_path / "saved"))
    again, text = AutoTokenizer.from_pretrained(tmp_path / "saved"), "two\n\nlines\n"
    assert again(text)["input_ids"] == read(text)["input_ids"] != tiny_tokenizer(text)["input_ids"]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_window", "opt", "qwen3"])
def test_the_same_split_is_trained(architecture: str, tiny_tokenizer: Any) -> None:
    """For some of these types there is a class, too, and yet the folder's own is read."""
    Jepa(tiny.make_model(architecture), tiny_tokenizer, JepaConfig(predictors=1))
    check_saved_tokenizer(tiny_tokenizer, tiny.make_model(architecture).config)
