"""Load or build a model with its tokenizer, add predictor tokens, wrap it with LoRA, load a trained model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepjepa.base.arguments import check_path, expanded
from stepjepa.base.errors import UserError, visible
from stepjepa.base.files import read_json_object
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.terminal import note
from stepjepa.chat.source import read_template
from stepjepa.chat.special_tokens import add_plain_tokens
from stepjepa.chat.template import ChatTemplate
from stepjepa.config.lora import LoraSettings
from stepjepa.models import presets
from stepjepa.models.adapters import check_merging
from stepjepa.models.generation_settings import load_generation_config
from stepjepa.models.names import adapter_file, base_of_adapter, check_base, check_model_name, check_trained
from stepjepa.models.presets import PREFIX
from stepjepa.models.probe import inside_of, unreached_parts
from stepjepa.models.token_rows import (
    add_missing_rows,
    add_plain_rows,
    add_predictor_rows,
    resize_embedding,
    rows_of,
    save_trained_rows_only,
)
from stepjepa.models.weights import damaged_file, load_adapter, load_weights, quantization_options

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from stepjepa.config.jepa import Quantization

# Patterns of file names, of which every folder with a tokenizer has at least one.
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model")


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
    pretrain: bool = False,
    plain: bool = False,
    quantization: JsonObject | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or build a causal language model for training; returns it in training mode, and its tokenizer.

    UserError if ``name`` does not exist, can't be loaded, is an adapter, or has weights in other formats only.

    Args:
        name: a folder, a hub id, or ``preset:NAME`` for a small model with random weights.
        texts: training texts of a preset's tokenizer.
        predictors: K, the number of predictor tokens to add.
        seed: of random weights and of new embedding rows.
        dtype: of the weights: ``float32``, ``bfloat16``, ``float16`` or ``auto``, the checkpoint's own.
        chat_template: a Jinja file that replaces the tokenizer's template.
        attn_implementation: as in transformers.
        trust_remote_code: run code that comes with the model.
        pretrain: take only configuration and tokenizer from ``name``, and draw random weights; a preset always does.
        plain: add the tokens of ``chat.template.PlainTemplate``, and stop generation at its end of turn.
        quantization: from ``weights.quantization_options``, to load trained weights in 4 or 8 bits.
    """
    name = expanded(name)
    check_base(name)
    shared: JsonObject = {"chat_template": chat_template, "trust_remote_code": trust_remote_code}
    options: JsonObject = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if pretrain or name.startswith(PREFIX):
        tokenizer, config = tokenizer_and_config(name, texts, plain=plain, fit=True, **shared)
        ends = add_plain_tokens(tokenizer)[1:] if plain else list(ChatTemplate(tokenizer).stop_ids)
        ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        with as_user_error(f"can't build a model from '{name}'"):
            model = presets.random_model(config, tokenizer, ends, seed, dtype=new_dtype(config, dtype), **options)
    else:
        tokenizer = load_tokenizer(name, **shared)
        options |= quantization or {}
        with as_user_error(f"can't load a model from '{name}'", name):
            model = load_weights(name, dtype=dtype, **options)
        _add_missing_rows(model, tokenizer, name, seed)
        if plain:
            add_plain_rows(model, tokenizer, seed)
    add_predictor_rows(model, tokenizer, predictors, seed)
    model.train()
    return model, tokenizer


def _add_missing_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, seed: int = 42) -> None:
    """Add rows for tokens that the tokenizer has and the model lacks, and say so."""
    old_rows = len(model.get_input_embeddings().weight)
    if (new := add_missing_rows(model, tokenizer, seed)) and is_main_process():
        needed = f"its tokenizer needs {old_rows + new:,} embedding rows, its weights have {old_rows:,}"
        note(f"{name}: {needed}; {new:,} untrained row{'s' * (new > 1)} added")


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id, perhaps with the template of a Jinja file.

    Args:
        name: folder or hub id.
        chat_template: Jinja file; None for the model's own.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: there is no tokenizer, or it or the template can't be read.
    """
    # For some model families transformers would make an empty tokenizer from a folder without one.
    if Path(name).is_dir() and not any(any(Path(name).glob(file)) for file in TOKENIZER_FILES):
        raise UserError("holds no tokenizer; put the files of one there", path=name)
    if trust_remote_code:
        _check_auto_map(Path(name) / "tokenizer_config.json")
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _from_pretrained(AutoTokenizer, "tokenizer", name, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def _check_auto_map(file: Path) -> None:
    """Raise ``UserError`` for a class of the folder's own code that transformers saved in a form that it can't load."""
    config = read_json_object(file, "file of a tokenizer", "restore it") if file.is_file() else {}
    auto_map = config.get("auto_map")
    reference = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    if isinstance(reference, str):
        fault = "auto_map has AutoTokenizer as a text, which transformers can't load"
        raise UserError(f'{fault}; write [null, "{reference}"] there', path=file)


def _from_pretrained(auto_class: Any, what: str, name: str, trust_remote_code: bool) -> Any:
    """Load ``what`` from a folder or hub id by a class of transformers; UserError if there is none."""
    check_model_name(name)
    with as_user_error(f"can't load a {what} from '{name}'", name):
        return auto_class.from_pretrained(name, trust_remote_code=trust_remote_code)


def tokenizer_and_config(
    name: str, texts: Iterable[str], *, chat_template: str | None, trust_remote_code: bool, plain: bool, fit: bool
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Load the tokenizer and the configuration of a model, without its weights.

    Args:
        name: a preset, folder or hub id.
        texts: on which a preset's tokenizer is trained; others don't read them.
        chat_template: Jinja file; None for the model's own.
        trust_remote_code: run code that comes with the model.
        plain: add the tokens of the plain format.
        fit: set the configuration's vocabulary and special tokens to those of the tokenizer, for random weights.

    Raises:
        UserError: one of them can't be loaded.
    """
    if name.startswith(PREFIX):
        config = presets.preset_config(name)
        tokenizer = presets.train_tokenizer(texts, config.vocab_size, chat_template)
        config.vocab_size = 0  # as many as the tokenizer needs
    else:
        check_model_name(name, untrained=True)
        tokenizer = load_tokenizer(name, chat_template=chat_template, trust_remote_code=trust_remote_code)
        from transformers import AutoConfig

        config = _from_pretrained(AutoConfig, "configuration", name, trust_remote_code)
    if plain:
        add_plain_tokens(tokenizer)
    if fit:
        presets.fit_config(config, tokenizer)
    return tokenizer, config


