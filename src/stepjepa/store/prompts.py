"""Prompts that a run was trained with: its system prompt, and hashes of its questions for later evaluations."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepjepa.base.files import atomic_write
from stepjepa.base.spool import BLOCK
from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.questions import FORMS, question_hashes
from stepjepa.data.record import Record
from stepjepa.store.folder import PROMPTS_FILE, run_folder_of
from stepjepa.store.record import record_of


def common_system_prompt(prompts: Sequence[str | None]) -> str | None:
    """Return the system prompt if all records have the same, an empty text if none has one; otherwise None."""
    # An empty system message switches a template's default prompt off; such records must stay unchanged.
    return (prompts[0] or "") if len(prompts) == 1 and prompts[0] != "" else None


def training_system_prompt(model_path: str | os.PathLike[str]) -> str | None:
    """Return the system prompt that all training records of a run or checkpoint folder had; None if they differ."""
    record = record_of(model_path)
    # Runs of earlier versions do not record their system prompts.
    return common_system_prompt(record.system_prompts or [] if record is not None else [])


def with_system_prompt(records: Sequence[Record], prompt: str) -> list[Record]:
    """Replace the system prompt of records; an empty one removes it."""
    system = ({"role": "system", "content": prompt},) if prompt else ()
    return [
        replace(record, messages=(*system, *(m for m in record.messages if m["role"] not in SYSTEM_ROLES)))
        for record in records
    ]


def write_trained_prompts(folder: Path, questions: Mapping[str, array[int]]) -> None:
    """Write the hashes of the questions of training records, see ``RecordSummary.questions``, into a run folder."""
    with atomic_write(folder / PROMPTS_FILE) as stream:
        # A million texts at once would take a hundred megabytes.
        for number, (form, values) in enumerate(questions.items()):
            stream.write(f"{', ' if number else '{'}{json.dumps(form)}: [")
            distinct = np.unique(values)
            for start in range(0, len(distinct), BLOCK):
                block = (f'"{digest:016x}"' for digest in distinct[start : start + BLOCK])
                stream.write((", " if start else "") + ", ".join(block))
            stream.write("]")
        stream.write("}")


def prompts_file(model_path: str) -> Path:
    """Return the file of hashes of a run folder, or of the run that a checkpoint folder belongs to."""
    return run_folder_of(model_path) / PROMPTS_FILE


def share_trained_on(model_path: str, records: Iterable[Record]) -> dict[str, float] | None:
    """Compute the share of test records whose question was trained on, by each of ``FORMS``; None without hashes.

    ``model_path`` is a run folder, or a checkpoint folder in one.
    """
    try:
        trained = json.loads(prompts_file(model_path).read_text(encoding="utf-8"))
        hashes = {form: set(trained[form]) for form in FORMS}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    counts, total = dict.fromkeys(FORMS, 0), 0
    for total, record in enumerate(records, start=1):  # noqa: B007  # counts them
        is_trained = {form: f"{value:016x}" in hashes[form] for form, value in question_hashes(record.messages).items()}
        counts["exact"] += is_trained["exact"]
        # Runs of earlier versions hash a normalised question of several lines in another way.
        counts["normalised"] += is_trained["exact"] or is_trained["normalised"]
    return {form: count / total for form, count in counts.items()}
