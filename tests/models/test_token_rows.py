"""Rows of new tokens: spare ones first, distinct, the same for the same seed; trained with adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from stepjepa import JepaConfig, JepaTrainer
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora, load_for_inference, load_model
from stepjepa.models.token_rows import (
    adapter_ids,
    adapter_rows,
    add_missing_rows,
    add_plain_rows,
    add_predictor_rows,
    resize_embedding,
    rows_of,
)


def weights(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return embedding.detach().clone(), head.detach().clone()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", ["none", "trained", "zeros", "alike"])
def test_rows_of_new_tokens(spare: str, architecture: str, plain_tokenizer: Any) -> None:
    """The embedding grows if it must; spare rows are used, and drawn anew where they can't be told apart."""
    tokenizer, size = copy.deepcopy(plain_tokenizer), len(plain_tokenizer)
    model = tiny.make_model(architecture, vocab_size=size + (0 if spare == "none" else 7))
    with torch.no_grad():
        if spare in ("zeros", "alike"):
            model.get_input_embeddings().weight[size:] = 0.0 if spare == "zeros" else 0.4
    old, old_head = weights(model)
    add_predictor_rows(model, tokenizer, 3)
    embedding, head = weights(model)
    ids = all_predictor_ids(tokenizer)
    assert ids == [size, size + 1, size + 2]
    assert len(embedding) == len(head) == (size + 3 if spare == "none" else size + 7)
    assert torch.equal(embedding[:size], old[:size])
    assert torch.equal(head[:size], old_head[:size])
    distances = torch.cdist(embedding[ids], embedding[ids])[~torch.eye(3, dtype=torch.bool)]
    assert distances.min() > 0.5 * old[:size].std(0).norm(), "the new tokens act as one"
    if spare == "trained":
        assert torch.equal(embedding, old)
    elif spare == "none" and architecture == "qwen3":
        # No predictor token is ever a label.
        assert torch.allclose(head[ids], old_head.mean(0).expand(3, -1), atol=1e-6)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (architecture == "llama")


def test_rows_depend_on_the_seed_and_are_given_once(plain_tokenizer: Any) -> None:
    result = []
    for seed in (1, 1, 2):
        tokenizer, model = copy.deepcopy(plain_tokenizer), tiny.make_model("llama", vocab_size=len(plain_tokenizer))
        add_predictor_rows(model, tokenizer, 2, seed)
        result.append(weights(model)[0])
        add_predictor_rows(model, tokenizer, 2, seed + 5)
        assert torch.equal(weights(model)[0], result[-1]), "tokens that were there are drawn again"
    assert torch.equal(result[0], result[1])
    assert not torch.equal(result[0], result[2])


@pytest.mark.parametrize("spare", [True, False])
def test_tokens_of_the_form_without_a_chat(spare: bool, plain_tokenizer: Any) -> None:
    size = len(plain_tokenizer)
    tokenizer = copy.deepcopy(plain_tokenizer)
    model = tiny.make_model("qwen3", vocab_size=size + (7 if spare else 0))
    old, _ = weights(model)
    for _ in range(2):  # those that are there keep their rows
        ids = add_plain_rows(model, tokenizer)
        assert tokenizer.convert_ids_to_tokens(ids) == ["<|perception|>", "<|eot_id|>"]
        assert model.generation_config.eos_token_id == [2, ids[1]]
    assert torch.equal(weights(model)[0][:size], old[:size])
    assert len(weights(model)[0]) == (size + 7 if spare else size + 2)
    add_predictor_rows(model, tokenizer, 2)
    # Without spare rows the base lacks those of the form, too, whether the form is used or not.
    lacking = [] if spare else ids
    assert adapter_ids(model, tokenizer, plain=False) == sorted({*all_predictor_ids(tokenizer), *lacking})
    assert adapter_ids(model, tokenizer, plain=True) == sorted({*all_predictor_ids(tokenizer), *ids})


@pytest.mark.parametrize("rows", [tiny.VOCABULARY, 290])
def test_an_adapter_carries_the_rows(rows: int, tmp_path: Path, plain_tokenizer: Any) -> None:
    """Spare rows that were drawn anew, and rows that were not there, are those of training when it is loaded again."""
    base = tiny.make_model("qwen3", vocab_size=rows)
    with torch.no_grad():
        base.get_input_embeddings().weight[290:] = 0.0
    base.save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(str(tmp_path / "base"), plain=True, predictors=2)
    wrapped = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=True))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, same = load_for_inference(tmp_path / "adapter", device="cpu")
    inputs = torch.tensor([same("2+2?<|perception|>4<|predictor_1|><|predictor_2|><|eot_id|>")["input_ids"]])
    with torch.no_grad():
        tiny.assert_same(again(inputs).logits, wrapped.eval()(inputs).logits)


