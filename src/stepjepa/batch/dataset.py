"""Records of any source to a data set of tokens: tokenised once, kept in memory or in a cache, read in one order."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler
from tqdm.auto import tqdm

from stepjepa.batch.collate import Item
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer
from stepjepa.config import JepaConfig, affecting
from stepjepa.data.records import Data, Record, Views, as_records
from stepjepa.data.sources import read_any
from stepjepa.errors import UserError
from stepjepa.files import atomic_write, write_json
from stepjepa.run_folder import is_main_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CacheDir = str | os.PathLike[str] | Literal[False] | None
"""A folder for tokenised data; None is ``stepjepa`` in the user's folder for caches, False keeps nothing."""

BLOCK = 1000
"""Records that are tokenised at once."""


# -- the order of records ----------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What the sampler yields for a place in a batch."""

    record: int  # its index; -1 for an empty place
    with_views: bool = True
    epoch: int = 0  # decides what is drawn for the record


STRATEGIES = ("random", "group_by_length", "sequential")

# Steps whose records are sorted together under group_by_length.
_POOL = 50


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
    # 'group_by_length' puts records of like length into one step; 'sequential' keeps the file's order of steps.
    strategy: str = "random"
    jepa_ratio: float = 1.0  # share of steps whose views are run
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
        for number, step in enumerate(self._steps(np.random.default_rng([self.seed, self.epoch]))):
            with_views = draw(self.seed, self.epoch, number) < self.jepa_ratio
            members = step.tolist()
            if self.tight:
                members.sort(key=lambda index: (self.lengths[index], index))
            keys += [Key(index, with_views, self.epoch) for index in members]
        return iter(keys + [Key(-1, False, self.epoch)] * (len(self) - len(keys)))

    def _steps(self, generator: np.random.Generator) -> list[np.ndarray]:
        count, size = len(self.lengths), self.records_per_step
        order = np.arange(count) if self.strategy == "sequential" else generator.permutation(count)
        if self.strategy == "group_by_length":
            pools, lengths = np.split(order, range(size * _POOL, count, size * _POOL)), np.asarray(self.lengths)
            order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
        steps = [order[start : start + size] for start in range(0, count, size)]
        if self.strategy == "group_by_length":
            # The one short step, if any, stays last, as it must for the count of batches to come out.
            full = [step for step in steps if len(step) == size]
            steps = [full[index] for index in generator.permutation(len(full))] + steps[len(full) :]
        return steps


# -- tokens of records -------------------------------------------------------------------------------------------------

# Of each view the length of its own text (-1 for the main text), start, end, predictors; ``texts`` are joined.
_LISTS = ("ids", "labels", "prompt", "messages", "views", "texts")
_SCHEMA = pa.schema([("line", pa.int64()), *((name, pa.list_(pa.int32())) for name in _LISTS)])


