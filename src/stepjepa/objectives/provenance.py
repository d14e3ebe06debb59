"""The provenance of a model: the settings and system prompts of its training, as its folder records them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepjepa.base.arguments import kind_of
from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.marks import Message
from stepjepa.config.jepa import DEFAULTS, JepaConfig, Pooling
from stepjepa.models.architecture import without_heads
from stepjepa.models.generation_settings import save_generation_config
from stepjepa.objectives.fitted import Fitted, FittedHeads, FittedMap
from stepjepa.objectives.inputs import EmbedOptions, check_options, fitted_of
from stepjepa.objectives.reading import at_place, embedding_config, reading_config
from stepjepa.store.environment import versions
from stepjepa.store.folder import CARD_FILE, RUN_FILE, save_atomically
from stepjepa.store.record import RunRecord, read_record, write_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FITTED: dict[str, tuple[type[Fitted], str]] = {
    "linear_map": (FittedMap, "fit_linear_map"),
    "projection_heads": (FittedHeads, "fit_projection_heads"),
}
"""Options of ``Jepa.embedder`` by which vectors are behind a map -> its type, and the function that fits one."""


@dataclass(frozen=True)
class Provenance:
    """The facts about the training of a model that embeddings depend on."""

    settings: JsonObject | None  # the ``JepaConfig`` as a dict; None if it is not known
    system_prompts: Sequence[str | None] = ()  # the most frequent ones; None stands for records without one
    lacks_objective: bool = False  # an objective was passed in Python, which the model's folder does not hold

    @classmethod
    def of(cls, record: RunRecord) -> Provenance:
        """Read the facts from the record of a run."""
        settings = None if record.jepa is None else trained_config(record).to_dict()
        return cls(settings, record.system_prompts or (), record.objective is not None)

    def check_objective(self) -> None:
        """Raise a ``ValueError`` if the model's folder does not hold the objective of its training."""
        if self.lacks_objective:
            message = "the run was trained with an objective that was passed in Python, which its folder does not hold"
            raise ValueError(f"{message}; pass it to Jepa(model, tokenizer, config, objective=...)")

    def of_options(self, options: EmbedOptions) -> JepaConfig:
        """Return the settings by which ``Jepa.embedder`` reads; see ``reading.embedding_config`` for errors.

        ValueError for a map and heads, or for a readout beside one of them, which belongs to one; TypeError for an
        option that there is not, or a map that is none.
        """
        check_options(options)
        layer, pooling = options.get("layer"), options.get("pooling")
        given: dict[str, object] = {name: value for name in _FITTED if (value := options.get(name)) is not None}
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: expected one of them, got both; vectors are those behind one")
        for name, value in given.items():
            fitted_type, function = _FITTED[name]
            if not isinstance(value, fitted_type):  # a caller without types may pass a file
                raise TypeError(
                    f"{name}: expected the result of stepjepa.{function}(jepa, records), got {kind_of(value)}"
                )
            if layer is not None or pooling is not None:
                named = f"layer {layer}" if layer is not None else f"pooling {pooling!r}"
                raise ValueError(f"{name}: embeddings are read where it was fitted, got {named}; name it there")
        fitted = fitted_of(options)
        config = self.read_at(layer, pooling if fitted is None else fitted.place.pooling)
        config = config if fitted is None else at_place(config, fitted.place)
        changes: JsonObject = {} if options.get("max_length") is None else {"max_length": options["max_length"]}
        return replace(config, pairs="all", over_length="error", **changes)

    def read_at(self, layer: int | None, pooling: Pooling | None) -> JepaConfig:
        """Return the settings for reading embeddings where training did, or at the readout that is named."""
        return embedding_config(self.settings, layer=layer, pooling=pooling)

    def system_message(self, chosen: str | None, fitted: Fitted | None = None) -> list[Message]:
        """Return the system message that a question is read behind; empty for none, and for an empty text.

        Args:
            chosen: the system prompt; None for that of training.
            fitted: a map, whose records have the system prompt instead of those of training.

        Raises:
            UserError: there were several, and none is chosen.
        """
        prompts = self.system_prompts if fitted is None else fitted.system_prompts
        if chosen is None and len(prompts) > 1:
            first_prompts = ", ".join(
                "none" if first_prompt is None else shown(first_prompt) for first_prompt in prompts[:3]
            )
            questions = "questions were trained behind" if fitted is None else f"{fitted.made} on questions behind"
            fault = f"{questions} several system prompts ({first_prompts})"
            raise UserError(f"{fault}; choose one by `system_prompt`, an empty text for none, or pass records")
        prompt = prompts[0] if chosen is None and prompts else chosen or None
        return [] if prompt is None else [{"role": "system", "content": prompt}]


def trained_config(record: RunRecord) -> JepaConfig:
    """Return the settings of a training; those for reading the views of LLM-JEPA where the record has none."""
    if record.jepa is None:
        return reading_config(None, "llm-jepa")
    # Runs of other versions may have settings that this version lacks.
    return JepaConfig(**{name: value for name, value in record.jepa.items() if name in DEFAULTS})


def record_in_loop(config: JepaConfig, own_terms: list[str] | None, system_prompt: str | None) -> RunRecord:
    """Return the record of a training in a loop of the user's own.

    Args:
        config: of the objective.
        own_terms: names of the terms of an objective that was passed in Python; None without one.
        system_prompt: that questions are answered behind; None if none is chosen.
    """
    return RunRecord(
        jepa=json.loads(json.dumps(config.to_dict())),
        versions=versions(),
        objective=None if own_terms is None else {"terms": own_terms},
        system_prompts=None if system_prompt is None else [system_prompt],
    )


def save_with_record(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: RunRecord
) -> None:
    """Write a model without the heads of terms, its tokenizer and, if the folder has none, the record of its run.

    Args:
        folder: other files in it stay; no file is ever incomplete under its final name.
        model: neither wrapped nor sharded.
        tokenizer: the model's.
        record: settings, versions and system prompt.

    Raises:
        UserError: the folder is a file, or holds a run with other settings.
    """
    if folder.is_file():
        raise UserError("is a file; name a folder", path=folder)
    if (folder / RUN_FILE).is_file() and read_record(folder).jepa != record.jepa:
        raise UserError("holds a run with other settings; name another folder", path=folder)

    def write(part: str) -> None:
        with without_heads(model):
            model.save_pretrained(part)
        save_generation_config(model, part)
        tokenizer.save_pretrained(part)
        # PEFT writes a draft of a card beside an adapter.
        (Path(part) / CARD_FILE).unlink(missing_ok=True)

    save_atomically(folder, write)
    if not (folder / RUN_FILE).is_file():
        write_record(folder, record)
