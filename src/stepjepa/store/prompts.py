"""Prompts that a run was trained with: its system prompt, and hashes of its questions for later evaluations."""

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stepjepa.base.files import atomic_write
from stepjepa.base.spool import BLOCK
from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.records import Record
from stepjepa.store.folder import PROMPTS_FILE
from stepjepa.store.record import record_of

FORMS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "normalised": lambda text: " ".join(text.casefold().split()),
}
"""Ways to compare questions: exactly, or without case and white space."""


def system_prompts(records: Iterable[Record]) -> list[str | None]:
    """Return the ten most frequent system prompts of records; None stands for records without one."""
    first = (record.messages[0] for record in records)
    counts = Counter(message["content"] if message["role"] in SYSTEM_ROLES else None for message in first)
    return [prompt for prompt, _ in counts.most_common(10)]


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


def write_trained_prompts(folder: Path, records: Iterable[Record]) -> None:
    """Write the hashes of the questions of training records into a run folder."""
    # As integers: a set of texts takes a hundred bytes for each.
    hashes = {form: array("Q") for form in FORMS}
    for record in records:
        question = _question(record)
        for form, change in FORMS.items():
            hashes[form].append(int(_hash(change(question)), 16))
    with atomic_write(folder / PROMPTS_FILE) as stream:
        # A million texts at once would take a hundred megabytes.
        for number, (form, values) in enumerate(hashes.items()):
            stream.write(f"{', ' if number else '{'}{json.dumps(form)}: [")
            distinct = np.unique(values)
            for start in range(0, len(distinct), BLOCK):
                block = (f'"{each:016x}"' for each in distinct[start : start + BLOCK])
                stream.write((", " if start else "") + ", ".join(block))
            stream.write("]")
        stream.write("}")


def prompts_file(model_path: str) -> Path:
    """Return the file of hashes of a run folder, or of the run that a checkpoint folder belongs to."""
    folder = Path(model_path)
    return (folder.parent if folder.name.startswith("checkpoint-") else folder) / PROMPTS_FILE


def share_trained_on(model_path: str, records: Iterable[Record]) -> dict[str, float] | None:
    """Compute the share of test records whose question was trained on, by each of ``FORMS``; None without hashes.

    ``model_path`` is a run folder, or a checkpoint folder in one.
    """
    try:
        trained = json.loads(prompts_file(model_path).read_text(encoding="utf-8"))
        hashes = {form: set(trained[form]) for form in FORMS}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    questions = [_question(record) for record in records]
    return {
        form: sum(_hash(change(text)) in hashes[form] for text in questions) / len(questions)
        for form, change in FORMS.items()
    }


def _question(record: Record) -> str:
    """Join all messages before the last answer, except for the system prompt."""
    return json.dumps([message["content"] for message in record.messages[:-1] if message["role"] not in SYSTEM_ROLES])


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