ADAPTERS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    "adalora": peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10),
}


def trainer(folder: Path, adapter: peft.PeftConfig, tokenizer: Any) -> JepaTrainer:
    model = tiny.make_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(folder / "base")
    return JepaTrainer(
        peft.get_peft_model(model, adapter),
        tiny.arguments(folder, max_steps=2, learning_rate=1e-2),
        JepaConfig(predictors=2),
        train_dataset=tiny.records(),
        processing_class=copy.deepcopy(tokenizer),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ADAPTERS)
def test_rows_of_predictors_are_trained_and_saved(name: str, plain_tokenizer: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, ADAPTERS[name], plain_tokenizer)
    ids = torch.tensor(all_predictor_ids(run.processing_class))
    before = run.model.get_input_embeddings()(ids).detach().clone()
    run.train()
    after = run.model.get_input_embeddings()(ids).detach()
    assert ((after - before).abs().amax(1) > 1e-3).all()
    run.save_model(str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert resize_embedding(base, len(run.processing_class))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(loaded.get_input_embeddings()(ids), after)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["regular", "llm-jepa"])
def test_tokens_that_the_model_lacks_get_rows(mode: str, plain_tokenizer: Any, tmp_path: Path, capsys: Any) -> None:
    """A marker was added to the tokenizer and not to the model."""
    tokenizer, size = copy.deepcopy(plain_tokenizer), len(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '<|turn|>\n' }}{%- endfor -%}"
    for architecture in ("llama", "qwen3"):
        tiny.make_model(architecture, vocab_size=size).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        config = JepaConfig(mode=mode, **({} if mode == "regular" else {"predictors": 2}))
        model, made = load_model(str(tmp_path / "base"), predictors=config.used_predictors)
        note = f"its tokenizer needs {size + 1} embedding rows, its weights have {size}; 1 untrained row added"
        assert note in capsys.readouterr().err
        embedding, head = weights(model)
        assert len(embedding) == len(head) == size + 1 + config.used_predictors
        spread = embedding[:size].std(0).norm()
        assert ((embedding[size:] - embedding[:size].mean(0)).norm(dim=-1) > 0.5 * spread).all()
        again, _ = load_model(str(tmp_path / "base"), predictors=config.used_predictors)
        assert torch.equal(weights(again)[0], embedding), "not drawn by the seed"
        assert adapter_ids(model, made, plain=False) == [*range(size, size + 1 + config.used_predictors)]
        # What was loaded by transformers alone.
        bare = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        trainer = JepaTrainer(
            bare,
            tiny.arguments(tmp_path / architecture, max_steps=1),
            config,
            train_dataset=tiny.records(),
            processing_class=copy.deepcopy(tokenizer),
        )
        trainer.train()
        assert len(trainer.model.get_input_embeddings().weight) == len(trainer.processing_class)
        inferred, _ = load_for_inference(tmp_path / "base", device="cpu")
        assert len(inferred.get_input_embeddings().weight) == size + 1


