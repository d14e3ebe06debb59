"""Models of PEFT that a user wraps and passes to ``JepaTrainer``."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from transformers import AutoModelForCausalLM

import tiny
from stepjepa import Jepa, JepaConfig, JepaTrainer
from stepjepa.base.errors import UserError

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
    # A sum of weights is rounded once more: up to 4e-5 over 120 draws of the adapter.
    assert torch.allclose(logits(again.merge_and_unload()), trained, atol=2e-4)


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
    # As transformers' own add_adapter does, which refuses a PEFT that is older than it asks for.
    inject_adapter_in_model(lora(), inside)
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


def on_embedding(**more: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["embed_tokens", "q_proj"], **more)


def two_at_once(base: Any) -> Any:
    model: Any = get_peft_model(base, lora())
    model.add_adapter("other", lora())
    model.base_model.set_adapter(["default", "other"])
    return model


def merged(base: Any) -> Any:
    model: Any = get_peft_model(base, lora())
    model.merge_adapter()
    return model


def test_a_term_that_peft_adds_in_its_forward_pass_is_said_to_be_left_out(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for weight in (0.25, 0.0):
        more = {"target_modules": ["q_proj"], "total_step": 10, "orth_reg_weight": weight}
        config = AdaLoraConfig(task_type="CAUSAL_LM", **more)
        make_trainer(tmp_path / f"{weight}", get_peft_model(tiny.make_model("llama"), config), tiny_tokenizer, REGULAR)
        told = "without its orthogonality regularizer (orth_reg_weight 0.25)" in capsys.readouterr().err
        assert told == bool(weight)


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`", "ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (two_at_once, r"adapters default, other are active at once, .*; .* call model.set_adapter\('default'\)"),
        (merged, r"the adapter is merged into its base, .*; call model.unmerge_adapter\(\)"),
        (
            lambda base: get_peft_model(base, on_embedding()),
            r"share one weight, .* modules_to_save=\['embed_tokens', 'l",
        ),
        (lambda base: get_peft_model(base, lora(lora_bias=True)), "lora_bias can't be merged into layers .* leave it"),
        (
            lambda base: get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
            "type PROMPT_TUNING puts virtual tokens in front of every row: .*; use peft.LoraConfig",
        ),
        (
            lambda base: get_peft_model(base, AdaptionPromptConfig(adapter_len=2, adapter_layers=1)),
            "type ADAPTION_PROMPT can't be merged into a model; use peft.LoraConfig",
        ),
        (
            lambda base: get_peft_model(base, lora(alora_invocation_tokens=[3, 5])),
            "alora_invocation_tokens: the adapter acts behind these tokens .*; leave them out of LoraConfig",
        ),
        (
            lambda base: get_peft_model(base, lora(inference_mode=True)),
            "no weight of the model is trained; .* or inference_mode=False to LoraConfig",
        ),
    ],
    ids=["two", "merged", "tied", "bias", "prompt", "adaption", "alora", "frozen"],
)
def test_adapters_that_would_be_another_model_in_the_folder_are_refused(
    wrap: Any, words: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """All but the frozen one were trained: the folder gave other logits, or could not be loaded."""
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, wrap(tiny.make_model("llama")), tiny_tokenizer, REGULAR)


def test_the_remedies_for_two_adapters_and_a_merged_one_work(tmp_path: Path, tiny_tokenizer: Any) -> None:
    two, unmerged = two_at_once(tiny.make_model("llama")), merged(tiny.make_model("llama"))
    two.set_adapter("default")
    unmerged.unmerge_adapter()
    for number, model in enumerate((two, unmerged)):
        before = {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}
        make_trainer(tmp_path / str(number), model, tiny_tokenizer, REGULAR).train()
        assert all(".default." in name for name in before)
        assert not all(torch.equal(weight, model.get_parameter(name)) for name, weight in before.items())


@pytest.mark.filterwarnings(
    "ignore:Model (has|with) `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`"
)
def test_an_adapter_on_a_tied_embedding_is_not_merged_in_silence(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Merging added it to the LM head, too, so that evaluations and exports were of another model."""
    tiny.write_material(tmp_path, tiny_tokenizer)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model: Any = get_peft_model(base, on_embedding(init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    tiny_tokenizer.save_pretrained(tmp_path / "adapter")
    trained = logits(model)
    assert not torch.allclose(logits(model.merge_and_unload()), trained, atol=0.1)  # why it is refused
    with pytest.raises(UserError, match=r"can't load a model from .* merging the adapter would change both"):
        Jepa.from_pretrained(tmp_path / "adapter")


def test_the_record_tells_adapters_apart(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Other settings than the usual were not recorded, so that ``compare`` took such runs for seeds of one arm.

    A LoHa adapter ended in an ``AttributeError``.
    """
    configs = {
        "plain": lora(),
        "some": lora(layers_to_transform=[1], modules_to_save=["norm"]),
        "loha": LoHaConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"]),
    }
    found = {}
    for name, config in configs.items():
        make_trainer(tmp_path / name, get_peft_model(tiny.make_model("llama"), config), tiny_tokenizer, REGULAR).train()
        found[name] = json.loads((tmp_path / name / "run.json").read_text())["lora"]
    usual = {"rank": 3, "alpha": 8, "dropout": 0.0, "targets": "q_proj,v_proj", "dora": False, "rslora": False}
    assert found == {
        "plain": usual,
        "some": usual | {"layers_to_transform": [1], "modules_to_save": ["norm"]},
        "loha": {"rank": None, "alpha": None, "type": "LOHA", "r": 3, "target_modules": ["q_proj"]},
    }
