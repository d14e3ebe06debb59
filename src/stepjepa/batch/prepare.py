"""Tokenise records of any source once, into memory or a cache."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import datasets
import pyarrow as pa
from tqdm.auto import tqdm

from stepjepa.base.arguments import expanded
from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, temporary_folder, write_json
from stepjepa.base.json_object import JsonObject
from stepjepa.base.processes import is_main_process
from stepjepa.base.spool import BLOCK, Spooled
from stepjepa.batch.dataset import SCHEMA, Prepared, TokenizedDataset, count_tokens
from stepjepa.batch.flat_record import flattened
from stepjepa.batch.tokenize import COUNTS, RecordTokenizer, RecordTooLongError
from stepjepa.config.jepa import JepaConfig, affecting
from stepjepa.data.reading_notes import UnusedParts
from stepjepa.data.record import Data, Record, Views
from stepjepa.data.records import as_records, check_is_collection
from stepjepa.data.sources import each_record_of_data
from stepjepa.data.summarising import Summariser
from stepjepa.views.layouts import LAYOUTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CacheDir = str | os.PathLike[str] | Literal[False] | None
"""A folder for tokenised data; None is ``stepjepa`` in the user's cache folder, False stores nothing."""

SURVEYED = 10_000
"""Records that are measured where one of them is too long."""


def prepare(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    *,
    what: str = "training data",
    views: Views | None = None,
    cache_dir: CacheDir = False,
    say: Callable[[str], None] = print,
    unused: UnusedParts | None = None,
) -> Prepared:
    """Tokenise records, or read their tokens from the cache; of several processes the main one writes it.

    Args:
        data: records, a file name, or a ``datasets.Dataset``, which is read row by row.
        tokenizer: fast, with the predictor tokens of ``config``.
        config: mode, layout and length of the records.
        what: the data's name on the progress bar and in messages.
        views: gives the pairs of views of a record, instead of the mode; for LLM-JEPA alone.
        cache_dir: see :data:`CacheDir`.
        say: called with one line on the use of the cache.
        unused: collects the parts of the records that nothing reads.

    Raises:
        ValueError: ``views`` in another mode.
        UserError: a record is wrong, none is left, or a mode with views finds no pair at all.
    """
    if views is not None and config.mode != "llm-jepa":
        raise ValueError(f"views: expected mode 'llm-jepa', got '{config.mode}', which finds its views itself")
    records = _Records(data, views, what, unused)
    if cache_dir is False:
        return _tokenized(records, tokenizer, config)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepjepa"
    file = Path(expanded(cache_dir or folder)) / f"prepared-{cache_key(records, tokenizer, config)}.arrow"
    if (cached := _read_cache(file, records)) is not None:
        say(f"cache: {what} as prepared before, from {file} (`no_cache` prepares it again)")
        return cached
    if is_main_process():
        try:
            prepared = _tokenized(records, tokenizer, config, file)
            _complete_cache(file, prepared)
            return prepared
        except OSError as error:
            say(f"cache: nothing stored ({error}); `cache_dir` names another folder, `no_cache` does without")
    return _tokenized(records, tokenizer, config)


