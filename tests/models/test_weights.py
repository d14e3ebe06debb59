"""A model whose files are not whole is refused, however it is loaded; never filled with random numbers in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from stepjepa.chat.tokens import all_predictor_ids
from stepjepa.errors import UserError
from stepjepa.models.loading import LoraSettings, add_lora, load_for_inference, load_model

LAYER = "model.layers.1.mlp.up_proj.weight"


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], Any], file: str = "model.safetensors") -> None:
    weights = load_file(folder / file)
    how(weights)
    save_file(weights, folder / file, {"format": "pt"})


def rename(weights: dict[str, torch.Tensor]) -> None:
    weights[LAYER.replace("mlp", "ffn")] = weights.pop(LAYER)


def spoil(weights: dict[str, torch.Tensor]) -> None:
    weights[LAYER][2, 3] = torch.inf


def fewer_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer": (lambda folder: change(folder, lambda weights: weights.pop(LAYER)), f"lack '{LAYER}'"),
    "the LM head": (lambda folder: change(folder, lambda weights: weights.pop("lm_head.weight")), "lack 'lm_head.wei"),
    "another name": (lambda folder: change(folder, rename), f"lack '{LAYER}'"),
    "not finite": (lambda folder: change(folder, spoil), rf"not finite \({LAYER}\)"),
    "fewer layers": (fewer_layers, "correct the number of layers"),
}


@pytest.mark.parametrize("load", [load_model, load_for_inference])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_are_refused(name: str, load: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    tiny.make_model("mistral").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    load(str(tmp_path))
    damage, words = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(UserError, match=words):
        load(str(tmp_path))


def test_tied_weights_are_not_missing_and_what_is_meant_may_be(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    tiny_tokenizer.save_pretrained(tmp_path)
    load_model(str(tmp_path))
    change(tmp_path, lambda weights: weights.pop(LAYER))
    load_model(str(tmp_path), allow_missing_weights=True)


@pytest.mark.parametrize("damage", ["missing", "nan"])
def test_a_damaged_adapter_is_refused(damage: str, trained_tokenizer: Any, tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny.make_model("llama").save_pretrained(base)
    trained_tokenizer.save_pretrained(base)
    model: Any = add_lora(load_model(str(base))[0], LoraSettings(3), all_predictor_ids(trained_tokenizer))
    model.save_pretrained(adapter)
    trained_tokenizer.save_pretrained(adapter)
    load_for_inference(str(adapter))

    def how(weights: dict[str, torch.Tensor]) -> None:
        name = next(iter(weights))
        if damage == "missing":
            del weights[name]
        else:
            weights[name][0] = torch.nan

    change(adapter, how, "adapter_model.safetensors")
    with pytest.raises(UserError, match="the adapter lacks" if damage == "missing" else "not finite"):
        load_for_inference(str(adapter))
