"""Records streamed while they are trained on: read by every process, shuffled in a buffer, tokenised by their owner.

The training process cuts each optimizer step into the micro-batches of all processes; it, or its data loader's workers,
tokenises its own. So the order is the same for any number of workers and processes, and a resumed run reads past what
was trained on without tokenising it.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets
from datasets.iterable_dataset import ExamplesIterable
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import TrainingArguments

from stepjepa.batch.collate import Item
from stepjepa.batch.dataset import Prepared, count_tokens
from stepjepa.batch.sampler import draw
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config import JepaConfig
from stepjepa.data.records import BadRecords, Columns, Record, as_records
from stepjepa.data.sources import iterate_records
from stepjepa.errors import UserError
from stepjepa.files import existing_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RecordStream:
    """What ``JepaTrainer`` trains on without holding more of it than a buffer.

    Args:
        source: a JSON lines file, or an iterable of records (dicts with ``messages``, or ``records.Record``) that can
            be iterated once for every epoch, such as a torch or ``datasets`` ``IterableDataset``. A method
            ``set_epoch`` is told the number of each epoch. Every process reads all of it, so it must neither divide
            itself among processes nor shuffle without a fixed seed.
        shuffle_buffer_size: records that ``datasets.IterableDataset.shuffle`` draws from; 0 keeps the order.
        bad: takes the lines of a file that are wrong; None makes the first of them an error.
        columns: of a file, of the user's and the assistant's message, where they have names of their own.

    Raises:
        UserError: the file is missing, or no plain file (a pipe can't be read twice).
        ValueError: the source can be iterated only once, or the size is negative.

    Example:
        >>> JepaTrainer(model, TrainingArguments("runs/a", max_steps=1000), JepaConfig(),
        ...             train_dataset=RecordStream("train.jsonl", shuffle_buffer_size=1000), ...)
    """

    source: str | os.PathLike[str] | Iterable[Record | dict[str, Any]]
    shuffle_buffer_size: int = 0
    bad: BadRecords | None = None
    columns: Columns = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str | os.PathLike):
            found = existing_file(self.source, "data file")
            if not found.is_file():
                raise UserError("is no plain file, and a stream is read once an epoch; name a file", path=found)
        if isinstance(self.source, Iterator):
            kind = type(self.source).__name__
            raise ValueError(f"expected records that can be read once an epoch, got a {kind}, which ends for good")
        if self.shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size: expected 0 or more, got {self.shuffle_buffer_size}")

    def __iter__(self) -> Iterator[Record]:
        """All records, checked, in the order of the source."""
        if isinstance(self.source, str | os.PathLike):
            return iterate_records(self.source, self.bad, self.columns)
        return as_records(self.source)

    @property
    def name(self) -> str:
        """What errors call the source: its file, or a label."""
        return str(self.source) if isinstance(self.source, str | os.PathLike) else "<memory>"

    def epoch(self, number: int, seed: int) -> Iterator[Record]:
        """One pass over the source, every record once, in an order that seed and number decide.

        Raises:
            UserError: a record is wrong; raised when it is read, which is up to a buffer ahead of its turn.
        """
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        # No features are declared, so the library passes records on as they are.
        rows = datasets.IterableDataset(ExamplesIterable(self._examples, {}))
        if self.shuffle_buffer_size:
            rows = rows.shuffle(seed=seed, buffer_size=self.shuffle_buffer_size)
            rows.set_epoch(number)
        return (row["record"] for row in rows)

    def _examples(self) -> Iterator[tuple[int, dict[str, Record]]]:
        # Further fields are not trained on, and not worth sending to workers.
        return ((number, {"record": replace(record, extra={})}) for number, record in enumerate(self))


def as_stream(data: Any) -> RecordStream | None:
    """What is read while it is trained on; None for data that is prepared before.

    Streamed are a ``RecordStream``, a torch or ``datasets`` ``IterableDataset``, and whatever can be iterated again and
    again and has no length. What can be iterated once is taken whole, as a list is.
    """
    if data is None or isinstance(data, RecordStream | Prepared | str | os.PathLike):
        return data if isinstance(data, RecordStream) else None
    # A torch IterableDataset may have a length, by which nothing can be looked up.
    streamed = isinstance(data, IterableDataset | datasets.IterableDataset)
    return RecordStream(data) if streamed or not (hasattr(data, "__len__") or isinstance(data, Iterator)) else None


def refuse_for_stream(args: TrainingArguments, stream: RecordStream, track_flop: bool) -> None:
    """Refuse settings that need the number of records, their lengths, or another order of reading.

    Raises:
        ValueError: one of them is there.
    """
    strategy = str(args.train_sampling_strategy)
    if args.max_steps < 1:
        raise ValueError(
            f"max_steps: expected 1 or more with a stream, whose length is not known, got {args.max_steps}"
        )
    if strategy == "group_by_length" or track_flop:
        name = "track_flop" if track_flop else "train_sampling_strategy group_by_length"
        raise ValueError(f"{name}: needs the lengths of all records, which a stream does not tell; leave it out")
    if strategy == "sequential" and stream.shuffle_buffer_size:
        raise ValueError(
            f"train_sampling_strategy: sequential keeps the order that shuffle_buffer_size "
            f"{stream.shuffle_buffer_size} changes; leave one out"
        )


# -- micro-batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedBatch:
    """A micro-batch of one process: its records and, once they are tokenised, what was met instead of them."""

    records: tuple[Record, ...] = ()  # none where the last step of an epoch has too few for all
    first: int = 0  # how many records of the epoch came before
    with_views: bool = True
    epoch: int = 0
    ends_epoch: bool = False  # the step is known to be the last of its epoch
    digests: tuple[int, int] = (0, 0)  # of all records of the run, in their order, before this step and up to its end
    counts: Counter[str] = field(default_factory=Counter)  # by the names of ``COUNTS``, and tokens: ``all``, ``main``
    error: str | None = None  # about a record; it waits for its turn, and for the other processes


@dataclass(frozen=True)
class StreamSampler:
    """Yields the micro-batches of one process, each a :class:`StreamedBatch`, for the whole of a run.

    A step takes the next records of the stream; they are dealt out to the processes in turn. When an epoch is over, its
    last step stays short, and the source is read again. Loss dropout is drawn as in ``StepSampler``.
    """

    stream: RecordStream
    batch_size: int
    steps: int
    accumulation: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 0
    jepa_ratio: float = 1.0

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[StreamedBatch]:
        """The micro-batches.

        Raises:
            UserError: a record is wrong, or the source has no records, in the first epoch or in a later one.
        """
        size = self.batch_size * self.accumulation * self.world
        left, epoch, digest = self.steps, 0, 0
        while left:
            records, number = self.stream.epoch(epoch, self.seed), 0
            ahead = list(islice(records, 1))
            if not ahead:
                again = f"; they were read {epoch} times before, so pass records that can be iterated once an epoch"
                told = "holds no records; expected one JSON object per line"
                raise UserError(told + (again if epoch else ""), path=self.stream.name)
            while left and ahead:
                members = [*ahead, *islice(records, size - 1)]
                left -= 1
                # After the last step nothing is read that is not trained on.
                ahead = list(islice(records, 1)) if left and len(members) == size else []
                ends = len(members) < size or (left > 0 and not ahead)
                views = draw(self.seed, epoch, number) < self.jepa_ratio
                digests = digest, _digest(members, digest)
                digest = digests[1]
                for part in range(self.accumulation):
                    start = (part * self.world + self.rank) * self.batch_size
                    own = tuple(members[start : start + self.batch_size])
                    yield StreamedBatch(own, number * size + start, views, epoch, ends, digests)
                number += 1
            epoch += 1


def _digest(members: list[Record], digest: int) -> int:
    """32 bits of what is read of some records, and of what came before them."""
    for record in members:
        text = repr((record.messages, record.views))
        digest = zlib.crc32(text.encode(errors="surrogatepass"), digest)
    return digest


class StreamDataset(Dataset[Any]):
    """Tokenises micro-batches, in the training process or in the workers of a ``DataLoader``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self._tokenizer, self._config = tokenizer, config

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template can't be sent to another process.
        return {name: value for name, value in vars(self).items() if name != "_made"}

    @cached_property
    def _made(self) -> RecordTokenizer:
        return RecordTokenizer(self._tokenizer, self._config)

    def __getitems__(self, batch: StreamedBatch) -> tuple[list[Item], StreamedBatch]:
        """What ``DataLoader`` asks for: the items of a micro-batch, and what was met on the way to them."""
        self._made.counts.clear()
        try:
            records = self._made.tokenize_each(batch.records)
        except UserError as error:
            return [], replace(batch, records=(), error=str(error))
        numbered = enumerate(records, batch.first)
        items = [Item(each, batch.with_views, (batch.epoch, number)) for number, each in numbered if each is not None]
        tokens = count_tokens((item.record for item in items), self._config)
        return items, replace(batch, records=(), counts=self._made.counts + tokens)

    def template(self) -> dict[str, str]:
        """What was derived from the chat template."""
        return self._made.template.describe()


def _collate(collate: Callable[[list[Any]], dict[str, Any]], made: tuple[list[Item], StreamedBatch]) -> dict[str, Any]:
    batch = collate(made[0])
    batch["streamed"] = made[1]
    return batch


def stream_loader(
    stream: RecordStream,
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    args: TrainingArguments,
    collate: Callable[[list[Any]], dict[str, Any]],
) -> DataLoader[Any]:
    """The batches of this process for the whole of a run; not to be prepared by Accelerate, which would split again.

    Each has its :class:`StreamedBatch` under ``streamed``.
    """
    sampler = StreamSampler(
        stream,
        args.train_batch_size,
        args.max_steps,
        accumulation=args.gradient_accumulation_steps,
        rank=args.process_index,
        world=args.world_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        jepa_ratio=config.jepa_ratio if config.uses_views else 1.0,
    )
    return DataLoader(
        StreamDataset(tokenizer, config),
        batch_sampler=sampler,  # type: ignore[arg-type]  # of micro-batches
        collate_fn=partial(_collate, collate),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
    )
