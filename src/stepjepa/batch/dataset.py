"""Records of any source to a data set of tokens: tokenised once, kept in memory or in a cache."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from stepjepa import files
from stepjepa.batch.collate import Item
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sampler import Key
from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer
from stepjepa.config import JepaConfig, affecting
from stepjepa.data.records import Data, Record, Views, as_records
from stepjepa.data.sources import read_any
from stepjepa.errors import UserError
from stepjepa.run_folder import is_main_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CacheDir = str | os.PathLike[str] | Literal[False] | None
"""A folder for tokenised data; None is ``stepjepa`` in the user's folder for caches, False keeps nothing."""

BLOCK = 1000
"""Records that are tokenised at once."""

LIMIT = 10 * 2**30
"""Bytes that a cache folder may take; what was not used for longest is removed first."""

PREFIX = "prepared-"

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
        return None if number < 0 else Item(self._record(number), with_views, (epoch, number))

    def _record(self, number: int) -> TokenizedRecord:
        ids, labels, prompt, messages, places, texts = (column[number].values.to_numpy() for column in self._lists)
        views, begin = [], 0
        for length, start, end, predictors in places.reshape(-1, 4).tolist():
            if length < 0:
                views.append(View(ids, start, end, True, predictors))
            else:
                views.append(View(texts[begin : begin + length], start, end, False, predictors))
                begin += length
        pairs, line = tuple(map(Pair, views[::2], views[1::2])), self._table.column("line")[number].as_py()
        return TokenizedRecord(ids, labels, prompt, pairs, line, messages.reshape(-1, 3))


def _as_table(records: Sequence[TokenizedRecord]) -> pa.Table:
    """Records as a table; of each view the length of its own text (-1 for the main text), start, end, predictors."""
    views, texts = [], []
    for record in records:
        found = [view for pair in record.pairs for view in pair]
        table = [(-1 if v.in_main else len(v.ids), v.start, v.end, v.predictors) for v in found]
        views.append(np.array(table, np.int32).reshape(-1))
        texts.append(np.concatenate([np.empty(0, np.int32), *(v.ids for v in found if not v.in_main)]))
    lists = [
        [record.ids for record in records],
        [record.labels for record in records],
        [record.prompt for record in records],
        [record.messages.reshape(-1) for record in records],
        views,
        texts,
    ]
    return pa.table([pa.array([record.line for record in records], pa.int64()), *map(_as_lists, lists)], schema=_SCHEMA)


def _as_lists(arrays: Sequence[Ids]) -> pa.ListArray:
    bounds = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(bounds, np.concatenate([np.empty(0, np.int32), *arrays]))


@dataclass(frozen=True)
class Prepared:
    """Records ready for training.

    Attributes:
        dataset: their tokens.
        counts: by the names of ``tokenize.COUNTS``.
        tokens: ``main``: tokens of the main texts; ``all``: those of the views as well, as far as a record does not
            share them with its own main text.
        template: what was derived from the chat template.
        source: what errors call the records' file.
    """

    dataset: TokenizedDataset
    counts: dict[str, int]
    tokens: dict[str, int]
    template: dict[str, str] = field(default_factory=dict)
    source: str = "<memory>"

    def describe(self) -> str:
        """One line for people."""
        return describe(self.counts, self.tokens)


def describe(counts: Mapping[str, int], tokens: Mapping[str, int]) -> str:
    """One line for people; see :class:`Prepared`."""
    named = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == "records")
    return f"{named}; {tokens['all']:,} tokens, {tokens['all'] / max(tokens['main'], 1):.2f} of regular"


def refuse_useless(counts: Mapping[str, int], config: JepaConfig, path: object) -> None:
    """Refuse data that can't be trained on as it is meant.

    Args:
        counts: of all records, by the names of ``COUNTS``.
        config: whether there should be pairs.
        path: where the records come from.

    Raises:
        UserError: no record is left, or a mode with views has found no pair at all.
    """
    found, skipped = counts.get("records", 0), counts.get("skipped", 0)
    if not found:
        raise UserError(f"none of the {skipped} records can be trained on; check --max_length", path=path)
    if config.uses_views and not counts.get("pairs"):
        remedy = (
            "check --step_separator (blank, line or a string)" if config.mode == "step-jepa" else "check --max_length"
        )
        raise UserError(f"none of the {found} records has a pair; {remedy}, or use --regular", path=path)


