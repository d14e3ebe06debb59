"""The summary of a run's records, for its run record."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True)
class RecordSummary:
    """A summary of records, see :class:`stepjepa.data.summarising.Summariser`.

    Attributes:
        sha256: a hash of their contents, as ``records_fingerprint`` computes it.
        system_prompts: the ten most frequent ones; None for records without one.
        questions: 64-bit hashes of their questions, by the names of ``questions.FORMS``. They are integers, since a
            set of texts takes a hundred bytes for each.
    """

    sha256: str
    system_prompts: list[str | None]
    questions: dict[str, array[int]]
