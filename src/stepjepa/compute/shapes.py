"""Models and batches that have shapes and dtypes but no values: an 8B model in seconds, in no memory.

A model is built on torch's meta device from its configuration; no weights are read or drawn. To run it, its tensors are
turned into torch's fake tensors, which claim to be on the CPU: so the same kernels are chosen, autocast works, and
nothing is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionMaskInterface

from stepjepa.batch.collate import Batch
from stepjepa.models.loading import LoraSettings, add_lora, load_tokenizer, new_config, reported, torch_dtype
from stepjepa.models.presets import PREFIX
from stepjepa.models.token_rows import adapter_ids, grow
from stepjepa.text.plain_template import add_plain_tokens
from stepjepa.text.predictors import add_predictor_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

# Shapes that follow from these depend on values: readouts that average, which cost little more than a single token, and
# the positions that have a label of the prompt.
_BY_VALUE = ("source_tokens", "source_pair", "target_tokens", "target_pair")
_LABELS_BY_VALUE = ("prompt_row", "prompt_ids")


def empty_model(
    name: str,
    *,
    texts: Iterable[str] = (),
    predictors: int = 0,
    dtype: str = "float32",
    chat_template: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    pretrain: bool = False,
    train_tokenizer: int | None = None,
    plain: bool = False,
    lora: LoraSettings | None = None,
) -> tuple[Any, Any]:
    """What ``model.load_model`` and ``model.add_lora`` give, on the meta device, with its real tokenizer.

    Args:
        name: see ``load_model``; of a folder or hub id only the configuration and the tokenizer are read.
        texts: see there.
        predictors: see there.
        dtype: see there.
        chat_template: see there.
        attn_implementation: see there.
        trust_remote_code: see there.
        pretrain: see there.
        train_tokenizer: see there.
        plain: see there.
        lora: of the adapter, if there is one.

    Raises:
        UserError: no such preset, folder or hub id, or no model can be built from its configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer: Any
    if pretrain or name.startswith(PREFIX):
        tokenizer, config = new_config(
            name, texts, train_tokenizer, chat_template=chat_template, trust_remote_code=trust_remote_code, plain=plain
        )
    else:
        tokenizer = load_tokenizer(name, chat_template=chat_template, trust_remote_code=trust_remote_code)
        with reported(f"can't load a configuration from '{name}'"):
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if plain:
            add_plain_tokens(tokenizer)
    if predictors:
        add_predictor_tokens(tokenizer, predictors)
    wanted = torch_dtype(dtype)
    with reported(f"can't build a model from '{name}'"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=wanted if isinstance(wanted, torch.dtype) else config.dtype or torch.float32,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        grow(model, len(tokenizer))
        if lora is not None:
            model = add_lora(model, lora, adapter_ids(tokenizer, plain=plain))
    return model.train(), tokenizer


@contextmanager
def running(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let a model on the meta device be run, for its shapes alone, inside the block.

    Args:
        model: its parameters and buffers are exchanged for fake tensors, and put back at the end.
        dtype: of floating-point parameters, as a sharded model gathers them; None leaves each its own.

    Raises:
        RuntimeError: from what is run inside, if a model decides by values what it computes, or uses a kernel whose
            shapes torch can't tell (products of experts in float32).
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[int, Tensor] = {}
    # What can't be run is raised, too; a traceback beside that helps nobody.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    quiet, log.disabled = log.disabled, True
    with FakeTensorMode(allow_non_fake_inputs=True), _without_padding(model):
        for module in model.modules():
            both: tuple[dict[str, Any], dict[str, Any]] = (module._parameters, module._buffers)
            for held in both:
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    places.append((held, name, tensor))
                    if id(tensor) not in made:  # tied weights stay tied
                        made[id(tensor)] = _fake(tensor, dtype)
        for held, name, tensor in places:
            held[name] = made[id(tensor)]
        try:
            yield
        finally:
            log.disabled = quiet
            for held, name, tensor in places:
                held[name] = tensor


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Tell the model's masks that nothing is padded, as in every batch here; transformers would have to read it out of
    values, and makes a mask where there are none."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    made = AttentionMaskInterface().get(name)
    if made is None:
        yield
        return
    AttentionMaskInterface.register(name, lambda *args, **kwargs: made(*args, **{**kwargs, "attention_mask": None}))
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, made)


def _fake(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(torch.empty(tensor.shape, dtype=kind, device="cpu"), requires_grad=tensor.requires_grad)


def empty_batch(batch: Batch) -> Batch:
    """A micro-batch without its values; only inside :func:`running`.

    Its pass shows the two losses on next tokens as one, on the positions of both.
    """
    empty = Batch(batch)
    if "further" in batch:
        empty["further"] = [empty_batch(each) for each in batch["further"]]
    for name, value in batch.items():
        if name in _BY_VALUE:
            del empty[name]
        elif isinstance(value, Tensor):
            shape = (0,) if name in _LABELS_BY_VALUE else value.shape
            empty[name] = torch.empty(shape, dtype=value.dtype)
    return empty
