"""Presets, random weights from a configuration, names of models, and tokens of the plain format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import chat_templates
import tiny
from stepjepa.base.errors import UserError
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import END_OF_TURN, PERCEPTION
from stepjepa.models.loading import load_for_inference, load_model, load_tokenizer
from stepjepa.models.presets import CHAT_TEMPLATE, SPARE_ROWS, train_tokenizer

TEXTS = [message["content"] for record in tiny.records() for message in record.messages]
STRANGE = ["12345 + 67.8%", "It's DON'T  I'll\n\n\n x", "Größe, 中文 é", "a\tb\r\n  c", "<|perception|>A<|eot_id|>"]


def save_config(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A folder with a configuration and nothing else."""
    family, shape = tiny.ARCHITECTURES[name]
    AutoConfig.for_model(family, **{"vocab_size": tiny.VOCABULARY, **shape, **changes}).save_pretrained(folder)
    return folder


def pretrain(folder: Path, **options: Any) -> tuple[Any, Any]:
    return load_model(str(folder), pretrain=True, texts=TEXTS, **options)


@pytest.fixture
def base(tmp_path: Path, plain_tokenizer: Any) -> Path:
    """A trained model with its tokenizer."""
    tiny.make_model("llama", seed=5).save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_weights_depend_on_the_seed_alone(base: Path) -> None:
    """So they are equal on all processes, whose generators may stand anywhere."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first, _ = pretrain(base, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.training
    torch.manual_seed(12)
    again, _ = pretrain(base, seed=3)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    other, _ = pretrain(base, seed=4)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_trained_weights_are_left_aside(base: Path) -> None:
    """As the family draws them: 0.02 by its initializer_range, far from the 0.3 of the trained ones."""
    assert float(pretrain(base)[0].model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_dtypes(tmp_path: Path, plain_tokenizer: Any) -> None:
    folder = save_config(tmp_path / "half", dtype="bfloat16")
    plain_tokenizer.save_pretrained(folder)
    for dtype, expected in [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]:
        assert pretrain(folder, dtype=dtype)[0].dtype == expected


def test_presets() -> None:
    model, tokenizer = load_model("preset:tiny-qwen", texts=TEXTS)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert (model.config.hidden_size, model.config.num_key_value_heads) == (128, 1)
    # No more tokens and rows than the texts give.
    assert tokenizer.get_vocab() == train_tokenizer(TEXTS, 1024).get_vocab()
    assert model.config.vocab_size == -(-(len(tokenizer) + SPARE_ROWS) // 64) * 64 < 1024
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("7315")["input_ids"] == [tokenizer.convert_tokens_to_ids(digit) for digit in "7315"]
    for text in STRANGE[:4]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(UserError, match="no preset 'huge'; choose one of preset:tiny, preset:small"):
        load_model("preset:huge")


@pytest.mark.parametrize(("known", "expected"), [(389, 389), (317, 384), (7, 384)])
def test_rows_for_the_tokenizer_of_the_folder(known: int, expected: int, tmp_path: Path, plain_tokenizer: Any) -> None:
    """A configuration with rows enough for it and 32 to spare keeps them, for any K."""
    assert 320 < len(plain_tokenizer) + SPARE_ROWS <= 384 - 2
    folder = save_config(tmp_path / "folder", vocab_size=known)
    plain_tokenizer.save_pretrained(folder)
    for predictors in (0, 31):
        model, tokenizer = pretrain(folder, predictors=predictors)
        assert len(tokenizer) == len(plain_tokenizer) + predictors
        assert len(model.get_input_embeddings().weight) == model.config.vocab_size == expected


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_special_ids_are_those_of_the_tokenizer(pad_is_eos: bool, tmp_path: Path, plain_tokenizer: Any) -> None:
    """A padding row is zero and not trained, so it is no row that another token has as well."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    folder = save_config(tmp_path / "folder", eos_token_id=[5, 377], bos_token_id=381, pad_token_id=388)
    tokenizer.save_pretrained(folder)
    model, same = pretrain(folder)
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == same.eos_token_id == 2
        assert settings.bos_token_id is None
    assert model.config.pad_token_id == (None if pad_is_eos else 0)
    assert bool(model.get_input_embeddings().weight[2].any())


def test_generation_stops_at_every_end(tmp_path: Path, plain_tokenizer: Any) -> None:
    """Also where the template closes a turn with another token than the eos token."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": chat_templates.GEMMA_TOKENS})
    tokenizer.chat_template = chat_templates.GEMMA_LIKE
    tokenizer.save_pretrained(save_config(tmp_path / "folder"))
    model, same = pretrain(tmp_path / "folder")
    ends = same.convert_tokens_to_ids(["<end_of_turn>", "<|im_end|>"])
    assert model.generation_config.eos_token_id == ends


def test_what_is_saved_is_loaded_again_as_it_was(tmp_path: Path) -> None:
    model, tokenizer = load_model("preset:tiny", texts=TEXTS, plain=True, predictors=2)
    model.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    again, same = load_for_inference(tmp_path / "run", device="cpu")
    plainly = AutoTokenizer.from_pretrained(str(tmp_path / "run"))
    for text in [*STRANGE, *TEXTS]:
        ids = tokenizer(text)["input_ids"]
        assert same(text)["input_ids"] == plainly(text)["input_ids"] == ids
    with torch.no_grad():
        tiny.assert_same(again(torch.tensor([ids])).logits, model.eval()(torch.tensor([ids])).logits)
    whole = AutoModelForCausalLM.from_pretrained(str(tmp_path / "run"))
    assert whole.generation_config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN) in whole.generation_config.eos_token_id


def test_what_is_missing_is_said(base: Path, tmp_path: Path, plain_tokenizer: Any) -> None:
    bare = save_config(tmp_path / "bare", "phi")
    for load in (pretrain, lambda folder: load_tokenizer(str(folder))):
        with pytest.raises(UserError, match="holds no tokenizer"):
            load(bare)
    with pytest.raises(UserError, match=r"of 258 tokens is too small: expected 259 or more"):
        train_tokenizer(TEXTS, 258)
    assert len(train_tokenizer(TEXTS, 259)) == 259
    plain_tokenizer.save_pretrained(tmp_path / "words")
    with pytest.raises(UserError, match="can't load a configuration from"):
        pretrain(tmp_path / "words")
    (base / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template; .*`plain`"):
        pretrain(base)
    assert PlainTemplate(pretrain(base, plain=True)[1]).stop_tokens == [END_OF_TURN]


@pytest.mark.parametrize("fresh", [False, True])
def test_tokens_of_the_plain_format(fresh: bool, base: Path) -> None:
    model, tokenizer = load_model(str(base), pretrain=fresh, plain=True, predictors=3)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert {*model.generation_config.eos_token_id} == {end, tokenizer.eos_token_id}
    assert tokenizer.convert_tokens_to_ids(PERCEPTION) == end - 1
    assert tokenizer.convert_tokens_to_ids("<|predictor_1|>") == end + 1
    assert len(model.get_input_embeddings().weight) >= len(tokenizer)
