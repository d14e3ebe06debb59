"""Invariant 7: what a run leaves loads with plain transformers or PEFT and gives the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.chat.special_tokens import all_predictor_ids
from stepjepa.cli.main import main
from stepjepa.models.loading import load_for_inference


def make_base(folder: Path, tokenizer: Any, *, tied: bool, spare: bool) -> None:
    """A base model as from a hub: no predictor tokens yet, with or without spare rows in its embedding."""
    rows = len(tokenizer) + (17 if spare else 0)
    torch.manual_seed(5)
    model = tiny.make_model("llama", seed=5, vocab_size=rows)
    if not tied:
        model = type(model)(type(model.config).from_dict({**model.config.to_dict(), "tie_word_embeddings": False}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    return tmp_path / "data.jsonl"


def train(base: Path, data: Path, run: Path, *flags: str) -> None:
    code = main(
        [
            *("train", "--model_name", str(base), "--train_file", str(data), "--output_dir", str(run), "--use-cpu"),
            *("--max_steps", "3", "--learning_rate", "0.05", "--save_strategy", "no", "--predictors", "2", *flags),
        ]
    )
    assert code == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_adapter(tied: bool, spare: bool, plain_tokenizer: Any, data: Path, tmp_path: Path) -> None:
    base, run, merged = tmp_path / "base", tmp_path / "run", tmp_path / "merged"
    make_base(base, plain_tokenizer, tied=tied, spare=spare)
    train(base, data, run, "--lora", "--lora_rank", "3")
    assert main(["export", "--model_path", str(run), "--output_dir", str(merged)]) == 0
    ids = torch.arange(3, 61)[None]
    adapter, tokenizer = load_for_inference(run, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(merged).eval()
    with torch.no_grad():
        expected, untrained = adapter(ids).logits, AutoModelForCausalLM.from_pretrained(base).eval()(ids).logits
        assert (plain(ids).logits - expected).abs().max() <= 2e-6
    assert (expected[..., : untrained.shape[-1]] - untrained).abs().max() > 1e-3, "nothing was trained"
    predictors = torch.tensor(all_predictor_ids(tokenizer))
    rows = adapter.get_input_embeddings()(predictors)
    assert (rows[0] - rows[1]).norm() > 0.1 * rows.norm()
    exported = AutoTokenizer.from_pretrained(merged)
    assert all_predictor_ids(exported) == predictors.tolist()
    if spare:
        # Loads with plain PEFT on the base as it is on the hub.
        by_hand = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run).eval()
        with torch.no_grad():
            # Not merged, so the adapter's product is added in another order.
            assert (by_hand(ids).logits - expected).abs().max() <= 1e-4


def test_whole_model(plain_tokenizer: Any, data: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    make_base(base, plain_tokenizer, tied=True, spare=False)
    train(base, data, run)
    plain = AutoModelForCausalLM.from_pretrained(run).eval()
    ours, tokenizer = load_for_inference(run, device="cpu")
    ids = torch.arange(3, 61)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, ours(ids).logits)
    assert plain.get_input_embeddings().weight.shape[0] == len(tokenizer)
    # Plain generate() must not produce what only training knows.
    assert plain.generation_config.suppress_tokens == all_predictor_ids(tokenizer)
