"""Notes on what was read from records, and on what was not."""

from collections.abc import Iterable, Iterator

from stepjepa.base.counting import counted, listed
from stepjepa.base.errors import shown, visible
from stepjepa.base.terminal import note
from stepjepa.data.columns import MOST_NAMES
from stepjepa.data.messages import is_absent
from stepjepa.data.record import READ_LATER, Record

PREPARED = frozenset({"question", "answer", "total_steps"})
"""Fields beside the chat that ``stepjepa prepare`` writes for the reader of a file; the last one marks such a file."""


def describe_columns(record: Record) -> str | None:
    """Describe the columns that a record of a table was made from, with its texts; None for ``messages``."""
    if record.columns == ("messages",):
        return None
    turns = [f"{message['role']} {shown(message['content'])}" for message in record.messages[:3]]
    return f"{', '.join(record.columns)}; line {record.line} is {', '.join(turns)}"


class UnusedParts:
    """The parts of records that nothing reads, collected while records are read for another purpose.

    Args:
        extra: collect the fields beside the chats, too, not only parts of chats.
    """

    def __init__(self, *, extra: bool = True) -> None:
        self._extra, self._names, self._dropped = extra, dict[str, None](), 0

    def add(self, record: Record) -> None:
        """Collect the parts of one more record."""
        self._names.update(dict.fromkeys(record.unused))
        if self._extra:
            # The further fields of a file that ``stepjepa prepare`` wrote are not the user's own.
            known = READ_LATER | (PREPARED if "total_steps" in record.extra else frozenset())
            fields = (key for key, value in record.extra.items() if key not in known and not is_absent(value))
            self._names.update(dict.fromkeys(map(str, fields)))
        self._dropped += record.dropped

    def reading(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records; each of them is added."""
        for record in records:
            self.add(record)
            yield record

    def describe(self) -> list[str]:
        """Describe the parts so far, one line each."""
        lines = [f"not used: {named(self._names)}"] if self._names else []
        left_out, verb = counted(self._dropped, "message"), "is" if self._dropped == 1 else "are"
        return lines + ([f"{left_out} behind the last trained answer {verb} left out"] if self._dropped else [])


def describe_unused(records: Iterable[Record], *, extra: bool = True) -> list[str]:
    """Describe the unused parts of records, one line each; without ``extra`` only those of their chats."""
    parts = UnusedParts(extra=extra)
    for record in records:
        parts.add(record)
    return parts.describe()


def named(columns: Iterable[str]) -> str:
    """Format the names of columns for a message, at most ``MOST_NAMES`` of them."""
    return listed([visible(name.strip()) or "a column without a name" for name in columns], MOST_NAMES)


def tell_unused(records: Iterable[Record], *, extra: bool = True) -> None:
    """Print the lines of :func:`describe_unused`, which has the same arguments, to standard error."""
    for line in describe_unused(records, extra=extra):
        note(line)
