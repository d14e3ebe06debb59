"""Objects that are passed to a run beside its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from torch import nn

from stepjepa.base.arguments import kind_of
from stepjepa.config.run import OPTIONS, RunConfig
from stepjepa.models.architecture import check_unwrapped
from stepjepa.objectives.objective import Objective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from stepjepa.data.record import Data

REPLACED = {
    "model": (
        *("model_name", "chat_template", "trust_remote_code", "dtype", "pretrain", "attn_implementation"),
        *("load_in_4bit", "load_in_8bit"),
    ),
    "tokenizer": ("chat_template",),
    "train_dataset": ("train_file", "data_file", "dataset", "dataset_weights"),
    "eval_dataset": ("eval_file", "data_file"),
}
"""Object -> settings that have no effect when it is passed."""


@dataclass(frozen=True)
class PassedObjects:
    """The objects that are passed to :func:`stepjepa.run`; None for one that the configuration names instead."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    train_dataset: Data | None = None
    eval_dataset: Data | None = None
    objective: Objective | None = None
    callbacks: Sequence[TrainerCallback] = ()

    @property
    def names(self) -> list[str]:
        """Names of the passed objects, without callbacks, which no setting names."""
        described = (attribute.name for attribute in fields(self) if attribute.name != "callbacks")
        return [name for name in described if getattr(self, name) is not None]

    def check(self, config: RunConfig) -> None:
        """Raise an error if the configuration lacks a setting, or names one that an object replaces.

        TypeError for an object of another kind, such as the name of a model; ValueError for a model inside a wrapper.
        """
        defaults = {option.name: option.default for option in OPTIONS}
        for name in self.names:
            for setting in REPLACED.get(name, ()):
                if getattr(config, setting) != defaults[setting]:
                    raise ValueError(
                        f"{name}: an object is passed, and {setting} does nothing beside it; leave one out"
                    )
        if isinstance(self.model, str | os.PathLike):
            raise TypeError(f"model: expected a model, got its name; pass RunConfig(model_name='{self.model}')")
        if not isinstance(self.model, nn.Module | None):
            raise TypeError(f"model: expected a model, got {kind_of(self.model)}")
        if self.model is not None:
            check_unwrapped(self.model)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "apply_chat_template"):
            raise TypeError(f"tokenizer: expected a tokenizer, got {kind_of(self.tokenizer)}")
        if not isinstance(self.objective, Objective | None):
            raise TypeError(f"objective: expected Objective([LMLoss(), ...]) or None, got {kind_of(self.objective)}")
        config.check_required(self.names)