class _Records(Iterable[Record]):
    """The records to prepare, which can be read any number of times.

    Attributes:
        what: their name on the progress bar and in messages.
        latest: the summary of the records as they were read the last time.
    """

    def __init__(self, data: Data, views: Views | None, what: str, unused: UnusedParts | None) -> None:
        if not isinstance(data, str | os.PathLike):
            check_is_collection(data, what)
        self._rows, self.what, self.latest, self._unused = _rereadable(data), what, Summariser(), unused
        if views is not None:
            self._rows = Spooled(replace(record, views=tuple(views(record))) for record in as_records(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        self.latest = Summariser()
        records = as_records(self._rows)
        return self.latest.reading(records if self._unused is None else self._unused.reading(records))


def _tokenized(
    records: _Records, tokenizer: PreTrainedTokenizerBase, config: JepaConfig, file: Path | None = None
) -> Prepared:
    """Tokenise all records into a file, or into memory without one; ``UserError`` if none of them can be trained on."""
    record_tokenizer, tokens, waiting = RecordTokenizer(tokenizer, config), Counter(all=0, main=0), iter(records)
    record_tokenizer.check_variables()
    opened: Any = nullcontext(pa.BufferOutputStream()) if file is None else atomic_write(file, "wb")
    with _without_garbage_collection(), opened as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for _ in tqdm(range(0, len(records), BLOCK), f"prepare {records.what}", disable=None):
            try:
                block = record_tokenizer.tokenize(islice(waiting, BLOCK))
            except RecordTooLongError as error:
                raise _among_others(error, records, tokenizer, config) from None
            tokens.update(count_tokens(block, config))
            columns = [[record.length for record in block], list(map(flattened, block))]
            writer.write_table(pa.table(columns, schema=SCHEMA))
        # Inside the block, so that no file of unusable records is stored.
        check_usable(record_tokenizer, records.latest.source if len(records) else records.what)
    return Prepared(
        TokenizedDataset(sink.getvalue() if file is None else str(file)),
        counts={name: record_tokenizer.counts[name] for name in COUNTS},
        tokens=dict(tokens),
        template=record_tokenizer.describe(),
        source=records.latest.source,
        summary=records.latest.summary,
    )


def _among_others(
    error: RecordTooLongError, records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig
) -> UserError:
    """Add to an error the number of records that are too long and the longest one, of at most the first ``SURVEYED``.

    So one run says which ``max_length`` is needed, not one run for each of those records.
    """
    survey = RecordTokenizer(tokenizer, replace(config, over_length="skip", require_pairs=False))
    try:
        read = len(survey.tokenize_each(islice(records, SURVEYED)))
    except UserError:
        return error
    return error.among(read, survey.counts["over length"], survey.longest)


def check_usable(record_tokenizer: RecordTokenizer, path: str) -> None:
    """Raise ``UserError`` if no record is left, or no record has a pair in a mode with views.

    Args:
        record_tokenizer: has tokenised all records.
        path: the name of their file.
    """
    counts, config = record_tokenizer.counts, record_tokenizer.config
    if not counts["records"] and not counts["skipped"]:
        raise UserError("holds no records; add at least one", path=path)
    if not counts["records"]:
        fault = f"none of the {counts['skipped']} records can be trained on; check `max_length`"
        raise UserError(fault, path=path)
    if config.uses_views and not counts["pairs"]:
        remedy = record_tokenizer.step_remedy if config.mode == "step-jepa" else "check them and `max_length`"
        reasons = record_tokenizer.reasons_without_pair
        raise UserError(
            f"none of the {counts['records']} records has a pair ({reasons}); {remedy}, or use `regular`",
            path=path,
        )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the search for cyclic garbage: tokenising makes none, and the search would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read_cache(file: Path, records: _Records) -> Prepared | None:
    """Return the records that a cached table holds; None if there is none, or if it is incomplete or damaged."""
    try:
        about = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        if about.pop("sha256") != _checksum(file, about):
            return None
        read = records.latest
        return Prepared(TokenizedDataset(str(file)), **about, source=read.source, summary=read.summary)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _complete_cache(file: Path, prepared: Prepared) -> None:
    """Write the description of a cached table, with a checksum of both: without it the table counts as incomplete."""
    about = {"counts": prepared.counts, "tokens": prepared.tokens, "template": prepared.template}
    write_json(file.with_suffix(".json"), {**about, "sha256": _checksum(file, about)})


def _rereadable(data: Data) -> datasets.Dataset | Spooled[Record]:
    """Return data that can be read several times and is not held in memory: a ``Dataset``, or a temporary file."""
    return data if isinstance(data, datasets.Dataset | Spooled) else Spooled(each_record_of_data(data))


def _checksum(file: Path, about: JsonObject) -> str:
    """Return the SHA-256 of a cached table and its description."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()


def _settings(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return every setting of a tokenizer: name and SHA-256 of each file that it is saved as."""
    with temporary_folder() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def cache_key(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig) -> str:
    """Return the key in the cache: a hash of code, versions, tokenizer, settings and record contents (paths excluded).

    Args:
        records: the records to be tokenised.
        tokenizer: with its chat template.
        config: of the run; fields that affect no tokens don't count.
    """
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    folders = (sorted((package / name).glob("*.py")) for name in ("batch", "views", "data", "chat", "config"))
    for code in chain(*folders):
        digest.update(code.name.encode() + b"\0" + code.read_bytes())
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        [(name, version(name)) for name in ("tokenizers", "transformers", "jinja2", "numpy")],
        None if backend is None else (backend.to_str(), backend.encode_special_tokens),
        type(tokenizer).__name__,
        _settings(tokenizer),
        # These attributes can be set on an object without being saved.
        getattr(tokenizer, "split_special_tokens", None),
        sorted((name, repr(value)) for name, value in tokenizer.special_tokens_map.items()),
        tokenizer.chat_template,
        sorted(affecting(config, "sequences").items()),
    ]
    layout = LAYOUTS[str(config.layout)]
    digest.update(repr([*parts, layout.views_in_text]).encode())
    for record in records:
        # The code of a user's own layout is not hashed, so its result is.
        partners = layout.partners(record.messages)
        digest.update(repr((record.chat, record.views, record.line, partners)).encode())
    return digest.hexdigest()[:32]
