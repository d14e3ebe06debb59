"""``--gguf_file``: weights and tokenizer out of one file, trained, saved and loaded as any others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import tiny
from stepjepa.cli import main
from stepjepa.models.loading import load_for_inference, load_model

WIDTH, HEADS, INNER, FILE = 20, 5, 28, "tiny.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, plain_tokenizer: Any) -> Path:
    """A Llama of one layer in float32, and the tiny tokenizer."""
    path = tmp_path_factory.mktemp("gguf")
    tokens = [token for token, _ in sorted(plain_tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    writer = gguf.GGUFWriter(str(path / FILE), "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in plain_tokenizer.all_special_tokens else 1 for token in tokens])
    merges = json.loads(plain_tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(plain_tokenizer.eos_token_id)
    writer.add_pad_token_id(plain_tokenizer.pad_token_id)
    writer.add_chat_template(plain_tokenizer.chat_template)
    shapes = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_down": (WIDTH, INNER)}
    shapes |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, WIDTH))
    whole = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    whole |= {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    draw = np.random.default_rng(7)
    for name, shape in whole.items():
        writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tiny.write_material(path / "data", plain_tokenizer)
    return path


def test_the_weights_are_those_of_the_file(folder: Path, plain_tokenizer: Any) -> None:
    model, tokenizer = load_model(str(folder), gguf_file=FILE)
    file = gguf.GGUFReader(str(folder / FILE))
    (expected,) = (each.data for each in file.tensors if each.name == "token_embd.weight")
    torch.testing.assert_close(model.get_input_embeddings().weight.detach(), torch.tensor(expected), rtol=0, atol=0)
    assert plain_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()
    assert tokenizer.chat_template == plain_tokenizer.chat_template


@pytest.mark.parametrize("lora", [[], ["--lora", "--lora_rank", "2"]], ids=["full", "lora"])
def test_it_is_trained_and_loaded_again(lora: list[str], folder: Path, tmp_path: Path) -> None:
    data = next((folder / "data").glob("*.jsonl"))
    model = ["--model_name", str(folder), "--gguf_file", FILE]
    run = ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--use_cpu", "--max_length", "1024"]
    assert main(["train", "--train_file", str(data), *model, *run, *lora]) == 0
    model, tokenizer = load_for_inference(tmp_path / "run")
    ids = torch.tensor([tokenizer("2 + 3")["input_ids"]])
    assert bool(torch.isfinite(model(ids).logits).all())
