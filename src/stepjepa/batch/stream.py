"""Records streamed while they are trained on: read by every process, shuffled in a buffer, tokenised by their owner.

The training process cuts each optimizer step into the micro-batches of all processes; it, or its data loader's workers,
tokenises its own. So the order is the same for any number of workers and processes, and a resumed run reads past what
was trained on without tokenising it.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from accelerate.utils import gather_object
from datasets.iterable_dataset import ExamplesIterable
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from stepjepa.batch.collate import Item
from stepjepa.batch.dataset import Prepared, count_tokens, describe, refuse_useless
from stepjepa.batch.sampler import draw
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer
from stepjepa.config import JepaConfig
from stepjepa.data.records import BadRecords, Record, as_records, iterate_records
from stepjepa.errors import UserError
from stepjepa.fields import read_fields
from stepjepa.files import existing_file, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STREAM_FILE = "stream.json"
"""In a checkpoint: what was met of the stream so far."""


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

    Raises:
        UserError: the file is missing, or no plain file (a pipe can't be read twice).
        ValueError: the source can be iterated only once, gives each process a part, or the size is negative.

    Example:
        >>> JepaTrainer(model, TrainingArguments("runs/a", max_steps=1000), JepaConfig(),
        ...             train_dataset=RecordStream("train.jsonl", shuffle_buffer_size=1000), ...)
    """

    source: str | os.PathLike[str] | Iterable[Record | dict[str, Any]]
    shuffle_buffer_size: int = 0
    bad: BadRecords | None = None

    def __post_init__(self) -> None:
        if isinstance(self.source, str | os.PathLike):
            found = existing_file(self.source, "data file")
            if not found.is_file():
                raise UserError("is no plain file, and a stream is read once an epoch; name a file", path=found)
        if isinstance(self.source, Iterator):
            kind = type(self.source).__name__
            raise ValueError(f"expected records that can be read once an epoch, got a {kind}, which ends for good")
        # datasets.distributed.split_dataset_by_node sets this.
        if getattr(self.source, "_distributed", None) is not None:
            raise ValueError(
                "expected all records on every process, got a data set split by node; leave split_dataset_by_node out, "
                "since the trainer divides every step among the processes"
            )
        if self.shuffle_buffer_size < 0:
            raise ValueError(f"shuffle_buffer_size: expected 0 or more, got {self.shuffle_buffer_size}")

    def __iter__(self) -> Iterator[Record]:
        """All records, checked, in the order of the source."""
        if isinstance(self.source, str | os.PathLike):
            return iterate_records(self.source, self.bad)
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
        if not self.shuffle_buffer_size:
            return (row["record"] for _, row in self._examples())
        # No features are declared, so the library passes records on as they are.
        rows = datasets.IterableDataset(ExamplesIterable(self._examples, {}))
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
    if not getattr(args, "dataloader_in_order", True):
        raise ValueError("dataloader_in_order: expected True with a stream, whose steps are made in their order")


# -- micro-batches -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedBatch:
    """A micro-batch of one process: its records and, once they are tokenised, what was met instead of them.

    Attributes:
        records: none where the last step of an epoch has too few for all.
        first: how many records of the epoch came before.
        with_views: their views are run.
        epoch: of the stream, from 0.
        ends_epoch: the step is known to be the last of its epoch.
        digests: of all records that were trained on before this step, in their order, and up to its end.
        counts: of tokenised records, by the names of ``COUNTS``, and ``all`` and ``main``: tokens.
        error: what is wrong with a record: an error has to wait until it is its turn, and for the other processes.
    """

    records: tuple[Record, ...] = ()
    first: int = 0
    with_views: bool = True
    epoch: int = 0
    ends_epoch: bool = False
    digests: tuple[int, int] = (0, 0)
    counts: Counter[str] = field(default_factory=Counter)
    error: str | None = None


@dataclass(frozen=True)
class StreamSampler:
    """Yields the micro-batches of one process, each a :class:`StreamedBatch`, for the whole of a run.

    A step takes the next records of the stream; they are dealt out to the processes in turn. When an epoch is over, its
    last step stays short, and the source is read again. Loss dropout is drawn as in ``StepSampler``.

    Attributes:
        stream: of the records.
        batch_size: records of a micro-batch.
        steps: of the run.
        accumulation: micro-batches of a process in a step.
        rank: of this process.
        world: number of processes.
        seed: of the order and of loss dropout.
        jepa_ratio: share of steps whose views are run.
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
        text = repr((record.messages, record.text, record.code))
        digest = zlib.crc32(text.encode(errors="surrogatepass"), digest)
    return digest


class StreamDataset(Dataset[Any]):
    """Tokenises micro-batches, in the training process or in the workers of a ``DataLoader``.

    Args:
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._made: RecordTokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A compiled template can't be sent to another process.
        return {**self.__dict__, "_made": None}

    def __getitems__(self, batch: StreamedBatch) -> tuple[list[Item], StreamedBatch]:
        """What ``DataLoader`` asks for: the items of a micro-batch, and what was met on the way to them."""
        made = self._record_tokenizer()
        made.counts.clear()
        try:
            records = made.tokenize_each(batch.records)
        except UserError as error:
            return [], replace(batch, records=(), error=str(error))
        numbered = enumerate(records, batch.first)
        items = [Item(each, batch.with_views, (batch.epoch, number)) for number, each in numbered if each is not None]
        tokens = count_tokens((item.record for item in items), self._config)
        return items, replace(batch, records=(), counts=made.counts + tokens)

    def template(self) -> dict[str, str]:
        """What was derived from the chat template."""
        return self._record_tokenizer().template.describe()

    def _record_tokenizer(self) -> RecordTokenizer:
        self._made = self._made or RecordTokenizer(self._tokenizer, self._config)
        return self._made


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
        multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        prefetch_factor=args.dataloader_prefetch_factor,
    )


