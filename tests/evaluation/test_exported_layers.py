"""Folders for sentence-transformers with the layers that a readout needs, of models that have one state for a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from exported_folders import TEXTS, export, sentence_transformer
from stepjepa import Jepa, JepaConfig
from stepjepa.base.errors import UserError
from stepjepa.objectives.inputs import EmbedOptions
from tiny import VOCABULARY, make_model


@pytest.mark.parametrize("options", [{"layer": 2}, {"layer": -4, "pooling": "mean"}], ids=str)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"num_hidden_layers": 5}),
        ("gpt2", {"n_layer": 5}),
        (
            "gemma3_window",
            {"num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
        ),
    ],
)
def test_layers_above_the_readout_are_left_out(
    architecture: str, changes: dict[str, Any], options: EmbedOptions, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    jepa = Jepa(make_model(architecture, **changes), tiny_tokenizer, JepaConfig(predictors=0))
    before = {name: value.clone() for name, value in jepa.model.state_dict().items()}
    folder = export(jepa, tmp_path / "st", **options)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 3
    assert "at layer 2 (this folder has the 3 layers of 5 that it needs)" in (folder / "README.md").read_text()
    model = sentence_transformer(folder)
    np.testing.assert_allclose(model.encode_query(TEXTS), jepa.embed(TEXTS, **options), atol=1e-5)
    np.testing.assert_allclose(model.encode_document(TEXTS), jepa.embed(TEXTS, "target", **options), atol=1e-5)
    # The model has all its layers, as they were.
    after = jepa.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert jepa.model.config.num_hidden_layers == 5


def gemma_4() -> Any:
    """Its last layers use keys and values of earlier ones, and all embed the ids of tokens."""
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Gemma 4")
    sizes = {"hidden_size": 36, "intermediate_size": 28, "num_attention_heads": 3, "num_key_value_heads": 1}
    kinds = [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma4_text",
        **sizes,
        head_dim=10,
        global_head_dim=10,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=kinds,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCABULARY,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.3)
    return model


def test_layers_that_a_shorter_configuration_would_change_stay(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The configuration counts the layers that use keys and values of earlier ones from the end."""
    jepa = Jepa(gemma_4(), tiny_tokenizer, JepaConfig(predictors=0))
    folder = export(jepa, tmp_path / "st", layer=2)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 5
    assert "at layer 2." in (folder / "README.md").read_text()
    loaded = sentence_transformer(folder)
    np.testing.assert_allclose(loaded.encode_query(TEXTS), jepa.embed(TEXTS, layer=2), atol=1e-5)


def test_copies_that_a_model_tells_from_their_tokens_are_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Vectors of its folder were others than ours, without a word."""
    jepa = Jepa(gemma_4(), tiny_tokenizer, JepaConfig(predictors=0))
    fault = "reads other hidden states of copies of the template's tokens from a Gemma4TextModel at layer 4; layer -1"
    with pytest.raises(UserError, match=fault):
        export(jepa, tmp_path / "st", layer=4, pooling="mean")


def test_several_hidden_states_of_a_token_are_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Below its last layer Gemma 3n has two: a folder was written, and encoding with it ended in an IndexError."""
    sizes = {"hidden_size": 36, "intermediate_size": [28] * 4, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = AutoConfig.for_model(
        "gemma3n_text",
        **sizes,
        head_dim=12,
        num_hidden_layers=4,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        laurel_rank=4,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=VOCABULARY,
        vocab_size=VOCABULARY,
    )
    jepa = Jepa(AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer, JepaConfig(predictors=0))
    with pytest.raises(UserError, match="reads other hidden states from a Gemma3nTextModel at layer 1; layer -1 with"):
        export(jepa, tmp_path / "st", layer=1)
    loaded = sentence_transformer(export(jepa, tmp_path / "last", layer=-1))
    np.testing.assert_allclose(loaded.encode_query(TEXTS), jepa.embed(TEXTS, layer=-1), atol=1e-5)


def test_a_decoder_that_is_loaded_as_a_part_of_something(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """AutoModel loads an OPTModel, whose weights have other names than those of the OPTDecoder inside it."""
    jepa = Jepa(make_model("opt"), tiny_tokenizer, JepaConfig(predictors=0))
    for number, options in enumerate([EmbedOptions(), EmbedOptions(layer=1, pooling="mean")]):
        model = sentence_transformer(export(jepa, tmp_path / f"st{number}", **options))
        np.testing.assert_allclose(model.encode_query(TEXTS), jepa.embed(TEXTS, **options), atol=1e-5)


def test_a_decoder_that_is_not_loaded_alone_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    sizes = {"d_model": 36, "decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 28}
    config = AutoConfig.for_model("bart", vocab_size=VOCABULARY, is_decoder=True, max_position_embeddings=509, **sizes)
    jepa = Jepa(AutoModelForCausalLM.from_config(config).eval(), tiny_tokenizer, JepaConfig(predictors=0))
    with pytest.raises(UserError, match="written: AutoModel of transformers does not load a BartDecoder; use 'stepj"):
        export(jepa, tmp_path / "st")
