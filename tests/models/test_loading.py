"""Damaged weights are refused, never filled with random numbers; no pickle is opened and no code of a model is run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from stepjepa.base.errors import UserError
from stepjepa.base.files import write_json
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.models import weights
from stepjepa.models.generation_settings import serve_as_trained
from stepjepa.models.loading import (
    LoraSettings,
    add_lora,
    load_for_inference,
    load_model,
    load_tokenizer,
)


class Touch:
    """What runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def base(tmp_path: Path, trained_tokenizer: Any) -> Path:
    tiny.make_model("llama").save_pretrained(tmp_path / "base")
    trained_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_pickled_weights_are_never_run(base: Path, tmp_path: Path, trained_tokenizer: Any) -> None:
    adapter, pickled = tmp_path / "adapter", pickle.dumps(Touch(tmp_path / "ran"), protocol=2)
    add_lora(tiny.make_model("llama"), LoraSettings(3), []).save_pretrained(adapter)  # type: ignore[operator]
    trained_tokenizer.save_pretrained(adapter)
    described = json.loads((adapter / "adapter_config.json").read_text())
    write_json(adapter / "adapter_config.json", {**described, "base_model_name_or_path": str(base)})
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickled)
    # Beside safetensors it is no hindrance.
    (base / "pytorch_model.bin").write_bytes(pickled)
    load_model(str(base))
    with pytest.raises(UserError, match="Weights only load failed"):
        load_for_inference(adapter)
    (base / "model.safetensors").unlink()
    for load in (load_model, load_for_inference):
        with pytest.raises(UserError, match=r"no file named model\.safetensors"):
            load(str(base))
    assert not (tmp_path / "ran").exists()


def test_a_missing_base_that_may_be_a_hub_id_is_named_with_its_file(
    base: Path, tmp_path: Path, trained_tokenizer: Any
) -> None:
    adapter = tmp_path / "adapter"
    add_lora(tiny.make_model("llama"), LoraSettings(3), []).save_pretrained(adapter)  # type: ignore[operator]
    trained_tokenizer.save_pretrained(adapter)
    described = json.loads((adapter / "adapter_config.json").read_text())
    write_json(adapter / "adapter_config.json", {**described, "base_model_name_or_path": "nowhere/base"})
    with pytest.raises(UserError, match=r"'nowhere/base', the base model that .*adapter_config\.json names: neither"):
        load_for_inference(adapter)


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({path!r}).mkdir(exist_ok=True)
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder that brings its own code, which leaves a trace when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own-llama", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (base / "modeling_own.py").write_text(CODE.format(path=str(tmp_path / "ran")), encoding="utf-8")
    return base


def test_code_of_a_model_is_run_only_when_asked_for(with_code: Path, tmp_path: Path) -> None:
    for load in (load_model, load_for_inference):
        with pytest.raises(UserError, match="pass `trust_remote_code` if you trust it"):
            load(str(with_code))
    load_tokenizer(str(with_code))
    assert not (tmp_path / "ran").exists()
    model, _ = load_model(str(with_code), trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    assert (tmp_path / "ran").exists()


def give_tokenizer_code(folder: Path, name: str) -> None:
    """Make a class in the model's folder that of its tokenizer."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [None, f"own_bpe.{name}"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    code = f"from transformers import PreTrainedTokenizerFast\nclass {name}(PreTrainedTokenizerFast):\n    pass\n"
    (folder / "own_bpe.py").write_text(code, encoding="utf-8")


def test_a_tokenizer_that_could_not_be_loaded_again_is_refused_before_training(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its class' name transformers decides how it saves ``auto_map``; the run ended well, and nothing loaded it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    give_tokenizer_code(base, "OwnBPE")
    model, tokenizer = load_model(str(base), trust_remote_code=True)
    with pytest.raises(UserError, match=r"class own_bpe.OwnBPE so that .* rename it to OwnBPETokenizer in its file"):
        serve_as_trained(model, tokenizer, plain=False)
    saved = tmp_path / "saved"
    tokenizer.save_pretrained(saved)
    with pytest.raises(UserError, match=r'tokenizer_config.json: auto_map .*; write \[null, "own_bpe.OwnBPE"\] there'):
        load_tokenizer(str(saved), trust_remote_code=True)
    give_tokenizer_code(saved, "OwnBPE")
    assert type(load_tokenizer(str(saved), trust_remote_code=True)).__name__ == "OwnBPE"
    give_tokenizer_code(base, "OwnBPETokenizer")
    model, tokenizer = load_model(str(base), trust_remote_code=True)
    serve_as_trained(model, tokenizer, plain=False)
    tokenizer.save_pretrained(saved)
    assert type(load_tokenizer(str(saved), trust_remote_code=True)).__name__ == "OwnBPETokenizer"


LAYER = "model.layers.1.mlp.up_proj.weight"


def change(folder: Path, how: Callable[[dict[str, torch.Tensor]], Any], file: str = "model.safetensors") -> None:
    weights = load_file(folder / file)
    how(weights)
    save_file(weights, folder / file, {"format": "pt"})


def spoil(weights: dict[str, torch.Tensor]) -> None:
    weights[LAYER][2, 3] = torch.inf


def fewer_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:99])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer": (lambda folder: change(folder, lambda weights: weights.pop(LAYER)), f"lack '{LAYER}'"),
    "the LM head": (lambda folder: change(folder, lambda weights: weights.pop("lm_head.weight")), "lack 'lm_head.wei"),
    "not finite": (lambda folder: change(folder, spoil), rf"not finite \({LAYER}\)"),
    "short weights": (
        lambda folder: cut(folder / "model.safetensors"),
        r"can't load a model .*; \S+/model.safetensors is damaged: restore it, or name another model$",
    ),
    "short tokenizer": (lambda folder: cut(folder / "tokenizer.json"), r"; \S+/tokenizer.json is damaged: restore"),
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


def test_tied_weights_are_not_missing(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    tiny_tokenizer.save_pretrained(tmp_path)
    load_model(str(tmp_path))


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


@pytest.mark.parametrize("place", [0, 6, 7, 22])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_part_of_a_weight_is_looked_at(place: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHECKED_AT_A_TIME", 7)
    values = torch.zeros(23)
    assert bool(weights.all_finite(values))
    assert bool(weights.all_finite(values[:0]))
    values[place] = value
    assert not bool(weights.all_finite(values))
