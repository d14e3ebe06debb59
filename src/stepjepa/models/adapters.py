"""Check that an adapter of PEFT is used in training as it is when the run folder is loaded: alone, and merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepjepa.base.terminal import note
from stepjepa.models.architecture import base_model

if TYPE_CHECKING:
    from torch import nn


def check_adapter(model: Any) -> None:
    """Raise a ``ValueError`` for an adapter that would not be trained, or not be what a run folder gives when loaded.

    Args:
        model: a PEFT wrapper, before rows of new tokens are added to it.
    """
    check_merging(model)
    if len(active := model.active_adapters) > 1:
        raise ValueError(
            f"the adapters {', '.join(active)} are active at once, and a run folder holds one; merge the others into "
            f"the model first, or call model.set_adapter({active[0]!r})"
        )
    if any(layer.merged for layer in filter(_is_tuner, model.modules())):
        raise ValueError(
            "the adapter is merged into its base, where it would not be trained; call model.unmerge_adapter()"
        )
    if weight := getattr(model.active_peft_config, "orth_reg_weight", 0):
        # PEFT adds it to the loss in the forward pass of a model that is given labels.
        note(
            f"AdaLoRA is trained without its orthogonality regularizer (orth_reg_weight {weight:g}), which is no term "
            "of the objective; its ranks change only if a callback calls model.base_model.update_and_allocate(step)"
        )


def check_merging(model: Any) -> None:
    """Raise a ``ValueError`` for an adapter that can't be merged into its base, or gives other logits once it is.

    Args:
        model: a PEFT wrapper.
    """
    config = model.active_peft_config
    kind = _kind(config)
    if config.is_prompt_learning:
        raise ValueError(
            f"an adapter of type {kind} puts virtual tokens in front of every row: a tree has no place for them, and "
            "they can't be merged into a model; use peft.LoraConfig"
        )
    if not hasattr(model.base_model, "merge_and_unload"):
        raise ValueError(f"an adapter of type {kind} can't be merged into a model; use peft.LoraConfig")
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(
            "alora_invocation_tokens: the adapter acts behind these tokens of a row alone, so that it can't be merged "
            "into a model; leave them out of LoraConfig"
        )
    _check_tied(model)
    if any(_adds_bias(layer, model.active_adapters) for layer in filter(_is_tuner, model.modules())):
        raise ValueError(
            "lora_bias can't be merged into layers that have no bias of their own; leave it out of LoraConfig"
        )


def _kind(config: Any) -> str:
    """Return the type of an adapter, such as ``LORA``."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def _is_tuner(module: nn.Module) -> bool:
    """Return whether a module is a layer with an adapter inside, such as a linear layer with LoRA."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _adds_bias(layer: Any, active: list[str]) -> bool:
    """Return whether an adapter adds a bias to a layer that has none."""
    added = getattr(layer, "lora_bias", {})
    return any(added.get(name) for name in active) and getattr(layer.get_base_layer(), "bias", None) is None


def _check_tied(model: Any) -> None:
    """Raise a ``ValueError`` for an adapter on one of two layers that share their weight: merging changes both."""
    base = base_model(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head is None or head.weight is not embedding.weight or not any(map(_is_tuner, (embedding, head))):
        return
    names = [name.rpartition(".")[2] for name, module in base.named_modules() if module in (embedding, head)]
    raise ValueError(
        "target_modules names the embedding or the LM head, which share one weight, so that merging the adapter would "
        f"change both; leave it out there, and train the whole weight with modules_to_save={sorted(names)}"
    )
