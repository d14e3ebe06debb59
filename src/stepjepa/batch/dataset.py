"""Tokenised records, and the order in which they are trained."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sequences import Ids, Item, Pair, TokenizedRecord, View
from stepjepa.config.jepa import JepaConfig

# -- the order of records ----------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What the sampler yields for a place in a batch."""

    record: int  # its index; -1 for an empty place
    with_views: bool = True
    epoch: int = 0  # decides what is drawn for the record


STRATEGIES = ("random", "sequential")


def draw(seed: int, *place: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: not on any generator, process or resume."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(eq=False)
class StepSampler(Sampler[Key]):
    """Yields one epoch of records in the order in which they are trained.

    It is the same for one process and many, for any accumulation, and after a resume. The records of an optimizer step
    are chosen first and then sorted by length, so that its micro-batches are tight: that changes no gradient, since
    losses are normalised over the whole step (except for InfoNCE, see ``tight``). Loss dropout is drawn per step, the
    same on every process. Places that the last step can't fill evenly over processes stay empty: no record is repeated.
    """

    lengths: Sequence[int] | NDArray[np.integer]  # tokens of each record's main text
    records_per_step: int  # batch size x accumulation x processes
    _: KW_ONLY
    seed: int = 0
    strategy: str = "random"  # 'sequential' keeps the file's order of steps
    jepa_ratio: float = 1.0  # share of steps whose views are run
    jepa_epochs: float | None = None  # epochs from the start with such steps; None for all
    tight: bool = True  # sort the records of a step by length; off for losses that compare the pairs of a micro-batch
    multiple: int = 1  # the number of keys is padded to a multiple of this (batch size x processes)
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is yielded next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.multiple) * self.multiple

    def __iter__(self) -> Iterator[Key]:
        keys: list[Key] = []
        count, size = len(self.lengths), self.records_per_step
        generator = np.random.default_rng([self.seed, self.epoch])
        order = list(range(count)) if self.strategy == "sequential" else generator.permutation(count).tolist()
        for number, start in enumerate(range(0, count, size)):
            early = self.jepa_epochs is None or self.epoch + start / count < self.jepa_epochs
            with_views = early and draw(self.seed, self.epoch, number) < self.jepa_ratio
            members = order[start : start + size]
            if self.tight:
                members.sort(key=lambda index: (self.lengths[index], index))
            keys += [Key(index, with_views, self.epoch) for index in members]
        return iter(keys + [Key(-1, False, self.epoch)] * (len(self) - len(keys)))


# -- tokens of records -------------------------------------------------------------------------------------------------

SCHEMA = pa.schema({"length": pa.int64(), "record": pa.list_(pa.int32())})


class TokenizedDataset(Dataset[Item | None]):
    """Tokenised records of an Arrow stream, in a file or in memory, looked up by number or by the sampler's keys.

    Records share its memory, so what lies on disk stays there until it is needed.
    """

    def __init__(self, source: str | pa.Buffer) -> None:
        self._source = source
        table = pa.ipc.open_stream(pa.memory_map(source) if isinstance(source, str) else source).read_all()
        self._records = table.column("record")
        # [records] tokens of the main text of each record
        self.lengths: NDArray[np.int64] = table.column("length").to_numpy()

    def __reduce__(self) -> Any:
        return TokenizedDataset, (self._source,)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, key: int | Key) -> Item | None:
        """Look up a record; None for an empty place (``Key.record`` -1)."""
        number, with_views, epoch = key if isinstance(key, Key) else Key(int(key))
        if number < 0:
            return None
        return Item(_unflattened(self._records[number].values.to_numpy()), with_views, (epoch, number))


def flattened(record: TokenizedRecord) -> Ids:
    """A record as one array: its line, the lengths of four parts, these, and the own texts of its views."""
    views = [view for pair in record.pairs for view in pair]
    # Of each view the length of its own text (-1 for the main text), start, end, predictors.
    table = [(-1 if view.in_main else len(view.ids), view.start, view.end, view.predictors) for view in views]
    parts = [record.ids, record.labels, record.prompt, np.array(table, np.int32).ravel()]
    head = np.array([record.line, *map(len, parts)], np.int32)
    return np.concatenate([head, *parts, *(view.ids for view in views if not view.in_main)])


def _unflattened(flat: Ids) -> TokenizedRecord:
    line, *sizes = flat[:5].tolist()
    ids, labels, prompt, table, texts = np.split(flat[5:], np.cumsum(sizes))
    views, begin = [], 0
    for length, start, end, predictors in table.reshape(-1, 4).tolist():
        own = ids if length < 0 else texts[begin : begin + length]
        views.append(View(own, start, end, length < 0, predictors))
        begin += max(length, 0)
    return TokenizedRecord(ids, labels, prompt, tuple(map(Pair, views[::2], views[1::2])), line)


@dataclass(frozen=True)
class Prepared:
    """Records ready for training."""

    dataset: TokenizedDataset
    counts: dict[str, int]  # by the names of ``tokenize.COUNTS``
    tokens: dict[str, int]  # see :func:`count_tokens`
    template: dict[str, str] = field(default_factory=dict)  # what was derived from the chat template
    source: str = "<memory>"  # what errors call the records' file


def count_tokens(records: Iterable[TokenizedRecord], config: JepaConfig) -> dict[str, int]:
    """Tokens of the main texts (``main``), and with what a record does not share of its views with them (``all``)."""
    main = views = 0
    changes_text = LAYOUTS[str(config.layout)].changes_text
    for record in records:
        main += len(record.ids)
        for pair in record.pairs:
            source, target = pair[::-1] if config.reverse_pred else pair
            views += source.end if not source.in_main else (config.predictors or 0)
            if not target.in_main:
                views += target.end
            elif not (changes_text or config.reverse_pred):
                views += target.end - target.start
    return {"main": main, "all": main + views}
