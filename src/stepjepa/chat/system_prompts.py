"""The system prompt that a model was trained under, for records that it is shown afterwards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stepjepa.data.records import Record
from stepjepa.errors import shown
from stepjepa.run_folder import run_of

MOST_PROMPTS = 10
"""More than this many are no system prompts but parts of the records."""


def training_system_prompt(model_path: str | os.PathLike[str]) -> str | None:
    """The system prompt that all records of a model's training had, see :func:`common_system_prompt`.

    Args:
        model_path: run folder, checkpoint in one, or anything else, which tells nothing.
    """
    run = run_of(model_path)
    # Runs of earlier versions do not say.
    return common_system_prompt(run.get("system_prompts", []) if run is not None else [])


def common_system_prompt(prompts: Sequence[str | None]) -> str | None:
    """The one of the different system prompts of some records, where None stands for having none.

    Returns:
        An empty text if no record had one; None if they had different ones, or nothing is known.
    """
    # A prompt that is there and empty switches a template's default off; such records are left as they are.
    return (prompts[0] or "") if len(prompts) == 1 and prompts[0] != "" else None


def count_system_prompts(records: Sequence[Record]) -> Counter[str | None]:
    """How many records have which system prompt; None stands for having none."""
    first = (record.messages[0] for record in records)
    return Counter(message["content"] if message["role"] == "system" else None for message in first)


def describe_system_prompts(records: Sequence[Record]) -> str | None:
    """One line for people where records have different ones, as those of several sources do; None where they don't."""
    counts = count_system_prompts(records)
    if not 1 < len(counts) <= MOST_PROMPTS:
        return None
    told = [f"{'none' if prompt is None else shown(prompt)} ({count:,})" for prompt, count in counts.most_common(2)]
    more = f" and {len(counts) - 2} more" if len(counts) > 2 else ""
    return f"{len(counts)} different ones among {len(records):,} records: {', '.join(told)}{more}"


def with_system_prompt(records: Sequence[Record], prompt: str) -> list[Record]:
    """The records under another system prompt; under none if it is empty."""
    system = ({"role": "system", "content": prompt},) if prompt else ()
    return [
        replace(record, messages=(*system, *(m for m in record.messages if m["role"] != "system")))
        for record in records
    ]
