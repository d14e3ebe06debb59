"""Frozen weights in 4 or 8 bits under an adapter (runs where bitsandbytes is)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.cli.main import main
from stepjepa.config.jepa import JepaConfig
from stepjepa.config.lora import LoraSettings
from stepjepa.models.loading import add_lora, load_for_inference
from stepjepa.models.token_rows import add_predictor_rows
from stepjepa.models.weights import compute_dtype, quantization_options
from stepjepa.store.record import read_run
from stepjepa.training.trainer import JepaTrainer

KINDS = ("4bit", "8bit")

# Blocks of 64 values share a scale, so widths are multiples of that here.
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 192,
    "max_position_embeddings": 509,
}

pytestmark = pytest.mark.filterwarnings(
    # Of products in 8 bits, which choose their own dtype.
    "ignore:MatMul8bitLt. inputs will be cast:UserWarning",
)


@pytest.fixture
def base(tmp_path: Path, plain_tokenizer: Any) -> Path:
    """A model folder with a vocabulary too small for predictor tokens, as those of a hub may be."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(plain_tokenizer), bos_token_id=None, eos_token_id=2, pad_token_id=0, **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def quantized(base: Path, kind: str, tokenizer: Any) -> Any:
    """As ``load_model`` loads it, with two predictor tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, **quantization_options(kind, torch.float32, "cpu")
    )
    add_predictor_rows(model, tokenizer, 2, seed=3)
    return model.train()


def test_another_kind_is_refused(base: Path) -> None:
    """Otherwise the weights would be loaded in full, in silence."""
    with pytest.raises(ValueError, match="quantization: expected one of 4bit, 8bit, got 'nf4'"):
        load_for_inference(base, quantization="nf4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_trains_on_quantized_weights(kind: str, base: Path, plain_tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tokenizer = copy.deepcopy(plain_tokenizer)
    torch.manual_seed(5)
    model: Any = add_lora(quantized(base, kind, tokenizer), LoraSettings(8), all_predictor_ids(tokenizer))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stored = torch.uint8 if kind == "4bit" else torch.int8
    assert {p.dtype for name, p in before.items() if "proj.base_layer" in name} == {stored}
    trainer = JepaTrainer(
        model,
        tiny.arguments(tmp_path / "run", max_steps=6, learning_rate=0.02, per_device_train_batch_size=3),
        JepaConfig(mode="step-jepa", lbd=0.1),
        train_dataset=tiny.records(),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["lm_loss"] for line in trainer.state.log_history if "lm_loss" in line]
    assert losses[-1] < losses[0] - 0.2  # the head is frozen
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    # What was trained answers, merged on the base as it was before it was quantized.
    trainer.save_model(str(tmp_path / "run"))
    merged, loaded = load_for_inference(tmp_path / "run", device="cpu")
    ids = torch.tensor([loaded("What is 3+4+5?")["input_ids"]])
    with torch.no_grad():
        theirs, ours = merged(input_ids=ids).logits, model.eval()(input_ids=ids).logits
    # The base differs by its rounding alone.
    assert torch.nn.functional.cosine_similarity(theirs.flatten(), ours.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line(kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains, resumes, and is loaded on the base in full."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    write_jsonl(tmp_path / "data.jsonl", [{"messages": record.messages} for record in tiny.records() * 5])
    flags = f"--train_file {tmp_path}/data.jsonl --model_name {base} --output_dir {tmp_path}/run --lora --use_cpu "
    flags += f"--load_in_{kind} --step_jepa --save_steps 2 --logging_steps 1 --disable_tqdm true --max_steps"
    assert main(["train", *flags.split(), "2"]) == 0
    capsys.readouterr()
    assert main(["train", *flags.split(), "4", "--resume_from_checkpoint", "last"]) == 0
    output = capsys.readouterr().out
    assert "step 4/4" in output
    assert "step 1/4" not in output
    assert read_run(tmp_path / "run")["loaded"]["quantized"] == kind
    model, _ = load_for_inference(tmp_path / "run", device="cpu")
    assert model.get_input_embeddings().weight.dtype == torch.float32


def test_without_bitsandbytes_training_ends_with_one_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepjepa.models.weights.importlib.util.find_spec", lambda name: None)
    write_jsonl(tmp_path / "data.jsonl", [{"messages": record.messages} for record in tiny.records()])
    flags = ["train", "--train_file", tmp_path / "data.jsonl", "--model_name", base, "--output_dir", tmp_path / "run"]
    assert main([str(flag) for flag in [*flags, "--lora", "--load_in_4bit", "--use_cpu"]]) == 2
    assert "needs bitsandbytes, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("dtype", "bf16", "fp16", "expected"),
    [
        ("float32", False, False, torch.float32),
        ("float32", True, False, torch.bfloat16),
        ("float16", False, False, torch.float16),
        ("auto", False, False, torch.bfloat16),
        ("auto", False, True, torch.float16),
    ],
)
def test_products_have_the_dtype_of_the_run(dtype: str, bf16: bool, fp16: bool, expected: torch.dtype) -> None:
    assert compute_dtype(dtype, bf16=bf16, fp16=fp16) is expected
