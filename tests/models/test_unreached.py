"""Parts of a model that text does not reach: frozen, without an adapter, named on the first screen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MllamaForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError
from stepjepa.cli.main import main
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora, load_for_inference
from stepjepa.models.probe import describe_unreached, freeze_unreached, leaves_weights_unused, unreached_parts

TOWER = ["model.vision_tower", "model.multi_modal_projector"]
CROSS = ["cross_attn_attn_gate", "cross_attn_mlp_gate", "cross_attn"]


def without_gradient(model: Any) -> set[str]:
    """The weights of the whole model that a text gives no gradient."""
    ids = torch.arange(5, 24)[None]
    model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.square().sum().backward()
    result = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    model.zero_grad()
    return result


def test_a_vision_tower() -> None:
    model = tiny.make_model("gemma3")
    assert unreached_parts(model) == TOWER
    assert describe_unreached(model) == "model.vision_tower, model.multi_modal_projector (no text reaches it)"
    inside = {name for name, _ in model.named_parameters() if name.startswith(tuple(TOWER))}
    assert without_gradient(model) == inside
    assert len(inside) > 20
    freeze_unreached(model)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == inside
    assert not leaves_weights_unused(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe", "mamba"])
def test_text_reaches_all_of_a_text_model(architecture: str) -> None:
    model = tiny.make_model(architecture)
    assert unreached_parts(model) == []
    assert describe_unreached(model) is None
    freeze_unreached(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not leaves_weights_unused(model)


def test_layers_of_which_some_are_reached() -> None:
    """Without an image a layer of cross-attention does not run: what it alone has is frozen, DDP must find the rest."""
    sizes = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 28}
    config = MllamaTextConfig(
        vocab_size=tiny.VOCABULARY, num_hidden_layers=3, cross_attention_layers=[1], pad_token_id=0, **sizes
    )
    model = MllamaForCausalLM(config).eval()
    assert unreached_parts(model) == [f"model.layers.1.{name}" for name in CROSS]
    freeze_unreached(model)
    rest = without_gradient(model) - {n for n, p in model.named_parameters() if not p.requires_grad}
    assert rest
    assert all(name.startswith("model.layers.1.") for name in rest)
    assert leaves_weights_unused(model)


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_no_adapter_where_text_does_not_reach(targets: str) -> None:
    model = tiny.make_model("gemma3")
    wrapped: Any = add_lora(model, LoraSettings(3, targets=targets), [])
    adapters = [name for name, _ in wrapped.named_parameters() if "lora_" in name]
    assert adapters
    assert not [name for name in adapters if "vision" in name or "projector" in name]
    # Found under the adapter as without it.
    assert unreached_parts(wrapped) == TOWER


def test_targets_in_the_tower_alone_are_refused() -> None:
    with pytest.raises(UserError, match="`lora_targets fc1`"):
        add_lora(tiny.make_model("gemma3"), LoraSettings(3, targets="fc1"), [])


def test_adapters_of_ones_own_in_the_tower_are_frozen() -> None:
    import peft

    model = tiny.make_model("gemma3")
    wrapped: Any = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    freeze_unreached(wrapped)
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert trained
    assert not [name for name in trained if "vision" in name]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_training_leaves_the_tower_as_it_was(lora: bool, plain_tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model("gemma3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = JepaTrainer(
        add_lora(model, LoraSettings(3), []) if lora else model,
        # Weight decay would shrink weights whose gradient is zero.
        tiny.arguments(tmp_path, learning_rate=0.1, weight_decay=0.5),
        JepaConfig(mode="regular"),
        train_dataset=tiny.records(),
        processing_class=copy.deepcopy(plain_tokenizer),
    )
    assert trainer.args.ddp_find_unused_parameters is False
    trainer.train()
    moved = {
        name for name, value in model.state_dict().items() if name in before and not torch.equal(value, before[name])
    }
    assert bool(moved) is not lora
    assert not [name for name in moved if "vision" in name or "projector" in name]


@pytest.mark.slow
def test_the_command_and_what_it_saves(
    plain_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_material(tmp_path, plain_tokenizer)
    tiny.make_model("gemma3").save_pretrained(tmp_path / "base")
    run = ["train", "--train_file", f"{tmp_path}/data.jsonl", "--model_name", f"{tmp_path}/base", "--lora", "--use_cpu"]
    assert main([*run, "--max_steps", "1", "--output_dir", f"{tmp_path}/run"]) == 0
    assert "model.vision_tower, model.multi_modal_projector (no text reaches it)" in capsys.readouterr().out
    model, _ = load_for_inference(tmp_path / "run", device="cpu")
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    assert main(["verify", *run[1:5], "--regular"]) == 0
