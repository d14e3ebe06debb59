"""The blocks that a training computes again in the backward pass, as its arguments name them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stepjepa.base.arguments import check_number

if TYPE_CHECKING:
    from transformers import TrainingArguments


class Recomputation(NamedTuple):
    """Gradient checkpointing of the first of every so many blocks."""

    every_n_layers: int = 1
    reentrant: bool = False  # by the variant ``use_reentrant``
    offload: bool = False  # the inputs of these blocks are kept in the memory of the host

    @classmethod
    def of(cls, args: TrainingArguments) -> Recomputation | None:
        """Return that of a training, by its own option or by that of FSDP; None without.

        Raises:
            TypeError: ``every_n_layers`` is no whole number.
            ValueError: it is below 1, or the options are no dict.
        """
        fsdp = args.fsdp_config if args.fsdp and isinstance(args.fsdp_config, dict) else {}
        if str(fsdp.get("activation_checkpointing")).lower() == "true":
            return cls()
        # The oldest transformers that is allowed has the older names alone.
        name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
        if not getattr(args, name):
            return None
        named = getattr(args, f"{name}_kwargs") or {}
        if not isinstance(named, dict):
            raise ValueError(f"{name}_kwargs: expected a dict, or a JSON object, got {named!r}")
        options: dict[str, Any] = {**named}
        every, offload = options.pop("every_n_layers", 1), bool(options.pop("offload", False))
        check_number("every_n_layers", every)
        variant = options.get("use_reentrant")
        # Without any option transformers names the other variant; beside others torch takes this one by default.
        return cls(every, bool(options) if variant is None else bool(variant), offload)

    def apply(self, model: nn.Module) -> None:
        """Checkpoint blocks of a model, in place, as its own method does, which also adds hooks to its embedding."""
        blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for number, block in enumerate(blocks):
            block.gradient_checkpointing = number % self.every_n_layers == 0
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=self.reentrant)
