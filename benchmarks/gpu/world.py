"""Records, models of published shapes, and what all parts share."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_NAME, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stepjepa import JepaConfig, prepare
from stepjepa.chat.special_tokens import add_predictor_tokens
from stepjepa.models.presets import fit_config, train_tokenizer

PARTS_OF_WORDS = "ba be bi bo bu da de di do du ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu".split()
WORDS = [a + b for a in PARTS_OF_WORDS for b in "ba de ki lo mu na re si to vu".split()]


def make_records(count: int, tokens: int, seed: int = 0, spread: float = 0.3, prefix: int = 0) -> list[dict[str, Any]]:
    """Chats of about ``tokens`` tokens: a system prompt, a question (a third of it) and an answer of three steps.

    The answer repeats words of the question, so that a model can learn something. ``prefix`` words more stand in the
    system prompt, which all records share.
    """
    rng, records = random.Random(seed), []
    system = " ".join(["You are a helpful assistant.", *(rng.choice(WORDS) for _ in range(prefix))])
    for _ in range(count):
        words = max(16, int(tokens / 1.2 * rng.uniform(1 - spread, 1 + spread)))
        question = [rng.choice(WORDS) for _ in range(max(4, words // 3))]
        size = max(2, words * 2 // 9)
        start = rng.randrange(len(question))
        copied = [question[(start + at) % len(question)] for at in range(3 * size)]
        steps = [" ".join(copied[at * size : (at + 1) * size]) for at in range(3)]
        records.append(
            {
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": " ".join(question)},
                    {"role": "assistant", "content": "\n\n".join(steps)},
                ]
            }
        )
    return records


# Shapes of published models. The vocabulary is part of the shape, since the LM head is a large part of a small model.
SHAPES: dict[str, dict[str, Any]] = {
    "0.3B": {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
             "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 4096, "vocab_size": 32000},
    "0.5B": {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936},
    "1B": {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256},
    "8B": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
           "tie_word_embeddings": False},
    "toy": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 4096},
}  # fmt: skip


def shape_config(name: str, tokenizer: Any, **changes: Any) -> Any:
    shape = {"tie_word_embeddings": True, "max_position_embeddings": 32768} | SHAPES[name] | changes
    config = AutoConfig.for_model(**shape)
    fit_config(config, tokenizer)
    return config


def build(
    name: str, tokenizer: Any, device: str, *, dtype: str = "float32", attention: str = "sdpa", **changes: Any
) -> Any:
    """A model of this shape with random weights, created on the device."""
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        config = shape_config(name, tokenizer, **changes)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.train()


def non_embedding(model: Any) -> tuple[int, int]:
    """Number of weights of the blocks, and of the LM head (or of the tied embedding)."""
    head = model.get_output_embeddings().weight
    every = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    return every - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


class World:
    """What all parts share: device, sizes, tokenizer. It is created before anything uses the GPU."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.smoke, self.out = options.device, options.smoke, Path(options.out)
        self.cuda = self.device == "cuda"
        self._texts = [message["content"] for record in make_records(200, 300) for message in record["messages"]]
        self.tokenizer = self.fresh_tokenizer()
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))

    def fresh_tokenizer(self) -> Any:
        """A tokenizer with the predictor tokens of every mode."""
        tokenizer = train_tokenizer(iter(self._texts), 1024)
        add_predictor_tokens(tokenizer, 2)
        # As a folder of the shapes gives it: the tokenizer of a qwen2 is always read by that type's class.
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            (Path(folder) / CONFIG_NAME).write_text('{"model_type": "qwen2"}', encoding="utf-8")
            return AutoTokenizer.from_pretrained(folder)

    def sizes(self, on_gpu: Any, in_smoke: Any) -> Any:
        return in_smoke if self.smoke else on_gpu

    def prepared(self, records: list[dict[str, Any]], config: Any) -> Any:
        return prepare(records, self.tokenizer, config, cache_dir=False)


def jepa_config(arm: dict[str, Any], **more: Any) -> JepaConfig:
    """The objective of an arm: InfoNCE, where it has views."""
    settings: dict[str, Any] = {"max_length": 16384} | arm | more
    return JepaConfig(**settings if settings.get("mode") == "regular" else {"jepa_loss_type": "infonce", **settings})