def count_tokens(records: Iterable[TokenizedRecord], config: JepaConfig) -> Counter[str]:
    """Count tokens as ``Prepared.tokens`` does."""
    assert config.layout is not None and config.predictors is not None
    found: Counter[str] = Counter()
    for record in records:
        found["main"] += len(record.ids)
        found["all"] += len(record.ids)
        for pair in record.pairs:
            source, target = pair[::-1] if config.reverse_pred else pair
            found["all"] += source.end if not source.in_main else config.predictors
            if not target.in_main:
                found["all"] += target.end
            elif not (LAYOUTS[config.layout].changes_text or config.reverse_pred):
                found["all"] += target.end - target.start
    return found


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
    records: list[Record] | _Rows
    if isinstance(data, str | os.PathLike):
        records = read_any(data)
    else:
        records = _Rows(data) if isinstance(data, datasets.Dataset) else list(as_records(data))
    if views is not None:
        if config.mode != "llm-jepa":
            raise ValueError(f"views: expected mode 'llm-jepa', got '{config.mode}', which finds its views itself")
        records = [replace(record, views=tuple(views(record))) for record in records]
    paths = {record.path for record in records} if isinstance(records, list) else {"<memory>"}
    # A record knows its line, and not in which of several files.
    source = paths.pop() if len(paths) == 1 else "<several files>"

    def make(file: Path | None) -> Prepared:
        prepared = _tokenize(records, RecordTokenizer(tokenizer, config), what, file)
        refuse_useless(prepared.counts, config, source if len(records) else what)
        return prepared

    found = None
    if cache_dir is not False:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = caches / "stepjepa" if cache_dir is None else Path(cache_dir)
        entry = folder / f"{PREFIX}{fingerprint(records, tokenizer, config)}"
        found = _load(entry, what, say)
        if found is None and is_main_process():
            try:
                found = make(entry / _TABLE)
                _store(entry, found)
            except OSError as error:
                say(f"cache: nothing stored ({error}); --cache_dir names another folder, --no_cache does without")
            finally:
                if not (entry / _ABOUT).is_file():
                    shutil.rmtree(entry, ignore_errors=True)
    return replace(found or make(None), source=source)


class _Rows:
    """The rows of a ``datasets.Dataset`` as records, read when they are needed."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        return as_records(self._rows)


def _tokenize(records: _Rows | list[Record], made: RecordTokenizer, what: str, file: Path | None) -> Prepared:
    """Tokenise records into an Arrow file, or into memory."""
    tokens, waiting = Counter(all=0, main=0), iter(records)
    # Written whole or not at all: two runs that start at once may write the same file.
    opened: Any = nullcontext(pa.BufferOutputStream()) if file is None else files.atomic_write(file, "wb")
    with opened as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer, _without_garbage_collection():
        for _ in tqdm(range(0, len(records), BLOCK), f"prepare {what}", disable=None):
            found = made.tokenize(list(islice(waiting, BLOCK)))
            tokens.update(count_tokens(found, made.config))
            writer.write_table(_as_table(found))
    dataset = TokenizedDataset(sink.getvalue() if file is None else str(file))
    return Prepared(dataset, {name: made.counts[name] for name in COUNTS}, dict(tokens), made.template.describe())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Leave cyclic garbage for later: none is made here, and looking for it takes a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# -- the cache ---------------------------------------------------------------------------------------------------------

_TABLE, _ABOUT = "records.arrow", "about.json"


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
        digest.update(repr((record.messages, record.tools, record.views, record.line)).encode())
    return digest.hexdigest()[:32]


def _store(entry: Path, found: Prepared) -> None:
    """Describe a table that was written, which makes it valid, and remove entries beyond the limit."""
    about = {"counts": found.counts, "tokens": found.tokens, "template": found.template}
    files.write_json(entry / _ABOUT, {"sha256": files.fingerprint(entry / _TABLE), "about": about})
    entries = []
    for path in entry.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed by another process meanwhile
            entries.append((path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()), path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total > LIMIT and path != entry:
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _load(entry: Path, what: str, say: Callable[[str], None]) -> Prepared | None:
    """What was stored before; None where there is nothing, or nothing sound."""
    try:
        found = json.loads((entry / _ABOUT).read_text(encoding="utf-8"))
        if found["sha256"] != files.fingerprint(entry / _TABLE):
            raise ValueError("it is damaged")
        prepared = Prepared(TokenizedDataset(str(entry / _TABLE)), **found["about"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"cache: {entry} can't be used ({error}); {what} is prepared anew")
        return None
    with suppress(OSError):  # a folder of others can be read all the same
        os.utime(entry)
    say(f"cache: {what} as prepared before, from {entry} (--no_cache prepares anew)")
    return prepared