def new_dtype(config: PreTrainedConfig, name: str) -> torch.dtype:
    """Return the dtype of a model that is built from a configuration.

    Args:
        config: of the model.
        name: a name of a dtype; ``auto`` for that of the configuration, or else float32.
    """
    dtype: torch.dtype = (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
    return dtype


def add_lora(
    model: PreTrainedModel, settings: LoraSettings, rows: Sequence[int] | Mapping[str, Sequence[int]]
) -> PeftModel:
    """Wrap a model that has its predictor tokens with a LoRA adapter that also trains some embedding rows.

    Args:
        model: a causal language model; it is frozen, in place.
        settings: rank, scale and layers of the adapter.
        rows: those of new tokens (``token_rows.adapter_rows``), which plain LoRA neither trains nor saves: token ids of
            the embedding, or of several layers by their names.

    Raises:
        UserError: the model has none of the layers that ``settings.targets`` names.
    """
    from peft import LoraConfig, get_peft_model

    # An adapter in a part that text does not reach would never be trained.
    modules = {name for name, _ in model.named_modules()}
    unreached = [name for name in unreached_parts(model) if name in modules]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules="all-linear" if settings.targets == "all-linear" else settings.targets.split(","),
        exclude_modules=inside_of(unreached) if unreached else None,
        trainable_token_indices=(dict(rows) if isinstance(rows, Mapping) else list(rows)) or None,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
    )
    try:
        wrapped = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"`lora_targets {settings.targets}`: {error}") from None
    save_trained_rows_only(wrapped)
    # Gradient checkpointing needs a gradient at the frozen embedding's output. That is all that quantized weights need,
    # too: peft.prepare_model_for_kbit_training would also convert a large embedding to float32.
    wrapped.enable_input_require_grads()
    return wrapped


def load_for_inference(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: Quantization | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a trained model in evaluation mode, with its tokenizer; an adapter is merged into its base model.

    Args:
        path: run folder, checkpoint folder or hub id.
        dtype: as in :func:`load_model`.
        quantization: ``4bit`` or ``8bit`` through bitsandbytes, None for neither.
        device: where to put the model; None for the accelerator if there is one, else the CPU.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: no model can be loaded.
        TypeError: ``path`` is no path or name.
    """
    name = check_path("path", path, "a run folder, a checkpoint folder or a hub id")
    check_trained(name)
    base_name = base_of_adapter(name)
    is_adapter, base = base_name is not None, base_name or name
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    options = {} if quantization is None else quantization_options(quantization, device=device)
    of_adapter = f", the base model that {adapter_file(name)} names" if is_adapter else ""
    with as_user_error(f"can't load a model from '{base}'{of_adapter}", base, name):
        model = load_weights(base, dtype=dtype, trust_remote_code=trust_remote_code, **options)
        if is_adapter:
            resize_embedding(model, rows_of(tokenizer))
            adapted = load_adapter(model, name)
            check_merging(adapted)
            model = adapted.merge_and_unload()
            load_generation_config(model, name)
        else:
            _add_missing_rows(model, tokenizer, name)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    if quantization is None:  # quantized weights are on their device already
        model = model.to(device)
    return model.eval(), tokenizer


@contextmanager
def as_user_error(what: str, *folders: str) -> Iterator[None]:
    """Re-raise the libraries' errors about a model that can't be loaded as a ``UserError`` of one line.

    It names a damaged file of the ``folders`` from which the model is loaded.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a broken folder can raise any error, a truncated tokenizer a bare Exception
        remedy = "; pass `trust_remote_code` if you trust it" if "trust_remote_code" in str(error) else ""
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "couldn't connect to" in line or "outgoing traffic has been disabled" in line:
            # transformers' own message sends a user who mistyped a folder, or works offline, to look for a network.
            line = "neither a folder here nor in the hub's cache, and the hub was not reached; check the name"
        if not remedy and (damaged := damaged_file(*folders)) is not None:
            remedy = f"; {visible(str(damaged))} is damaged: restore it, or name another model"
        raise UserError(f"{what}: {line.rstrip(' .') if remedy else line}{remedy}") from None
