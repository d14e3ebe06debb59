"""Prompts that a run was trained with: its system prompt, and hashes of its questions for later evaluations."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from stepjepa.base.files import atomic_write
from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.records import Record
from stepjepa.store.folder import PROMPTS_FILE
from stepjepa.store.record import record_of

FORMS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "normalised": lambda text: " ".join(text.casefold().split()),
}
"""What counts as the same question: every character, or all but case and blanks."""


def system_prompts(records: Sequence[Record]) -> list[str | None]:
    """The ten most frequent system prompts of some records; None stands for having none. More are parts of records."""
    first = (record.messages[0] for record in records)
    counts = Counter(message["content"] if message["role"] in SYSTEM_ROLES else None for message in first)
    return [prompt for prompt, _ in counts.most_common(10)]


def common_system_prompt(prompts: Sequence[str | None]) -> str | None:
    """The only one of the distinct system prompts of some records, an empty text for no prompt; otherwise None."""
    # An empty system message switches a template's default prompt off; such records are left as they are.
    return (prompts[0] or "") if len(prompts) == 1 and prompts[0] != "" else None


def training_system_prompt(model_path: str | os.PathLike[str]) -> str | None:
    """The system prompt that all training records of a run or checkpoint folder had; None if there was no such one."""
    record = record_of(model_path)
    # Runs of earlier versions do not record their system prompts.
    return common_system_prompt(record.system_prompts or [] if record is not None else [])


def with_system_prompt(records: Sequence[Record], prompt: str) -> list[Record]:
    """The records with this system prompt instead of their own; without any if it is empty."""
    system = ({"role": "system", "content": prompt},) if prompt else ()
    return [
        replace(record, messages=(*system, *(m for m in record.messages if m["role"] not in SYSTEM_ROLES)))
        for record in records
    ]


def write_trained_prompts(folder: Path, records: Iterable[Record]) -> None:
    """Write the hashes of the questions of training records into a run folder."""
    questions = [_question(record) for record in records]
    hashes = {form: sorted({_hash(change(text)) for text in questions}) for form, change in FORMS.items()}
    with atomic_write(folder / PROMPTS_FILE) as stream:
        json.dump(hashes, stream)


def prompts_file(model_path: str) -> Path:
    """Where the hashes are that belong to a model, which may be a checkpoint of the run."""
    folder = Path(model_path)
    return (folder.parent if folder.name.startswith("checkpoint-") else folder) / PROMPTS_FILE


def share_trained_on(model_path: str, records: Iterable[Record]) -> dict[str, float] | None:
    """The share of test records whose question was trained on, by each of ``FORMS``; None if that is not known.

    ``model_path`` is a run folder, or a checkpoint folder in one.
    """
    try:
        known = json.loads(prompts_file(model_path).read_text(encoding="utf-8"))
        hashes = {form: set(known[form]) for form in FORMS}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    questions = [_question(record) for record in records]
    return {
        form: sum(_hash(change(text)) in hashes[form] for text in questions) / len(questions)
        for form, change in FORMS.items()
    }


def _question(record: Record) -> str:
    """All that is said before the last answer, but for the system prompt."""
    return json.dumps([message["content"] for message in record.messages[:-1] if message["role"] not in SYSTEM_ROLES])


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
