"""Records of any source to a data set of tokens: tokenised once, kept in memory or in a cache, read in one order."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler
from tqdm.auto import tqdm

from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sequences import Ids, Item, Pair, TokenizedRecord, View
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

_SCHEMA = pa.schema({"length": pa.int64(), "record": pa.list_(pa.int32())})


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


def _flattened(record: TokenizedRecord) -> Ids:
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
        cache_dir: where tokenised data is kept. Of several processes the main one writes.
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
    if views is not None:
        rows = [replace(record, views=tuple(views(record))) for record in as_records(rows)]

    def make(file: Path | None) -> Prepared:
        made, tokens, waiting = RecordTokenizer(tokenizer, config), Counter(all=0, main=0), as_records(rows)
        opened: Any = nullcontext(pa.BufferOutputStream()) if file is None else atomic_write(file, "wb")
        gc.disable()  # no cyclic garbage is made here, and looking for it takes a third of the time
        try:
            with opened as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
                for _ in tqdm(range(0, len(rows), BLOCK), f"prepare {what}", disable=None):
                    found = made.tokenize(islice(waiting, BLOCK))
                    tokens.update(count_tokens(found, config))
                    columns = [[len(each.ids) for each in found], list(map(_flattened, found))]
                    writer.write_table(pa.table(columns, schema=_SCHEMA))
                where, kept, pairs = source if len(rows) else what, made.counts["records"], made.counts["pairs"]
                if not kept:
                    told = f"none of the {made.counts['skipped']} records can be trained on; check --max_length"
                    raise UserError(told, path=where)
                if config.uses_views and not pairs:
                    remedy = "check --step_separator and --max_length, or use --regular"
                    raise UserError(f"none of the {kept} records has a pair; {remedy}", path=where)
        finally:
            gc.enable()
        dataset = TokenizedDataset(sink.getvalue() if file is None else str(file))
        counts = {name: made.counts[name] for name in COUNTS}
        return Prepared(dataset, counts, dict(tokens), made.template.describe(), source)

    if cache_dir is False:
        return make(None)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepjepa"
    file = Path(cache_dir or folder) / f"prepared-{fingerprint(as_records(rows), tokenizer, config)}.arrow"
    try:
        # The description is written last, and makes the table valid.
        about = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        found = Prepared(TokenizedDataset(str(file)), **about, source=source)
        say(f"cache: {what} as prepared before, from {file} (--no_cache prepares anew)")
        return found
    except (OSError, ValueError, TypeError, LookupError):
        pass
    if is_main_process():
        try:
            found = make(file)
            about = {"counts": found.counts, "tokens": found.tokens, "template": found.template}
            write_json(file.with_suffix(".json"), about)
            return found
        except OSError as error:
            say(f"cache: nothing stored ({error}); --cache_dir names another folder, --no_cache does without")
    return make(None)


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
