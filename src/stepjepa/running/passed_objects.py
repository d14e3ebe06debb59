"""Objects that are passed to a run beside its configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from stepjepa.config.run import OPTIONS, RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from stepjepa.data.record import Data
    from stepjepa.objectives.objective import Objective

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
        """Raise an error if the configuration lacks a setting, or names one that an object replaces."""
        defaults = {option.name: option.default for option in OPTIONS}
        for name in self.names:
            for setting in REPLACED.get(name, ()):
                if getattr(config, setting) != defaults[setting]:
                    raise ValueError(
                        f"{name}: an object is passed, and {setting} does nothing beside it; leave one out"
                    )
        config.check_required(self.names)
