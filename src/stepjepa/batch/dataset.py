"""Records of any source to a data set of tokens: tokenised once by ``datasets.map``, kept in memory or in a cache."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Dataset

from stepjepa.batch.collate import Item
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.batch.sampler import Key
from stepjepa.batch.sequences import Ids, Pair, TokenizedRecord, View
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer
from stepjepa.config import JepaConfig, affecting
from stepjepa.data.records import Record, parse_record
from stepjepa.data.sources import Data, read_any
from stepjepa.errors import UserError
from stepjepa.files import write_json
from stepjepa.run_folder import is_main_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CacheDir = str | os.PathLike[str] | Literal[False] | None
"""A folder for tokenised data; None is the default one, False keeps nothing."""

BLOCK = 1000
"""Records that are tokenised at once."""

LIMIT = 10 * 2**30
"""Bytes that a cache folder may take; what was not used for longest is removed first."""

PREFIX = "prepared-"


class TokenizedDataset(Dataset[Item | None]):
    """Tokenised records, looked up by number or by the sampler's keys.

    Args:
        table: as :func:`prepare` makes it; its memory is shared, so what lies on disk stays there until it is needed.
    """

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table
        self._chunks = [_Chunk(batch) for batch in table.data.to_batches()]
        self._bounds = [0, *accumulate(len(chunk.line) for chunk in self._chunks)]

    def __reduce__(self) -> Any:
        return TokenizedDataset, (self._table,)

    def __len__(self) -> int:
        return self._bounds[-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of the main text of each record."""
        return np.concatenate([np.empty(0, np.int64), *(np.diff(chunk.ids.bounds) for chunk in self._chunks)])

    def __getitem__(self, key: int | Key) -> Item | None:
        """Look up a record; None for an empty place (``Key.record`` -1)."""
        number, with_views, epoch = key if isinstance(key, Key) else Key(int(key))
        if number < 0:
            return None
        if number >= len(self):
            raise IndexError(f"expected a number below {len(self)}, got {number}")
        chunk = bisect_right(self._bounds, number) - 1
        return Item(self._chunks[chunk].record(number - self._bounds[chunk]), with_views, (epoch, number))


class _Lists:
    """A column of lists as two NumPy arrays that share the memory of Arrow."""

    def __init__(self, column: pa.ListArray) -> None:
        self.bounds, self.values = column.offsets.to_numpy(), column.values.to_numpy()

    def __getitem__(self, index: int) -> Ids:
        found: Ids = self.values[self.bounds[index] : self.bounds[index + 1]]
        return found


class _Chunk:
    """Some records of a table."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.line = batch.column("line").to_numpy()
        names = "ids", "labels", "prompt", "messages", "views", "texts"
        self.ids, self.labels, self.prompt, self.messages, self.views, self.texts = (
            _Lists(batch.column(name)) for name in names
        )

    def record(self, index: int) -> TokenizedRecord:
        ids, texts, place, views = self.ids[index], self.texts[index], 0, []
        for length, start, end, predictors in self.views[index].reshape(-1, 4).tolist():
            if length < 0:
                views.append(View(ids, start, end, True, predictors))
            else:
                views.append(View(texts[place : place + length], start, end, False, predictors))
                place += length
        pairs = tuple(map(Pair, views[::2], views[1::2]))
        messages = self.messages[index].reshape(-1, 3)
        return TokenizedRecord(ids, self.labels[index], self.prompt[index], pairs, int(self.line[index]), messages)


def _as_table(records: Sequence[TokenizedRecord]) -> pa.Table:
    """Records as a table; of each view the length of its own text (-1 for the main text), start, end, predictors."""
    views, texts = [], []
    for record in records:
        found = [view for pair in record.pairs for view in pair]
        table = [(-1 if v.in_main else len(v.ids), v.start, v.end, v.predictors) for v in found]
        views.append(np.array(table, np.int32).reshape(-1))
        texts.append(np.concatenate([np.empty(0, np.int32), *(v.ids for v in found if not v.in_main)]))
    return pa.table(
        {
            "line": pa.array([record.line for record in records], pa.int64()),
            "ids": _as_lists([record.ids for record in records]),
            "labels": _as_lists([record.labels for record in records]),
            "prompt": _as_lists([record.prompt for record in records]),
            "messages": _as_lists([record.messages.reshape(-1) for record in records]),
            "views": _as_lists(views),
            "texts": _as_lists(texts),
        }
    )


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
    split: str | None = None,
    cache_dir: CacheDir = False,
    say: Callable[[str], None] = print,
) -> Prepared:
    """Tokenise records, or read them where they were tokenised before.

    Args:
        data: records, see ``sources.Data``.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        what: names the data on the progress bar and in messages.
        split: of a data set on the hub; may be left out where there is only one.
        cache_dir: where tokenised data is kept; nothing that ends in an error is. Of several processes the main one
            writes.
        say: takes a line for people.

    Raises:
        UserError: a record is wrong, none is left, or a mode with views finds no pair at all.
    """
    records = _Rows(data) if isinstance(data, datasets.Dataset) else read_any(data, split)
    files = {record.path for record in records}
    # A record knows its line, and not in which of several files.
    source = files.pop() if len(files) == 1 else "<several files>"
    found = None
    if cache_dir is not False:
        key = fingerprint(records, tokenizer, config)
        entry = (default_folder() if cache_dir is None else Path(cache_dir)) / f"{PREFIX}{key[:32]}"
        found = _load(entry, key, what, say)
        if found is None and is_main_process():
            try:
                entry.mkdir(parents=True, exist_ok=True)
                found = _tokenize(records, tokenizer, config, what, entry / _TABLE)
                _store(entry, key, found)
            except OSError as error:
                say(f"cache: nothing stored ({error}); --cache_dir names another folder, --no_cache does without")
                shutil.rmtree(entry, ignore_errors=True)
    return replace(found or _tokenize(records, tokenizer, config, what, None), source=source)


class _Rows(Sequence[Record]):
    """The rows of a ``datasets.Dataset`` as records, read when they are needed."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return parse_record(self._rows[index], line=index + 1)


