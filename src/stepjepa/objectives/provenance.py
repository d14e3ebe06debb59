"""The provenance of a model: the settings and system prompts of its training, as its folder records them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError, shown
from stepjepa.base.json_object import JsonObject
from stepjepa.chat.marks import Message
from stepjepa.config.jepa import DEFAULTS, JepaConfig
from stepjepa.models.architecture import without_heads
from stepjepa.models.generation import save_generation_config
from stepjepa.objectives.reading import reading_config
from stepjepa.store.folder import CARD_FILE, RUN_FILE, save_atomically
from stepjepa.store.record import RunRecord, read_record, write_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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

    def system_message(self, chosen: str | None) -> list[Message]:
        """Return the system message that a question is read behind: ``chosen``, or None for that of training.

        Empty for none, and for an empty text. UserError if there were several in training, and none is chosen.
        """
        prompts = self.system_prompts
        if chosen is None and len(prompts) > 1:
            first_prompts = ", ".join(
                "none" if first_prompt is None else shown(first_prompt) for first_prompt in prompts[:3]
            )
            fault = f"questions were trained behind several system prompts ({first_prompts})"
            raise UserError(f"{fault}; choose one by `system_prompt`, an empty text for none, or pass records")
        prompt = prompts[0] if chosen is None and prompts else chosen or None
        return [] if prompt is None else [{"role": "system", "content": prompt}]


def trained_config(record: RunRecord) -> JepaConfig:
    """Return the settings of a training; those for reading the views of LLM-JEPA where the record has none."""
    if record.jepa is None:
        return reading_config(None, "llm-jepa")
    # Runs of other versions may have settings that this version lacks.
    return JepaConfig(**{name: value for name, value in record.jepa.items() if name in DEFAULTS})


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
        UserError: the folder holds a run with other settings.
    """
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
