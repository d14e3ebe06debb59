"""Forests made of a stream while it is trained on: what a step holds, whose share is whose, and what was met.

The process that trains reads the records; its workers, if it has any, are sent the raw records of whole micro-batches
and make the forests. So no record is read by a worker, none is made into a forest twice, and the order is the same for
any number of workers and processes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Sampler

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.data.streams import Placed, RecordStream
from stepjepa.errors import UserError
from stepjepa.forests.forest import Forest
from stepjepa.forests.grouping import GroupCollator
from stepjepa.forests.sampler import draw, draw_triple
from stepjepa.forests.segments import ForestBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Share:
    """The records of one micro-batch of one process, before they are tokenised.

    Attributes:
        records: none where a step at the end of an epoch has too few for all.
        with_views: their views are run.
        epoch: of the stream, from 0.
        ends_epoch: the step is known to be the last of its epoch.
        digest_before: stands for all records that were trained on before this step, in their order.
        digest: for all up to the end of this step.
    """

    records: list[Placed]
    with_views: bool = True
    epoch: int = 0
    ends_epoch: bool = False
    digest_before: int = 0
    digest: int = 0


@dataclass(frozen=True)
class Met:
    """What became of a :class:`Share`, on its way beside the tensors of the batch.

    Attributes:
        share: without its records.
        counts: of ``ForestBuilder``, and ``all`` and ``main``: tokens of the forests, and of the main texts alone.
        error: what is wrong with a record of it, where something is: an error has to wait until it is its turn.
    """

    share: Share
    counts: Counter[str] = field(default_factory=Counter)
    error: str | None = None


class StreamSampler(Sampler[Any]):
    """Yields the micro-batches of one process, each a :class:`Share`, for the whole of a run.

    A step takes the next records of the stream. They are sorted by their number of characters, cut into micro-batches
    and dealt out to the processes in turn, as ``StepSampler`` does it with tokens: those are not known yet, and a
    process only ever tokenises its own share. When an epoch is over, its last step stays short, and the source is read
    again. Loss dropout is drawn as in ``StepSampler``, too.

    Skipping micro-batches costs the reading of their records and nothing else.

    Args:
        stream: of the records.
        batch_size: records of a micro-batch.
        accumulation: micro-batches of a process in a step.
        steps: of the run.
        rank: of this process.
        world: number of processes.
        seed: of the order and of loss dropout.
        jepa_ratio: share of steps whose views are run.
        tight: sort the records of a step. Off for losses that compare the pairs of a micro-batch.
    """

    def __init__(
        self,
        stream: RecordStream,
        batch_size: int,
        *,
        accumulation: int = 1,
        steps: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        jepa_ratio: float = 1.0,
        tight: bool = True,
    ) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._steps = steps
        self._rank = rank
        self._world = world
        self._seed = seed
        self._jepa_ratio = jepa_ratio
        self._tight = tight

    def __len__(self) -> int:
        return self._steps * self._accumulation

    def __iter__(self) -> Iterator[Share]:
        """The shares.

        Raises:
            UserError: a record is wrong, or the source has no records, in the first epoch or in a later one.
        """
        size = self._batch_size * self._accumulation * self._world
        left, epoch, digest = self._steps, 0, 0
        while left:
            records = _LookingAhead(self._stream.epoch(epoch, self._seed))
            number = 0
            while left and (members := list(islice(records, size))):
                left -= 1
                # After the last step it makes no difference, and nothing is read that is not trained on.
                ends = len(members) < size or (left > 0 and not records.goes_on())
                views = draw(self._seed, epoch, number) < self._jepa_ratio
                before, digest = digest, _digest(members, digest)
                yield from self._shares(members, Share([], views, epoch, ends, before, digest))
                number += 1
            if not number:
                raise UserError(_nothing(epoch), path=self._stream.name)
            epoch += 1

    def _shares(self, members: list[Placed], common: Share) -> Iterator[Share]:
        if self._tight:
            members.sort(key=lambda placed: (_characters(placed.record), placed.position))
        for number in range(self._accumulation):
            start = (number * self._world + self._rank) * self._batch_size
            yield replace(common, records=members[start : start + self._batch_size])


def _nothing(epoch: int) -> str:
    if epoch == 0:
        return "holds no records; expected one JSON object per line"
    return (
        f"the records ended after {epoch} {'epoch' if epoch == 1 else 'epochs'}, and reading them again gave none; "
        "pass records that can be iterated once an epoch, or fewer max_steps"
    )


class _LookingAhead:
    """An iterator that can tell whether it goes on."""

    def __init__(self, values: Iterator[Placed]) -> None:
        self._values = values
        self._next: list[Placed] = []

    def __iter__(self) -> Iterator[Placed]:
        return self

    def __next__(self) -> Placed:
        return self._next.pop() if self._next else next(self._values)

    def goes_on(self) -> bool:
        """Reads one value ahead, at most."""
        self._next = self._next or list(islice(self._values, 1))
        return bool(self._next)


def _characters(record: Record) -> int:
    return sum(len(message["content"]) for message in record.messages)


def _digest(members: list[Placed], digest: int) -> int:
    """32 bits of all that is read of some records, and of what came before them."""
    for _, record in members:
        parts = [value for message in record.messages for value in (message["role"], message["content"])]
        text = "\0".join([*parts, record.text or "", record.code or ""])
        digest = zlib.crc32(text.encode(errors="surrogatepass"), digest)
    return digest


class StreamedForests(Dataset[Any]):
    """Makes the forests of shares, in the process or in the workers of a ``DataLoader``.

    Args:
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        positions: most positions of a row that the model has; None for no limit.
        triple_seed: as for ``ForestDataset``; the record's index is its position in the source.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: JepaConfig,
        *,
        positions: int | None = None,
        triple_seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._positions = positions
        self._triple_seed = triple_seed
        # Made where it is used: what a template is compiled to can't be sent to another process.
        self._builder: ForestBuilder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_builder": None}

    def __getitems__(self, share: Share) -> tuple[list[Forest], Met]:
        """What ``DataLoader`` asks for: the forests of a share, and what was met on the way to them."""
        plain, builder = replace(share, records=[]), self._made()
        builder.counts.clear()
        try:
            made = builder.build([placed.record for placed in share.records])
            counts, kept = Counter(builder.counts), share.records
            if len(made) < len(kept):
                kept = _kept(builder, kept, made)
            for placed, forest in zip(kept, made, strict=True):
                self._check_positions(forest, placed.record)
                counts["all"] += len(forest)
                counts["main"] += forest.text_length
        except UserError as error:
            return [], Met(plain, error=str(error))
        return [self._drawn(*each, share) for each in zip(made, kept, strict=True)], Met(plain, counts)

    def template(self) -> dict[str, str]:
        """What was derived from the chat template."""
        return self._made().template.describe()

    def _made(self) -> ForestBuilder:
        if self._builder is None:
            self._builder = ForestBuilder(self._tokenizer, self._config)
        return self._builder

    def _drawn(self, forest: Forest, placed: Placed, share: Share) -> Forest:
        if not share.with_views:
            forest = forest.without_views()
        if self._triple_seed is None:
            return forest
        return replace(forest, triple=draw_triple(forest, self._triple_seed, share.epoch, placed.position))

    def _check_positions(self, forest: Forest, record: Record) -> None:
        taken = int(forest.position_ids.max()) + 1
        if self._positions is not None and taken > self._positions:
            raise UserError(
                f"the record takes {taken} positions, and the model has {self._positions} (max_position_embeddings); "
                f"set max_length to {self._positions} or less",
                path=record.path,
                line=record.line,
            )


def _kept(builder: ForestBuilder, records: list[Placed], made: list[Forest]) -> list[Placed]:
    """The records that were not skipped. A forest tells its line, which is enough where no two lines are the same."""
    lines = {forest.line for forest in made}
    if len({placed.record.line for placed in records}) == len(records):
        return [placed for placed in records if placed.record.line in lines]
    return [placed for placed in records if builder.build([placed.record])]


@dataclass(frozen=True)
class StreamCollator:
    """Makes the batch of a share, as ``GroupCollator`` does, with a :class:`Met` beside the groups.

    Args:
        collator: makes the groups.
    """

    collator: GroupCollator

    def __call__(self, made: tuple[list[Forest], Met]) -> dict[str, Any]:
        """Collate what ``StreamedForests`` made."""
        forests, met = made
        return {**self.collator(forests), "met": met}