def _tokenize(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, what: str, file: Path | None
) -> Prepared:
    """Tokenise records into an Arrow file, or into memory."""
    made, tokens = RecordTokenizer(tokenizer, config), Counter(all=0, main=0)

    def tokenize(batch: dict[str, list[int]]) -> pa.Table:
        found = made.tokenize([records[index] for index in batch["index"]])
        tokens.update(count_tokens(found, config))
        return _as_table(found)

    try:
        with _undisturbed():
            table = datasets.Dataset.from_dict({"index": range(len(records))}).map(
                tokenize,
                batched=True,
                batch_size=BLOCK,
                remove_columns=["index"],
                cache_file_name=None if file is None else str(file),
                load_from_cache_file=False,
                # Ours is the name of the cache's entry; the library's own does not notice a changed helper function.
                new_fingerprint="stepjepa",
                desc=f"prepare {what}",
            )
        refuse_useless(made.counts, config, records[0].path if records else what)
    except BaseException:
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)
        raise
    counts = {name: made.counts[name] for name in COUNTS}
    return Prepared(TokenizedDataset(table), counts, dict(tokens), made.template.describe())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Show the library's progress bar only where somebody watches it, and leave cyclic garbage for later.

    None is made here, and looking for it takes a third of the time.
    """
    hide = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hide:
        datasets.disable_progress_bars()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if hide:
            datasets.enable_progress_bars()


# -- the cache ---------------------------------------------------------------------------------------------------------

_TABLE, _ABOUT = "records.arrow", "about.json"


def default_folder() -> Path:
    """``stepjepa`` in the user's folder for caches: ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    # The standard that names the variable says that a relative path in it counts for nothing.
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache") / "stepjepa"


def fingerprint(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """Hash what tokens depend on: code, versions, tokenizer, settings, and all of the records but where they lie."""
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    folders = (sorted((package / name).glob("*.py")) for name in ("batch", "data", "text"))
    for code in chain([package / "config.py"], *folders):
        digest.update(code.name.encode() + b"\0" + code.read_bytes())
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        [(name, version(name)) for name in ("tokenizers", "transformers", "datasets", "jinja2", "numpy")],
        None if backend is None else (backend.to_str(), backend.encode_special_tokens),
        type(tokenizer).__name__,
        sorted((name, repr(value)) for name, value in tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        sorted(affecting(config, "sequences").items()),
    ]
    digest.update(repr(parts).encode())
    for record in records:
        digest.update(repr((record.messages, record.text, record.code, record.line)).encode())
    return digest.hexdigest()


def _store(entry: Path, key: str, found: Prepared) -> None:
    """Describe a table that was written, which makes it valid, and remove entries beyond the limit."""
    about = {"counts": found.counts, "tokens": found.tokens, "template": found.template}
    write_json(entry / _ABOUT, {"key": key, "sha256": _hash(entry / _TABLE), "about": about})
    entries = []
    for path in entry.parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # removed by another process meanwhile
            entries.append((path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()), path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total > LIMIT and path != entry:
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _load(entry: Path, key: str, what: str, say: Callable[[str], None]) -> Prepared | None:
    """What was stored before; None where there is nothing, or nothing sound."""
    try:
        found = json.loads((entry / _ABOUT).read_text(encoding="utf-8"))
        if found["key"] != key or found["sha256"] != _hash(entry / _TABLE):
            raise ValueError("it is damaged")
        prepared = Prepared(TokenizedDataset(datasets.Dataset.from_file(str(entry / _TABLE))), **found["about"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"cache: {entry} can't be used ({error}); {what} is prepared anew")
        return None
    with suppress(OSError):  # a folder of others can be read all the same
        os.utime(entry)
    say(f"cache: {what} as prepared before, from {entry} (--no_cache prepares anew)")
    return prepared


def _hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