def test_rows_for_ids_with_gaps(plain_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    assert rows_of(tokenizer) == len(tokenizer)
    tokenizer.get_vocab = lambda: {"a": 0, "b": len(tokenizer) + 11}
    assert rows_of(tokenizer) == len(tokenizer) + 12
    model = tiny.make_model("llama", vocab_size=len(tokenizer))
    assert add_missing_rows(model, tokenizer) == 12
    assert add_missing_rows(model, tokenizer) == 0


def test_an_adapter_trains_and_saves_the_row_of_a_token_that_its_base_lacks(
    plain_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tiny.make_model("llama", vocab_size=len(plain_tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(str(tmp_path / "base"))
    wrapped = add_lora(model, LoraSettings(3), adapter_ids(model, tokenizer, plain=False))
    trained = [parameter for name, parameter in wrapped.named_parameters() if "trainable_tokens_delta" in name]
    assert [tuple(each.shape) for each in trained][:1] == [(1, 33)]
    with torch.no_grad():
        trained[0].add_(1.0)
    wrapped.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, _ = load_for_inference(tmp_path / "adapter", device="cpu")
    tiny.assert_same(again.get_input_embeddings().weight[-1], wrapped.get_input_embeddings()(torch.tensor([290]))[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("bare", [False, True], ids=["add_lora", "an adapter of the user's"])
def test_an_adapter_trains_the_row_of_an_untied_head_for_a_token_that_is_a_label(
    bare: bool, plain_tokenizer: Any, tmp_path: Path
) -> None:
    """The end of a turn that the base lacks can be learnt; rows of predictors, which nothing predicts, stay."""
    tokenizer, size = copy.deepcopy(plain_tokenizer), len(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '<|turn|>\n' }}{%- endfor -%}"
    tiny.make_model("qwen3", vocab_size=size).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model, tokenizer = load_model(str(tmp_path / "base"), predictors=2)
    rows = adapter_rows(model, tokenizer, plain=False)
    assert rows == {"embed_tokens": [290, 291, 292], "lm_head": [290]}
    _, before = weights(model)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    run = JepaTrainer(
        peft.get_peft_model(model, lora) if bare else add_lora(model, LoraSettings(3), rows),
        tiny.arguments(tmp_path / "run", max_steps=2, learning_rate=1e-2),
        JepaConfig(predictors=2),
        train_dataset=tiny.records(),
        processing_class=tokenizer,
    )
    run.train()
    run.save_model()
    again, _ = load_for_inference(tmp_path / "run", device="cpu")
    _, after = weights(again)
    assert (after[290] - before[290]).norm() > 1e-3
    assert torch.equal(after[:290], before[:290])
    tiny.assert_same(after[291:], before[291:])
    ids = torch.arange(270, 293)[None]
    with torch.no_grad():
        tiny.assert_same(again(ids).logits, run.model.eval()(ids).logits)


def test_rows_of_a_head_with_a_bias_stay(plain_tokenizer: Any) -> None:
    """PEFT leaves the bias out while it trains rows of the head."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    model = tiny.make_model("phi", vocab_size=len(plain_tokenizer))
    assert model.get_output_embeddings().bias is not None
    assert add_missing_rows(model, tokenizer) == 1
    assert adapter_rows(model, tokenizer, plain=False) == [290]


BOTH = ["embed_tokens", "lm_head"]
# What of the model the adapter holds, in a model with or without spare rows, and what is said of it; None: it trains.
HELD: list[tuple[str, int, dict[str, Any], str | None]] = [
    ("untied", 0, {"modules_to_save": BOTH}, r"for 1 new token.*load_model\(..., predictors=K\)"),
    ("untied", 7, {"modules_to_save": BOTH}, None),
    ("untied", 7, {"modules_to_save": ["lm_head"]}, None),
    ("untied", 0, {"modules_to_save": ["lm_head"]}, "for 1 new token"),
    ("tied", 7, {"modules_to_save": ["lm_head"]}, "list both 'embed_tokens' and the LM head in modules_to_save"),
    ("tied", 7, {"modules_to_save": BOTH}, None),
    ("tied", 7, {"target_modules": ["q_proj", "lm_head"]}, "share one weight, .* modules_to_save="),
    ("tied", 0, {"target_modules": ["q_proj", "embed_tokens"]}, "share one weight, .* modules_to_save="),
    ("tied", 7, {"trainable_token_indices": [5, 7]}, "lacks the new tokens 290; list them there, too"),
    ("tied", 7, {"trainable_token_indices": [5, 7, 290]}, None),
]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(("kind", "spare", "held", "message"), HELD)
@pytest.mark.parametrize("loaded", [False, True], ids=["bare", "load_model"])
def test_adapters_that_hold_the_embedding_or_the_head(
    kind: str, spare: int, held: dict[str, Any], message: str | None, loaded: bool, plain_tokenizer: Any, tmp_path: Path
) -> None:
    """They train, or are refused before the first step, and what the line asks for works."""
    tokenizer = copy.deepcopy(plain_tokenizer)
    model = tiny.make_model("llama" if kind == "tied" else "qwen3", vocab_size=len(tokenizer) + spare)
    if loaded:
        model.save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        model, tokenizer = load_model(str(tmp_path / "base"), predictors=1)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=3, **({"target_modules": ["q_proj"]} | held))
    arguments = tiny.arguments(tmp_path, max_steps=1, learning_rate=1e-2)

    def train() -> JepaTrainer:
        wrapped = peft.get_peft_model(model, adapter)
        run = JepaTrainer(wrapped, arguments, JepaConfig(), train_dataset=tiny.records(), processing_class=tokenizer)
        run.train()
        return run

    if message is None or (loaded and "for 1 new" in message):
        run = train()
        ids = torch.tensor(all_predictor_ids(run.processing_class))
        assert ids.tolist() == [290]
    else:
        with pytest.raises(ValueError, match=message):
            train()


def test_an_adapter_that_can_train_no_rows_is_refused(plain_tokenizer: Any, tmp_path: Path) -> None:
    scales = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[])
    with pytest.raises(ValueError, match=r"adapter of type IA3 can't train the rows .*; wrap with peft.LoraConfig"):
        trainer(tmp_path, scales, plain_tokenizer)
