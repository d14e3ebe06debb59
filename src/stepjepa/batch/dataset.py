"""Tokenised records, and the order in which they are trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from stepjepa.base.counting import counted
from stepjepa.batch.flat_record import longest_possible, main_texts, prompt_of, text_starts, unflattened, without_lines
from stepjepa.batch.groups import prompt_groups
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.summary import RecordSummary
from stepjepa.views.layouts import LAYOUTS
from stepjepa.views.sequences import Ids, Numbers, Pair, SampledRecord, TokenizedRecord, common_prefix

# -- the order of records ----------------------------------------------------------------------------------------------


class SampleKey(NamedTuple):
    """One slot of a batch, as the sampler yields it."""

    record: int  # index of the record; -1 for a padding slot
    with_views: bool = True
    epoch: int = 0  # the random draws for the record depend on it


STRATEGIES = ("random", "sequential")


def hashed_uniform(seed: int, *key: int) -> float:
    """Return a number in [0, 1) that depends on the arguments alone: not on a generator, process or resume."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(eq=False)
class StepSampler(Sampler[SampleKey]):
    """Yields the records of one epoch in training order.

    The order is the same for one process and many, for any accumulation, and after a resume. The records of an
    optimizer step are chosen first and then sorted by length, so that its micro-batches need little padding; since
    losses are normalised over the whole step, that changes no gradient, except where pairs are compared, see
    ``sort_by_length``. Loss dropout is drawn per step, the same on every process. The slots that the last step can't
    fill evenly over processes are padding slots: no record is repeated.

    With ``groups`` the records of a group follow each other, and groups are in random order (``sequential``: in that of
    their first records). A group that does not fit into a micro-batch, or into a step, is continued in the next one.
    """

    lengths: Sequence[int] | NDArray[np.integer]  # [records] number of tokens of its main texts
    records_per_step: int  # batch size x accumulation x processes
    _: KW_ONLY
    seed: int = 0
    strategy: str = "random"  # 'sequential' takes the records in file order
    jepa_ratio: float = 1.0  # share of steps that run views
    jepa_epochs: float | None = None  # number of epochs, from the start, with such steps; None for all
    sort_by_length: bool = True  # within a step; False for losses that compare the pairs of a micro-batch
    multiple: int = 1  # the number of keys is padded to a multiple of this (batch size x processes)
    groups: Numbers | None = None  # [records] the group of each record, see ``groups.prompt_groups``
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch that is yielded next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[SampleKey]:
        # Bound now: a later ``set_epoch`` must not change an epoch that has begun.
        return self._keys(self.epoch)

    def _keys(self, epoch: int) -> Iterator[SampleKey]:
        """Yield the keys of one epoch, computed a step at a time."""
        count, size = len(self.lengths), self.records_per_step
        generator = np.random.default_rng([self.seed, epoch])
        in_file = np.arange(count)
        order: Ids = (in_file if self.strategy == "sequential" else generator.permutation(in_file)).astype(np.int32)
        if self.groups is not None:
            order = self._by_group(order, self.groups, generator)
        for number, start in enumerate(range(0, count, size)):
            early = self.jepa_epochs is None or epoch + start / count < self.jepa_epochs
            with_views = early and hashed_uniform(self.seed, epoch, number) < self.jepa_ratio
            records: list[int] = order[start : start + size].tolist()
            if self.sort_by_length:
                records = self._by_length(records)
            yield from (SampleKey(index, with_views, epoch) for index in records)
        yield from [SampleKey(-1, False, epoch)] * (len(self) - count)

    def _by_group(self, order: Ids, groups: Numbers, generator: np.random.Generator) -> Ids:
        """Bring the records of each group together; within a group they stay in their order."""
        _, first, number = np.unique(groups, return_index=True, return_inverse=True)
        rank = first if self.strategy == "sequential" else generator.permutation(len(first))
        return order[np.argsort(rank[number[order]], kind="stable")]

    def _by_length(self, records: list[int]) -> list[int]:
        """Sort the records of a step by length; groups move as a whole, by their longest record."""
        group = {index: index if self.groups is None else int(self.groups[index]) for index in records}
        longest: dict[int, int] = {}
        for index in records:
            longest[group[index]] = max(longest.get(group[index], 0), int(self.lengths[index]))
        return sorted(records, key=lambda index: (longest[group[index]], group[index], int(self.lengths[index]), index))


# -- tokens of records -------------------------------------------------------------------------------------------------

SCHEMA = pa.schema({"length": pa.int64(), "record": pa.list_(pa.int32())})


class TokenFingerprints(NamedTuple):
    """SHA-256 of tokenised records."""

    records: str  # of all that is stored of them
    # Of the token ids of their main texts alone. These have no predictor tokens: layout ``inplace`` inserts them when a
    # batch is made.
    texts: str


