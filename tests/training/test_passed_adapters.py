"""Models of PEFT that a user wraps and passes to ``JepaTrainer``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import tiny
from stepjepa import JepaConfig, JepaTrainer

REGULAR = JepaConfig(mode="regular")


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "v_proj"], **more)


def make_trainer(folder: Path, model: Any, tokenizer: Any, jepa: JepaConfig | None = None) -> Any:
    return JepaTrainer(
        model,
        tiny.arguments(folder, max_steps=1, learning_rate=0.1, per_device_train_batch_size=2),
        jepa or JepaConfig(),
        train_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
    )


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(5, 18)[None]).logits
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"modules_to_save": ["norm"]}])
def test_a_saved_adapter_loads_and_merges_to_the_trained_model(
    more: dict[str, Any], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    base: Any = tiny.make_model("llama")
    model = get_peft_model(copy.deepcopy(base), lora(**more))
    trainer = make_trainer(tmp_path, model, tiny_tokenizer)
    trainer.train()
    trainer.save_model()
    trained = logits(model)
    with model.disable_adapter():
        before = logits(model)
    assert torch.allclose(before, logits(base), atol=1e-6) and not torch.allclose(before, trained, atol=1e-2)
    again: Any = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert torch.allclose(logits(again), trained, atol=1e-5)
    assert torch.allclose(logits(again.merge_and_unload()), trained, atol=1e-5)


def test_an_adapter_beside_the_trained_one_stays_as_it_was(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The first checkpoint ended in a KeyError of PEFT."""
    base: Any = tiny.make_model("llama")
    model: Any = get_peft_model(copy.deepcopy(base), lora())
    model.add_adapter("other", lora())
    other = {name: weight.clone() for name, weight in model.named_parameters() if ".other." in name}
    trainer = make_trainer(tmp_path, model, tiny_tokenizer)
    trainer.train()
    trainer.save_model()
    assert other and all(torch.equal(weight, model.get_parameter(name)) for name, weight in other.items())
    assert not (tmp_path / "other").exists()
    again: Any = PeftModel.from_pretrained(base, tmp_path)
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def test_adapters_that_a_run_folder_can_not_hold_are_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A run with an adapter of another name was trained, and could not be read afterwards."""
    named = get_peft_model(tiny.make_model("llama"), lora(), adapter_name="mine")
    with pytest.raises(ValueError, match=r"the active adapter is 'mine', .*; leave adapter_name out of get_peft_model"):
        make_trainer(tmp_path, named, tiny_tokenizer)
    inside: Any = tiny.make_model("llama")
    inside.add_adapter(lora())
    with pytest.raises(ValueError, match="pass the PeftModel of get_peft_model"):
        make_trainer(tmp_path, inside, tiny_tokenizer)


def test_a_model_without_trained_weights_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The error was autograd's, or the rows of predictor tokens alone were trained."""
    base: Any = tiny.make_model("llama")
    get_peft_model(copy.deepcopy(base), lora()).save_pretrained(tmp_path / "adapter")
    frozen = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    with pytest.raises(ValueError, match="no weight of the model is trained; pass is_trainable=True to PeftModel"):
        make_trainer(tmp_path, frozen, tiny_tokenizer)
    merged: Any = frozen.merge_and_unload()
    with pytest.raises(ValueError, match=r"no weight of the model is trained; call model.requires_grad_\(True\)"):
        make_trainer(tmp_path, merged, tiny_tokenizer, REGULAR)
