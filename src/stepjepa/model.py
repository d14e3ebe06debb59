"""Load or build a model with its tokenizer, give it predictor tokens, wrap it with LoRA, load it again."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from stepjepa.config import DTYPES
from stepjepa.errors import UserError
from stepjepa.predictors import add_predictor_tokens
from stepjepa.presets import PREFIX, make_config, preset_tokenizer, read_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What transformers, PEFT and safetensors raise for a folder that is missing, foreign or broken.
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, AttributeError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class LoraSettings:
    """How an adapter is made.

    Attributes:
        rank: r.
        alpha: scale; twice the rank if None.
        dropout: of the adapter's input.
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora_rank: expected 1 or more, got {self.rank}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora_dropout: expected a share below 1, got {self.dropout}")


def quiet_bars() -> None:
    """Keep transformers from drawing progress bars where nobody watches."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def torch_dtype(name: str) -> torch.dtype | str:
    """The dtype of a name in ``config.DTYPES``; ``auto`` stays a word, which takes the checkpoint's own."""
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got '{name}'")
    return "auto" if name == "auto" else getattr(torch, name)


def load_tokenizer(name: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or hub id.

    Args:
        name: folder or hub id.
        chat_template: a Jinja file that takes the place of the tokenizer's own.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    quiet_bars()
    if not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise UserError("no such model folder; check the path", path=name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"can't load a tokenizer from '{name}': {_first_line(error)}") from None
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def load_model(
    name: str,
    *,
    texts: Iterable[str] = (),
    predictors: int = 0,
    seed: int = 42,
    dtype: str = "float32",
    chat_template: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """A causal language model for training, with its tokenizer.

    Args:
        name: a folder, a hub id, or ``preset:NAME`` for a small model with random weights.
        texts: what a preset's tokenizer is trained on; not used otherwise.
        predictors: K, how many predictor tokens to add.
        seed: of a preset's weights and of new embedding rows.
        dtype: of the weights: ``float32``, ``bfloat16``, ``float16`` or ``auto``, the checkpoint's own.
        chat_template: a Jinja file instead of the tokenizer's template.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the model.

    Returns:
        The model, in training mode, and the tokenizer.

    Raises:
        UserError: no such preset, folder or hub id, or it can't be loaded.
    """
    from transformers import AutoModelForCausalLM

    quiet_bars()
    tokenizer: Any
    if name.startswith(PREFIX):
        tokenizer, model = _build_preset(
            name, texts, seed=seed, dtype=dtype, chat_template=chat_template, attention=attn_implementation
        )
    else:
        tokenizer = load_tokenizer(name, chat_template=chat_template, trust_remote_code=trust_remote_code)
        if (Path(name) / "adapter_config.json").is_file():
            raise UserError(
                "is an adapter; training starts from a whole model: run 'stepjepa export' on it first", path=Path(name)
            )
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=torch_dtype(dtype),
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        except LOAD_ERRORS as error:
            raise UserError(f"can't load a model from '{name}': {_first_line(error)}") from None
    give_predictors(model, tokenizer, predictors, seed)
    model.train()
    return model, tokenizer


def _build_preset(
    name: str, texts: Iterable[str], *, seed: int, dtype: str, chat_template: str | None, attention: str | None
) -> tuple[Any, PreTrainedModel]:
    from transformers import AutoModelForCausalLM

    preset, tokenizer = preset_tokenizer(name, texts, chat_template)
    # Weights depend on the seed alone, wherever the global generator stands.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            make_config(preset, tokenizer),
            dtype=torch.float32 if dtype == "auto" else torch_dtype(dtype),
            attn_implementation=attention,
        )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model


def give_predictors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 42) -> None:
    """Add ``<|predictor_1|>`` .. ``<|predictor_count|>`` to a tokenizer and rows for them to a model.

    Rows that the embedding has beyond the tokenizer are used first; only then is it made larger. New rows, and spare
    ones that can't be told apart (all zeros, or all alike), are drawn around the mean of the others, so that the K
    tokens do not act as one. In a head of its own they stay at that mean: no predictor token is ever a label.

    Args:
        model: changed in place.
        tokenizer: changed in place.
        count: K.
        seed: of the new rows.
    """
    if count == 0:
        return
    known = set(tokenizer.get_added_vocab().values())
    ids = add_predictor_tokens(tokenizer, count)
    new = [index for index in ids if index not in known]
    resized = _grow(model, len(tokenizer))
    if new:
        _make_distinct(model.get_input_embeddings().weight, new, seed, anew=resized)