class TokenizedDataset(Dataset[Item | None]):
    """Tokenised records, looked up by number or by the sampler's keys.

    Args:
        source: an Arrow stream as :func:`prepare` writes it, a file or in memory. Records share its memory, so what
            lies on disk stays there until it is needed.
    """

    def __init__(self, source: str | pa.Buffer) -> None:
        self._source = source
        self._table = pa.ipc.open_stream(pa.memory_map(source) if isinstance(source, str) else source).read_all()
        self._lists = [self._table.column(name) for name in _LISTS]

    def __reduce__(self) -> Any:
        return TokenizedDataset, (self._source,)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the main text of each record."""
        return np.asarray(pyarrow.compute.list_value_length(self._table.column("ids")), np.int64)

    def __getitem__(self, key: int | Key) -> Item | None:
        """Look up a record; None for an empty place (``Key.record`` -1)."""
        number, with_views, epoch = key if isinstance(key, Key) else Key(int(key))
        if number < 0:
            return None
        ids, labels, prompt, messages, places, texts = (column[number].values.to_numpy() for column in self._lists)
        views, begin = [], 0
        for length, start, end, predictors in places.reshape(-1, 4).tolist():
            own = ids if length < 0 else texts[begin : begin + length]
            views.append(View(own, start, end, length < 0, predictors))
            begin += max(length, 0)
        pairs, line = tuple(map(Pair, views[::2], views[1::2])), self._table.column("line")[number].as_py()
        record = TokenizedRecord(ids, labels, prompt, pairs, line, messages.reshape(-1, 3))
        return Item(record, with_views, (epoch, number))


def _as_table(records: Sequence[TokenizedRecord]) -> pa.Table:
    views, texts = [], []
    for record in records:
        found = [view for pair in record.pairs for view in pair]
        table = [(-1 if v.in_main else len(v.ids), v.start, v.end, v.predictors) for v in found]
        views.append(np.array(table, np.int32).reshape(-1))
        texts.append(np.concatenate([np.empty(0, np.int32), *(v.ids for v in found if not v.in_main)]))
    lists = [
        *([getattr(record, name) for record in records] for name in ("ids", "labels", "prompt")),
        [record.messages.reshape(-1) for record in records],
        views,
        texts,
    ]
    lines = pa.array([record.line for record in records], pa.int64())
    return pa.table([lines, *map(_as_lists, lists)], schema=_SCHEMA)


def _as_lists(arrays: Sequence[Ids]) -> pa.ListArray:
    bounds = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(bounds, np.concatenate([np.empty(0, np.int32), *arrays]))


# -- preparing ---------------------------------------------------------------------------------------------------------


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


def prepare(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    *,
    what: str = "training data",
    views: Views | None = None,
    cache_dir: CacheDir = False,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Tokenise records, or read them where they were tokenised before.

    Args:
        data: records, see ``records.Data``; a ``datasets.Dataset`` is read row by row.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        what: names the data on the progress bar and in messages.
        views: gives the pairs of views of each record, instead of those of the mode (LLM-JEPA only).
        cache_dir: where tokenised data is kept; nothing that ends in an error is. Of several processes the main one
            writes.
        say: takes a line for people.

    Raises:
        UserError: a record is wrong, none is left, or a mode with views finds no pair at all.
    """
    if views is not None and config.mode != "llm-jepa":
        raise ValueError(f"views: expected mode 'llm-jepa', got '{config.mode}', which finds its views itself")
    rows: Any = read_any(data) if isinstance(data, str | os.PathLike) else data
    if not isinstance(rows, datasets.Dataset):
        rows = list(as_records(rows))
    # A record knows its line, and not in which of several files.
    paths = {"<memory>"} if isinstance(rows, datasets.Dataset) else {record.path for record in rows}
    source = paths.pop() if len(paths) == 1 else "<several files>"

    def records() -> Iterator[Record]:
        for record in as_records(rows):
            yield record if views is None else replace(record, views=tuple(views(record)))

    def make(file: Path | None) -> Prepared:
        made, bar = (
            RecordTokenizer(tokenizer, config),
            tqdm(range(0, len(rows), BLOCK), f"prepare {what}", disable=None),
        )
        dataset, tokens = _tokenize(records(), made, bar, source if len(rows) else what, file)
        counts = {name: made.counts[name] for name in COUNTS}
        return Prepared(dataset, counts, tokens, made.template.describe(), source)

    if cache_dir is False:
        return make(None)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepjepa"
    file = Path(cache_dir or folder) / f"prepared-{fingerprint(records(), tokenizer, config)}.arrow"
    try:
        # The description is written last, and makes the table valid.
        about = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        found = Prepared(TokenizedDataset(str(file)), **about, source=source)
    except (OSError, ValueError, TypeError):
        pass
    else:
        say(f"cache: {what} as prepared before, from {file} (--no_cache prepares anew)")
        return found
    if not is_main_process():
        return make(None)
    try:
        found = make(file)
        about = {"counts": found.counts, "tokens": found.tokens, "template": found.template}
        write_json(file.with_suffix(".json"), about)
    except OSError as error:
        say(f"cache: nothing stored ({error}); --cache_dir names another folder, --no_cache does without")
        return make(None)
    return found


def _tokenize(
    records: Iterator[Record], made: RecordTokenizer, blocks: Iterable[int], source: str, file: Path | None
) -> tuple[TokenizedDataset, dict[str, int]]:
    """Tokenise records, a block after the other, into an Arrow file, or into memory."""
    tokens = Counter(all=0, main=0)
    opened: Any = nullcontext(pa.BufferOutputStream()) if file is None else atomic_write(file, "wb")
    gc.disable()  # no cyclic garbage is made here, and looking for it takes a third of the time
    try:
        with opened as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
            for _ in blocks:
                found = made.tokenize(islice(records, BLOCK))
                tokens.update(count_tokens(found, made.config))
                writer.write_table(_as_table(found))
            _refuse_useless(made.counts, made.config, source)
    finally:
        gc.enable()
    return TokenizedDataset(sink.getvalue() if file is None else str(file)), dict(tokens)


def _refuse_useless(counts: Mapping[str, int], config: JepaConfig, source: str) -> None:
    found, skipped = counts["records"], counts["skipped"]
    if not found:
        raise UserError(f"none of the {skipped} records can be trained on; check --max_length", path=source)
    if config.uses_views and not counts["pairs"]:
        remedy = (
            "check --step_separator (blank, line or a string)" if config.mode == "step-jepa" else "check --max_length"
        )
        raise UserError(f"none of the {found} records has a pair; {remedy}, or use --regular", path=source)


def fingerprint(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """Hash what tokens depend on: code, versions, tokenizer, settings, and all of the records but where they lie."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    folders = (sorted((package / name).glob("*.py")) for name in ("batch", "data", "chat"))
    for code in chain([package / "config.py"], *folders):
        digest.update(code.name.encode() + b"\0" + code.read_bytes())
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        [(name, version(name)) for name in ("tokenizers", "transformers", "jinja2", "numpy")],
        None if backend is None else (backend.to_str(), backend.encode_special_tokens),
        type(tokenizer).__name__,
        sorted((name, repr(value)) for name, value in tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        sorted(affecting(config, "sequences").items()),
    ]
    digest.update(repr(parts).encode())
    for record in records:
        digest.update(repr((record.messages, record.views, record.line)).encode())
    return digest.hexdigest()[:32]
