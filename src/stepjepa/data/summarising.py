"""Sum up records: a hash of their contents, their system prompts and hashes of their questions."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from stepjepa.data.messages import SYSTEM_ROLES
from stepjepa.data.questions import FORMS, question_hashes
from stepjepa.data.record import Record
from stepjepa.data.summary import RecordSummary

_MOST_PROMPTS = 10  # system prompts that are written down


class Summariser:
    """Sums up records while they are read for another purpose.

    A further pass over a large file takes as long as some steps of training.
    """

    def __init__(self) -> None:
        self._paths = dict[str, None]()
        self._questions = {form: array("Q") for form in FORMS}
        self._digest = _ContentHash()
        self._prompts: Counter[str | None] = Counter()

    def reading(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records; each of them is added to the summary."""
        for record in records:
            self._paths[record.path] = None
            self._digest.add(record)
            self._prompts[_system_prompt(record)] += 1
            for form, value in question_hashes(record.messages).items():
                self._questions[form].append(value)
            yield record

    @property
    def source(self) -> str:
        """The name of the records' file, for messages; a tokenised record holds only its line number."""
        return next(iter(self._paths)) if len(self._paths) == 1 else "<several files>"

    @property
    def summary(self) -> RecordSummary:
        """The summary of the records that were read so far."""
        return RecordSummary(self._digest.hexdigest(), _most_frequent(self._prompts), self._questions)


def system_prompts(records: Iterable[Record]) -> list[str | None]:
    """Return the ten most frequent system prompts of records; None stands for records without one."""
    return _most_frequent(Counter(map(_system_prompt, records)))


def records_fingerprint(records: Iterable[Record]) -> str:
    """Hash the chats and explicit views of records, in their order; the files that they are from do not count."""
    digest = _ContentHash()
    for record in records:
        digest.add(record)
    return digest.hexdigest()


class _ContentHash:
    """A SHA-256 of the contents of records, as the text of a Python list of them."""

    def __init__(self) -> None:
        self._digest, self._separator = hashlib.sha256(b"["), ""

    def add(self, record: Record) -> None:
        text = f"{self._separator}{(record.chat, record.views)!r}"
        self._digest.update(text.encode("utf-8", "surrogatepass"))
        self._separator = ", "

    def hexdigest(self) -> str:
        digest = self._digest.copy()
        digest.update(b"]")
        return digest.hexdigest()


def _system_prompt(record: Record) -> str | None:
    first = record.messages[0]
    return first["content"] if first["role"] in SYSTEM_ROLES else None


def _most_frequent(counts: Counter[str | None]) -> list[str | None]:
    return [prompt for prompt, _ in counts.most_common(_MOST_PROMPTS)]