class TokenizedDataset(Dataset[SampledRecord | None]):
    """Tokenised records in an Arrow stream, a file or in memory, indexed by number or by the sampler's keys.

    Records are views into the stream's memory: of a file only the records that are used are read.
    """

    def __init__(self, source: str | pa.Buffer) -> None:
        self._source = source
        table = pa.ipc.open_stream(pa.memory_map(source) if isinstance(source, str) else source).read_all()
        self._records = table.column("record")
        # [records] number of tokens of its main texts
        self.lengths: Numbers = table.column("length").to_numpy()

    def __repr__(self) -> str:
        return f"TokenizedDataset({counted(len(self), 'record')})"

    def __reduce__(self) -> tuple[type[TokenizedDataset], tuple[str | pa.Buffer]]:
        return TokenizedDataset, (self._source,)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, key: SampleKey) -> SampledRecord | None: ...

    @overload
    def __getitem__(self, key: int) -> SampledRecord: ...

    def __getitem__(self, key: int | SampleKey) -> SampledRecord | None:
        """Look up a record by its number, or by a key of the sampler; None for a padding slot of that."""
        if isinstance(key, SampleKey) and key.record < 0:
            return None
        number, with_views, epoch = key if isinstance(key, SampleKey) else SampleKey(range(len(self))[key])
        return SampledRecord(unflattened(self._records[number].values.to_numpy()), with_views, (epoch, number))

    def longest_possible(self, predictors: int) -> Numbers:
        """Return ``[records]`` lengths that no sequence of a record exceeds, see ``flat_record.longest_possible``."""
        return longest_possible(pc.list_value_length(self._records).to_numpy(), predictors)

    @cached_property
    def prompt_groups(self) -> Numbers:
        """``[records]`` the group of each record by its prompt, see ``groups.prompt_groups``."""
        return prompt_groups(self.prompts())

    def prompts(self) -> list[Ids]:
        """Return the prompt of each record, see ``flat_record.prompt_of``."""
        return [prompt_of(record.values.to_numpy()) for record in self._records]

    def fingerprints(self) -> TokenFingerprints:
        """Hash the records in their order, without their line numbers."""
        records, texts = hashlib.sha256(), hashlib.sha256()
        for chunk in self._records.chunks:
            offsets = chunk.offsets.to_numpy()
            flat = chunk.values.to_numpy()[offsets[0] : offsets[-1]]
            starts = text_starts(flat, offsets[:-1] - offsets[0], offsets[1:] - offsets[0])
            records.update(without_lines(flat, starts).tobytes())
            texts.update(main_texts(flat, starts).tobytes())
        return TokenFingerprints(records.hexdigest(), texts.hexdigest())


@dataclass(frozen=True)
class Prepared:
    """Tokenised records, ready for training.

    Attributes:
        dataset: the records, by their index.
        counts: what was counted while tokenising, by the names of ``tokenize.COUNTS``.
        tokens: numbers of tokens, see :func:`count_tokens`.
        template: facts derived from the chat template.
        source: name of the records' file in error messages.
        summary: of the records; None if unknown.
    """

    dataset: TokenizedDataset
    counts: dict[str, int]
    tokens: dict[str, int]
    template: dict[str, str] = field(default_factory=dict)
    source: str = "<memory>"
    summary: RecordSummary | None = field(default=None, repr=False, compare=False)


def count_tokens(records: Iterable[TokenizedRecord], config: JepaConfig) -> dict[str, int]:
    """Count the tokens of records, in total and under several ways of training them.

    Returns:
        ``main``: of main texts alone. ``all``: main plus the tokens of views that are not shared with them. ``tree``:
        of main texts, with shared beginnings of the texts of a record counted once. ``chat``: of each record's last
        text, in which a trainer with one row a chat would train all turns. ``turns``: with a row for each trained turn.
    """
    counts = dict.fromkeys(("main", "all", "tree", "chat", "turns"), 0)
    changes_text = LAYOUTS[str(config.layout)].changes_text
    for record in records:
        counts["tree"] += _distinct_tokens(record)
        counts["chat"] += len(record.texts[-1].ids)
        for text in record.texts:
            counts["main"] += len(text.ids)
            counts["turns"] += sum(_turn_lengths(text)) if config.labels == "assistant" else len(text.ids)
            counts["all"] += len(text.ids) + sum(_view_tokens(pair, config, changes_text) for pair in text.pairs)
    return counts


def _view_tokens(pair: Pair, config: JepaConfig, changes_text: bool) -> int:
    """Count the tokens that a pair's views add to their main text; ``changes_text`` is that of the layout."""
    source, target = pair[::-1] if config.reverse_pred else pair
    predictors = config.predictors or 0
    if not source.in_main:
        count = source.end
    elif config.reverse_pred or (config.front_pred and predictors):
        # The second view alone, or the first one repeated behind predictor tokens.
        count = predictors + source.end - source.start
    else:
        count = predictors
    if not target.in_main:
        return count + target.end
    # The first view as a target is read in the main text, and so is the second one of a layout that changes the text.
    return count if config.reverse_pred or changes_text else count + target.end - target.start


def _distinct_tokens(record: TokenizedRecord) -> int:
    """Count the tokens of a record's main texts as a prefix tree."""
    count = len(record.ids)
    for number, text in enumerate(record.texts[1:], start=1):
        count += len(text.ids) - max(common_prefix(text.ids, before.ids) for before in record.texts[:number])
    return count


def _turn_lengths(text: TokenizedRecord) -> list[int]:
    """Return the length of each trained turn of a text, its prompt included: the end of its run of labels."""
    labels = text.labels
    if len(labels) and labels[-1] - labels[0] == len(labels) - 1:
        return [int(labels[-1]) + 2]
    last = np.flatnonzero(np.diff(labels, append=-1) != 1)
    return [int(end) + 2 for end in labels[last]]
