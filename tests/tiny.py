"""Tiny models, tokenizers and records for tests: random weights, seconds on one core, no hub.

Sizes are distinct primes, or odd multiples where heads must divide them, so that a mixed-up axis can't go unnoticed.
Weights are drawn large enough for attention to be far from uniform: a leak shows in the first digits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from stepjepa.base.files import write_jsonl
from stepjepa.batch.collate import Collator
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.special_tokens import predictor_ids
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.models.attention import tree_mask
from stepjepa.models.encode import decoder_inputs, flat_states
from stepjepa.views.sequences import SampledRecord, TokenizedRecord

VOCABULARY = 389
WINDOW = 5

_LLAMA: dict[str, Any] = {
    "hidden_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 37,
    "max_position_embeddings": 509,
}
# Rotary embeddings need an even head size, and these families take it from hidden_size / heads.
_THIRTY = {key: value for key, value in _LLAMA.items() if key != "head_dim"} | {"hidden_size": 30}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# name -> (model_type, configuration)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "qwen2": ("qwen2", _THIRTY),
    "qwen3": ("qwen3", _LLAMA),
    "olmo2": ("olmo2", _THIRTY),
    "phi3": ("phi3", _THIRTY),
    "mistral": ("mistral", _LLAMA | {"sliding_window": None}),
    "gpt2": ("gpt2", {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_inner": 37, "n_positions": 509}),
    "gpt_neox": ("gpt_neox", _THIRTY | {"num_key_value_heads": 3}),
    "smollm3": ("smollm3", _THIRTY | {"num_hidden_layers": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        # The grouped product over experts needs widths of whole 16 bytes.
        _LLAMA | {"hidden_size": 36, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28},
    ),
    "granite": ("granite", _THIRTY | {"logits_scaling": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7}),
    "granite_moe": (
        "granitemoe",
        _THIRTY
        | {"hidden_size": 36, "intermediate_size": 28, "logits_scaling": 3.0}
        | {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "cohere": ("cohere", _THIRTY | {"logit_scale": 0.3}),
    "phi": ("phi", _THIRTY | {"hidden_size": 36, "num_key_value_heads": 3}),
    "gemma2_window": ("gemma2", _LLAMA | {"sliding_window": WINDOW} | _MIXED),
    "gemma3_window": ("gemma3_text", _LLAMA | {"sliding_window": WINDOW} | _MIXED),
    "mistral_window": ("mistral", _LLAMA | {"sliding_window": WINDOW}),
    "qwen2_window": ("qwen2", _THIRTY | {"use_sliding_window": True, "sliding_window": WINDOW} | _MIXED),
    "smollm3_window": (
        "smollm3",
        _THIRTY | {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layers": [1, 0, 1]} | _MIXED,
    ),
    "phi3_window": ("phi3", _THIRTY | {"sliding_window": WINDOW}),
    # Between decoder and LM head: a scale; a dense layer and a norm.
    "minicpm3": (
        "minicpm3",
        {name: value for name, value in _THIRTY.items() if name != "num_key_value_heads"}
        | {"num_key_value_heads": 3, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6}
        | {"v_head_dim": 11, "dim_model_base": 10},
    ),
    "bert": (
        "bert",
        {**_THIRTY, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    # AutoModel loads a model around the decoder.
    "opt": (
        "opt",
        {"hidden_size": 36, "word_embed_proj_dim": 36, "ffn_dim": 28, "num_hidden_layers": 2, "num_attention_heads": 3}
        | {"max_position_embeddings": 509},
    ),
    "mamba": ("mamba", {"hidden_size": 14, "num_hidden_layers": 2, "state_size": 5, "time_step_rank": 3}),
    "lfm2": ("lfm2", _THIRTY | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
}
_EXPERTS = _THIRTY | {"hidden_size": 36, "intermediate_size": 28, "num_local_experts": 5, "num_experts_per_tok": 2}
_NAMED = _EXPERTS | {"num_experts": 5}
# Mixtures of experts that have a router loss of their own, in the same form.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", _EXPERTS),
    "olmoe": ("olmoe", _NAMED),
    "qwen2_moe": (
        "qwen2_moe",
        _NAMED | {"moe_intermediate_size": 28, "shared_expert_intermediate_size": 20, "num_experts_per_tok": 3},
    ),
    "phimoe": ("phimoe", _EXPERTS | {"router_jitter_noise": 0.0}),
    "gpt_oss": ("gpt_oss", _EXPERTS | {"head_dim": 12}),
    "jetmoe": ("jetmoe", _EXPERTS | {"kv_channels": 12, "num_key_value_heads": 3}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 36,
            "n_heads": 3,
            "n_layers": 2,
            "max_seq_len": 509,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 28, "moe_num_experts": 5, "moe_top_k": 2, "moe_loss_weight": 0.05},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _EXPERTS
        | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 28, "kv_lora_rank": 14}
        | {
            "q_lora_rank": 14,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
        },
    ),
}
# Models with a part that text does not reach, in the same form.
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {
            "text_config": {"vocab_size": VOCABULARY} | _LLAMA,
            "vision_config": {"hidden_size": 22, "intermediate_size": 14, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
}
WITH_WINDOW = [name for name in ARCHITECTURES if name.endswith("_window")]
RECURRENT = ["mamba", "lfm2"]
LAYERS_BEFORE_HEAD = ["minicpm3", "bert"]
ATTENTION_ONLY = [name for name in ARCHITECTURES if name not in RECURRENT]


def make_model(name: str, attention: str = "sdpa", *, seed: int = 0, **changes: Any) -> Any:
    """A tiny model in evaluation mode, the same weights for the same seed whatever the attention implementation.

    ``name`` is a key of ``ARCHITECTURES``, ``EXPERTS`` or ``WITH_IMAGES``, ``changes`` are to its configuration.
    """
    family, shape = (ARCHITECTURES | EXPERTS | WITH_IMAGES)[name]
    tied = name in ("llama", "bert")
    shape = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": None} | shape | changes
    config = AutoConfig.for_model(
        family,
        eos_token_id=2,
        pad_token_id=0,
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=None if name == "mamba" else attention)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which otherwise start as ones and zeros
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            elif name != "mamba":
                parameter.data.normal_(std=0.3)
    return model.eval()


def make_record(*contents: str, line: int = 1, **fields: Any) -> Record:
    """System, user, assistant, user, assistant ... contents to a record; an empty system text leaves the role out."""
    roles = ["system", *["user", "assistant"] * len(contents)][: len(contents)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    if not contents[0]:
        messages = messages[1:]
    return parse_record({"messages": messages, **fields}, path="memory.jsonl", line=line)


def records() -> list[Record]:
    """Three records of different lengths with 4, 2 and 1 steps; the last one has no Step-JEPA pair."""
    return [
        make_record("Add.", "What is 3+4+5?", "3+4=7.\n\n7+5=12\n\nSo it is\n\n12", line=1),
        make_record("Add.", "And 1+1 then?", "It is two\n\n2.", line=2),
        make_record("Add.", "Name a colour", "Red", line=3),
    ]


def tokenized(tokenizer: Any, config: JepaConfig, given: Sequence[Record] | None = None) -> list[TokenizedRecord]:
    """Records, :func:`records` if none are given, as tokens."""
    return RecordTokenizer(tokenizer, config).tokenize(records() if given is None else given)


def collator(tokenizer: Any, config: JepaConfig, **options: Any) -> Collator:
    """The collator of a configuration: trees in rows of 97 tokens, unless asked for something else."""
    wanted = (config.predictors or 0) if config.uses_views else 0
    return Collator.of(config, predictor_ids(tokenizer, wanted), **{"row_length": 97, **options})


def batch_of(tokenizer: Any, config: JepaConfig, given: Sequence[Record] | None = None, **options: Any) -> Batch:
    """One micro-batch of all records; the options are those of :func:`collator`."""
    records = tokenized(tokenizer, config, given)
    return collator(tokenizer, config, **options)(
        SampledRecord(record, True, (0, i)) for i, record in enumerate(records)
    )


def hidden_states(model: Any, batch: Batch, layer: int = -1) -> Tensor:
    """``[R * T, D]``: a hidden state of a whole batch, trees under their mask."""
    with tree_mask(batch.trees):
        return flat_states(model.get_decoder()(**decoder_inputs(batch, [layer])), layer)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Arguments of a run of three steps on the CPU that saves nothing."""
    fixed = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(
        str(folder), **{"save_strategy": "no", "logging_steps": 1, "max_steps": 3} | fixed | changes
    )


