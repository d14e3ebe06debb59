"""From records to a batch, for a ``DataLoader`` and its worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stepjepa.base.json_object import JsonObject
from stepjepa.batch.collate import Collator
from stepjepa.batch.micro_batch import Batch
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.data.record import Record
from stepjepa.data.records import as_records
from stepjepa.views.sequences import SampledRecord


@dataclass(frozen=True)
class RecordCollator:
    """Makes batches of records; it has no weights, so it is sent to worker processes that are spawned, too.

    Attributes:
        tokenizer: of records.
        collator: makes a batch of their tokens.
    """

    tokenizer: RecordTokenizer
    collator: Collator

    def __call__(self, records: Iterable[Record | JsonObject], *, views: bool = True) -> Batch:
        """Make a batch of records.

        Args:
            records: records, or dicts with ``messages``.
            views: include the sequences of views; False as in regular training.

        Returns:
            A batch on the CPU.

        Raises:
            UserError: a record is wrong, or too long for ``config.over_length``.
        """
        tokenized = self.tokenizer.tokenize_each([*as_records(records)])
        return self.collator(
            None if record is None else SampledRecord(record, views, (0, index))
            for index, record in enumerate(tokenized)
        )