def _grow(model: PreTrainedModel, rows: int) -> bool:
    """Make the embedding larger if need be; new rows of a separate head are the mean of the others."""
    known = model.get_input_embeddings().weight.shape[0]
    if known >= rows:
        return False
    model.resize_token_embeddings(rows, mean_resizing=False)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        with torch.no_grad():
            head.weight[known:] = head.weight[:known].float().mean(0).to(head.weight.dtype)
    return True


def _make_distinct(weight: torch.Tensor, rows: Sequence[int], seed: int, *, anew: bool) -> None:
    """Draw rows from the distribution of those before them: ``anew``, or where they are zero or alike."""
    with torch.no_grad():
        old = weight[: min(rows)].float()
        mean, spread = old.mean(0), old.std(0)
        fresh = weight[list(rows)].float()
        scale = spread.norm()
        distances = torch.cdist(fresh, fresh) + torch.eye(len(rows), device=fresh.device) * scale
        told_apart = bool(distances.min() > 0.5 * scale and (fresh.norm(dim=-1) > 0.5 * scale).all())
        if told_apart and not anew:
            return
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(fresh.shape, generator=generator).to(fresh.device)
        weight[list(rows)] = (mean + spread * noise).to(weight.dtype)


def add_lora(model: PreTrainedModel, settings: LoraSettings, trainable_ids: Sequence[int]) -> nn.Module:
    """Wrap a model with a LoRA adapter on all its linear layers; the given embedding rows are trained as well.

    Args:
        model: the base model, with its predictor tokens.
        settings: rank, scale, dropout.
        trainable_ids: ids of the predictor tokens; plain LoRA would leave their rows as they were drawn for ever.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        trainable_token_indices=list(trainable_ids) or None,
    )
    wrapped = get_peft_model(model, config)
    # The trained rows are in the adapter, and the others are the base's: a copy of the whole embedding, which PEFT adds
    # when it finds the vocabulary resized, would only make the adapter large.
    wrapped.save_pretrained = partial(wrapped.save_pretrained, save_embedding_layers=False)
    wrapped.enable_input_require_grads()  # gradient checkpointing needs a gradient at the frozen embedding's output
    return wrapped


def load_for_inference(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Any]:
    """A trained model in evaluation mode: a whole model, or an adapter merged on its base.

    Args:
        path: run folder, checkpoint folder or hub id.
        dtype: see ``config.DTYPES``.
        quantization: ``4bit`` or ``8bit`` through bitsandbytes, None for neither.
        device: where to put it; the accelerator if there is one, else the CPU.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: nothing there can be loaded.
    """
    from transformers import AutoModelForCausalLM

    name = str(path)
    if name.startswith(PREFIX):
        raise UserError(f"'{name}' has random weights; name the folder of a run that trained it")
    adapter = Path(name) / "adapter_config.json"
    if Path(name).is_dir() and not adapter.is_file() and not (Path(name) / "config.json").is_file():
        raise UserError(
            "holds no model (neither config.json nor adapter_config.json); a run that was stopped has its models in "
            "checkpoint-N",
            path=name,
        )
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    base = name
    if adapter.is_file():
        base = str(json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "")
        if not base:
            raise UserError("names no base model (base_model_name_or_path); add it", path=adapter)
    options = {} if quantization is None else _quantization(quantization)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch_dtype(dtype), trust_remote_code=trust_remote_code, **options
        )
        if adapter.is_file():
            model = _merge(model, name, len(tokenizer))
    except LOAD_ERRORS as error:
        raise UserError(f"can't load a model from '{base}': {_first_line(error)}") from None
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    # Quantized weights are where they belong already.
    return (model if options else model.to(device)).eval(), tokenizer


def _quantization(kind: str) -> dict[str, Any]:
    """What ``from_pretrained`` must be told."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"--load_in_{kind} needs bitsandbytes, which is not installed; run 'pip install bitsandbytes' or leave the "
            "flag out"
        )
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(**{f"load_in_{kind}": True}), "device_map": "auto"}


def _merge(model: PreTrainedModel, adapter: str, vocabulary: int) -> PreTrainedModel:
    from peft import PeftModel

    _grow(model, vocabulary)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
