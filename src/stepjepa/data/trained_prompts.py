"""The prompts that a run has trained on, kept as hashes, so that an evaluation can say how many it asks again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from stepjepa.data.records import Record
from stepjepa.files import atomic_write
from stepjepa.run_folder import PROMPTS_FILE

FORMS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "normalised": lambda text: " ".join(text.casefold().split()),
}
"""What counts as the same prompt: every character, or all but case and blanks."""


def write_trained_prompts(folder: Path, records: Iterable[Record]) -> None:
    """Write the hashes of the prompts of training records into a run folder."""
    prompts = [_prompt(record) for record in records]
    with atomic_write(folder / PROMPTS_FILE) as stream:
        json.dump({form: sorted({_hash(change(text)) for text in prompts}) for form, change in FORMS.items()}, stream)


def share_trained_on(model_path: str, records: Iterable[Record]) -> dict[str, float] | None:
    """The share of test records whose prompt was trained on, by each of ``FORMS``.

    Args:
        model_path: run folder, or checkpoint folder in one.
        records: at least one, with any system prompt: it does not count.

    Returns:
        None where it is not known: no run folder, or one of an earlier version.
    """
    folder = Path(model_path)
    place = folder.parent if folder.name.startswith("checkpoint-") else folder
    try:
        written = json.loads((place / PROMPTS_FILE).read_text(encoding="utf-8"))
        known = {form: set(written[form]) for form in FORMS}
        prompts = [_prompt(record) for record in records]
        return {
            form: sum(_hash(change(text)) in known[form] for text in prompts) / len(prompts)
            for form, change in FORMS.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _prompt(record: Record) -> str:
    """All that is said before the last answer, but for the system prompt."""
    return json.dumps([message["content"] for message in record.messages[:-1] if message["role"] != "system"])


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
