"""Load weights, in full precision or quantized, and raise an error if they are incomplete.

transformers and PEFT would fill missing weights with random numbers. Weights in 4 or 8 bits (bitsandbytes) are for
training an adapter on them (QLoRA, arXiv 2305.14314) or for inference.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.config.jepa import Quantization

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def damaged_file(*folders: str) -> Path | None:
    """Return a file of models' folders that is no JSON or no safetensors, such as one whose copy was cut short."""
    from safetensors import SafetensorError, safe_open

    files = [file for folder in folders for kind in ("*.json", "*.safetensors") for file in Path(folder).glob(kind)]
    for file in sorted(files):
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            else:
                with safe_open(file, "pt"):
                    pass
        except (ValueError, RecursionError, SafetensorError):
            return file
        except OSError:  # it says so itself
            continue
    return None


# Values of a weight that are checked at a time.
CHECKED_AT_A_TIME = 2**24


def load_weights(name: str, **options: Any) -> PreTrainedModel:
    """Load a causal language model from the safetensors of a folder or hub id.

    UserError if weights are missing, belong to layers that the configuration lacks, or are not finite. ``options`` are
    those of ``AutoModelForCausalLM.from_pretrained``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the problems that it warns of are refused below
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, output_loading_info=True, **options
        )
    finally:
        logging.set_verbosity(level)
    if loading_info["missing_keys"]:
        raise UserError(f"the weights of '{name}' lack {_named(loading_info['missing_keys'])}; complete them")
    # Refuse layers beyond the configuration's, for example; ignore other single tensors (buffers, other heads).
    number = re.compile(r"\.\d+(?=\.)")
    kinds = {number.sub("", key) for key in model.state_dict()}
    if further := [key for key in loading_info["unexpected_keys"] if number.sub("", key) in kinds]:
        remedy = "correct the number of layers in its config.json"
        raise UserError(f"the weights of '{name}' have {_named(further)}, which the model lacks; {remedy}")
    _check_finite(model, name)
    return model


def load_adapter(model: PreTrainedModel, folder: str) -> PeftModel:
    """Load the PEFT adapter of a folder onto a model; UserError if weights are missing or not finite."""
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, folder)
        lost = missing_of_adapter(wrapped, Path(folder))
    except KeyError as error:  # PEFT looks up the rows of trained tokens by name
        lost = [str(error.args[0])]
    if lost:
        raise UserError(f"the adapter lacks {_named(lost)}; get the complete file", path=folder)
    _check_finite(wrapped, folder)
    return wrapped


def missing_of_adapter(model: PreTrainedModel, folder: Path) -> list[str]:
    """Return the weights of a PEFT model's adapter that its file lacks; PEFT itself only warns of them."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        return sorted(set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(weights.keys()))


def all_finite(values: Tensor) -> Tensor:
    """Return whether all values of a tensor are finite, a boolean scalar on its device.

    Checked in parts, since ``isfinite`` makes several copies of its argument.
    """
    parts = [torch.isfinite(part).all() for part in values.detach().flatten().split(CHECKED_AT_A_TIME)]
    return torch.stack(parts).all() if parts else torch.tensor(True, device=values.device)


def _check_finite(model: nn.Module, name: str) -> None:
    # A single weight that is not finite makes every answer meaningless.
    for key, value in model.named_parameters():
        if value.is_floating_point() and not value.is_meta and not bool(all_finite(value)):
            raise UserError(f"the weights of '{name}' are not finite ({key}); take an earlier checkpoint")


def _named(keys: Iterable[str]) -> str:
    first, *others = sorted(keys)
    return shown(first) + (f" and {len(others)} more" if others else "")


def quantization_options(
    kind: Quantization, compute: torch.dtype | None = None, device: str | torch.device | None = None
) -> JsonObject:
    """Return arguments of ``from_pretrained`` for quantized weights; embedding and head are not quantized.

    Args:
        kind: ``4bit`` (NF4, doubly quantized scales) or ``8bit``.
        compute: dtype of products with 4-bit weights; by default bfloat16, on a CPU float32.
        device: where to put the model; by default the accelerator, the CPU where there is none.

    Raises:
        ValueError: there is no such kind.
        UserError: bitsandbytes is not installed.
    """
    if kind not in get_args(Quantization):
        raise ValueError(f"quantization: expected one of {', '.join(get_args(Quantization))}, got '{kind}'")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"`load_in_{kind}` needs bitsandbytes, which is not installed; run 'pip install bitsandbytes'")
    from transformers import BitsAndBytesConfig

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    config = BitsAndBytesConfig(
        load_in_4bit=kind == "4bit",
        load_in_8bit=kind == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute or (torch.bfloat16 if accelerator else torch.float32),
    )
    if device is None:
        device = "cpu" if accelerator is None else f"{accelerator.type}:{torch.accelerator.current_device_index()}"
    return {"quantization_config": config, "device_map": {"": str(device)}}


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained and of all parameter values; two 4-bit values that share a byte count as two."""
    sizes = [
        (math.prod(getattr(getattr(parameter, "quant_state", None), "shape", parameter.shape)), parameter.requires_grad)
        for parameter in model.parameters()
    ]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def autocast_dtype(*, bf16: bool, fp16: bool) -> torch.dtype | None:
    """Return the dtype of a run's autocast; None without.

    Args:
        bf16: whether it rounds to bfloat16.
        fp16: whether it rounds to float16.
    """
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else None


def compute_dtype(dtype: str, *, bf16: bool, fp16: bool) -> torch.dtype:
    """Return the dtype of a run's matrix products: that of autocast, or of the weights that are not quantized.

    Args:
        dtype: of the weights: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        bf16: as for :func:`autocast_dtype`.
        fp16: as for :func:`autocast_dtype`.
    """
    weights = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return autocast_dtype(bf16=bf16, fp16=fp16) or weights.get(dtype, torch.float32)