def plain_trainer(folder: Path, tokenizer: Any, model: Any, *, optimizers: Any, callbacks: Any, **changes: Any) -> Any:
    """A ``JepaTrainer`` of plain training on :func:`records`, in micro-batches of two; evaluated on them if asked."""
    from stepjepa import JepaTrainer

    return JepaTrainer(
        model,
        arguments(folder, per_device_train_batch_size=2, **changes),
        JepaConfig(mode="regular"),
        train_dataset=records(),
        eval_dataset=records() if "eval_strategy" in changes else None,
        processing_class=copy.deepcopy(tokenizer),
        optimizers=optimizers,
        callbacks=callbacks,
    )


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every parameter, by name; zeros for one that takes no part."""
    model.zero_grad()
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same(first: Tensor, second: Tensor, tolerance: float = 1e-5, what: str = "") -> None:
    """Equal within a tolerance relative to the largest value."""
    assert first.shape == second.shape, what
    scale = max(1.0, float(second.detach().abs().max())) if second.numel() else 1.0
    difference = float((first - second).detach().abs().max()) if second.numel() else 0.0
    assert difference <= tolerance * scale, f"{what}: differ by {difference:.2e} at a scale of {scale:.2e}"


def assert_same_gradients(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """All gradients equal, relative to the largest entry of all; and not all of them zero."""
    assert first.keys() == second.keys()
    scale = max(float(value.abs().max()) for value in second.values())
    assert scale > 1e-3, "the loss does not reach the parameters"
    for name, value in second.items():
        difference = float((first[name] - value).abs().max())
        assert difference <= tolerance * scale, f"{name}: differ by {difference:.2e} at a scale of {scale:.2e}"


def write_material(folder: Path, tokenizer: Any) -> None:
    """What a command trains on: ``base``, a model with its tokenizer, and ``data.jsonl``, :func:`records`."""
    make_model("llama").save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    write_jsonl(folder / "data.jsonl", [{"messages": list(record.messages)} for record in records()])