# -- what a run has met ------------------------------------------------------------------------------------------------


class StreamCounts:
    """What a run has met of its stream, on all processes.

    Attributes:
        totals: counts by the names of ``COUNTS``, and ``all`` and ``main``: tokens.
        last: the last micro-batch that was met, without its records.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.last = StreamedBatch()
        self._unsummed: Counter[str] = Counter()
        self._error: str | None = None
        self._expected: int | None = None

    @property
    def epochs(self) -> int:
        """Epochs of the stream that are over."""
        return self.last.epoch + self.last.ends_epoch

    def meet(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take what was met out of a batch of this process."""
        self.last = batch.pop("streamed")
        self._error = self._error or self.last.error
        if self._expected not in (None, self.last.digests[0]):
            self._error = (
                "the stream gives other records than those that were trained on before the checkpoint, or gives them "
                "in another order; resume on the same data"
            )
        self._expected = None
        self._unsummed.update(self.last.counts)
        return batch

    def sum_over_processes(self) -> None:
        """Add up what all processes have met; each calls it once a step.

        Raises:
            UserError: a record of any process is wrong, or the processes have read different records; every process
                raises it, so that none is left waiting.
        """
        found = gather_object([(self._unsummed, self.last.digests, self._error)])
        counts, digests, errors = zip(*found, strict=True)
        for error in filter(None, errors):
            raise UserError(error)
        if len(set(digests)) > 1:
            raise UserError(
                "the processes read different records, or the same ones in different orders; give each of them the "
                "whole stream, with a fixed seed for what is shuffled"
            )
        self.totals = sum(counts, self.totals)
        self._unsummed = Counter()

    def columns(self) -> dict[str, float]:
        """What a line of training logs says of the stream."""
        met = {f"data_{name.replace(' ', '_')}": float(self.totals[name]) for name in COUNTS if self.totals[name]}
        return {"data_epoch": float(self.epochs), **met}

    def found(self, stream: RecordStream) -> dict[str, Any]:
        """``counts`` and ``tokens`` as in ``Prepared``, of what was trained on so far; ``bad_records`` if there are."""
        skipped = {"bad_records": stream.bad.to_dict()} if stream.bad is not None and stream.bad.count else {}
        tokens = {name: self.totals[name] for name in ("all", "main")}
        return {"counts": {name: self.totals[name] for name in COUNTS}, "tokens": tokens, **skipped}

    def print(self, what: str, stream: RecordStream) -> None:
        """Print one line on what was met of the stream so far, and one on lines that were skipped."""
        found = self.found(stream)
        # Above the bar, where there is one.
        tqdm.write(f"data, {what}: {describe(found['counts'], found['tokens'])}", file=sys.stdout)
        if stream.bad is not None and stream.bad.count:
            tqdm.write(f"data, so far: {stream.bad.describe()}", file=sys.stdout)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it into a checkpoint."""
        state = {"totals": dict(self.totals), "epoch": self.last.epoch, "ends_epoch": self.last.ends_epoch}
        write_json(Path(folder) / STREAM_FILE, {**state, "digest": self.last.digests[1]})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, check: bool = True) -> StreamCounts:
        """Read it back.

        Args:
            folder: the checkpoint.
            check: compare the records that come next with those that came after the checkpoint.

        Raises:
            UserError: it is damaged.
            ValueError: the checkpoint has none.
        """
        path = Path(folder) / STREAM_FILE
        if not path.is_file():
            raise ValueError(f"expected {STREAM_FILE} in {folder}, got none; the checkpoint was made without a stream")
        state = read_fields(path, "count of a stream", "resume from another checkpoint")
        totals, ends = state.inner("totals"), state.values.get("ends_epoch")
        if not isinstance(ends, bool):
            raise state.wrong("ends_epoch", "true or false")
        found = cls()
        found.totals.update({name: totals.whole(name, 0) for name in totals})
        digest = state.whole("digest", 0)
        found.last = StreamedBatch(epoch=state.whole("epoch", 0), ends_epoch=ends, digests=(digest, digest))
        found._expected = digest if check else None
        return found


class StreamCallback(TrainerCallback):
    """Does at the end of an epoch of the stream what the Trainer does at the end of its own, and says what it held.

    Args:
        counts: gives the run's counts, summed once a step.
        config: whether there should be pairs.
        stream: that is trained on.
    """

    def __init__(self, counts: Callable[[], StreamCounts], config: JepaConfig, stream: RecordStream) -> None:
        self._counts, self._config, self._stream = counts, config, stream

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what a resumed run reads past."""
        if state.global_step and not args.ignore_data_skip and state.is_world_process_zero:
            self._counts().print("trained on before the checkpoint and now read past", self._stream)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse an epoch without a pair, and ask for what is to be done at its end."""
        counts = self._counts()
        if not counts.last.ends_epoch:
            return
        refuse_useless(counts.totals, self._config, self._stream.name)
        if state.is_world_process_zero:
            counts.print(f"epoch {counts.epochs} is over", self._stream)
        # The end of the run is the Trainer's own.
        if state.global_step < state.max_steps:
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH
            due = args.eval_delay <= counts.epochs
            control.should_evaluate |= due and args.eval_strategy == IntervalStrategy.EPOCH

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what the whole run has met."""
        if state.is_world_process_zero:
            self._counts().print("all that was trained on", self._stream)
