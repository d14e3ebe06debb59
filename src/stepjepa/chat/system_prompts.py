"""The system prompt that a model was trained with, for records that the model gets later."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stepjepa.data.records import Record
from stepjepa.errors import shown
from stepjepa.run_folder import run_of

MOST_PROMPTS = 10
"""More distinct prompts than this are not system prompts but parts of the records."""


def training_system_prompt(model_path: str | os.PathLike[str]) -> str | None:
    """The system prompt that all training records of a model had, see :func:`common_system_prompt`.

    Args:
        model_path: run folder or a checkpoint in one; for anything else the result is None.
    """
    run = run_of(model_path)
    # Runs of earlier versions do not record their system prompts.
    return common_system_prompt(run.get("system_prompts", []) if run is not None else [])


def common_system_prompt(prompts: Sequence[str | None]) -> str | None:
    """The only one of the distinct system prompts of some records, where None stands for no prompt.

    Returns:
        An empty text if no record had a prompt; None if there are several, none is known, or the only one is empty.
    """
    # An empty system message switches a template's default prompt off; such records are left as they are.
    return (prompts[0] or "") if len(prompts) == 1 and prompts[0] != "" else None


def count_system_prompts(records: Sequence[Record]) -> Counter[str | None]:
    """Number of records with each system prompt; the key None stands for no prompt."""
    first = (record.messages[0] for record in records)
    return Counter(message["content"] if message["role"] == "system" else None for message in first)


def describe_system_prompts(records: Sequence[Record]) -> str | None:
    """A line about the system prompts of records, if there are 2 to ``MOST_PROMPTS`` different ones; otherwise None."""
    counts = count_system_prompts(records)
    if not 1 < len(counts) <= MOST_PROMPTS:
        return None
    told = [f"{'none' if prompt is None else shown(prompt)} ({count:,})" for prompt, count in counts.most_common(2)]
    more = f" and {len(counts) - 2} more" if len(counts) > 2 else ""
    return f"{len(counts)} different ones among {len(records):,} records: {', '.join(told)}{more}"


def with_system_prompt(records: Sequence[Record], prompt: str) -> list[Record]:
    """The records with this system prompt instead of their own; without any if it is empty."""
    system = ({"role": "system", "content": prompt},) if prompt else ()
    return [
        replace(record, messages=(*system, *(m for m in record.messages if m["role"] != "system")))
        for record in records
    ]
