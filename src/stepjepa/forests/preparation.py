"""A data file to forests, with progress and with counts of what was found."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.cache import ForestCache, Found, cache_key
from stepjepa.forests.flat import FlatForestsBuilder
from stepjepa.forests.sampler import ForestDataset
from stepjepa.forests.segments import ForestBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 1024


@dataclass(frozen=True)
class Prepared:
    """Records ready for training.

    Attributes:
        dataset: the forests.
        counts: records, pairs, records without a pair, truncated, over length, pairs cut by truncation, skipped.
        tokens: tokens of all forests, and of the main texts alone: their ratio is the price of the views.
        template: what was derived from the chat template.
        source: what errors call the records' file.
    """

    dataset: ForestDataset
    counts: dict[str, int]
    tokens: dict[str, int]
    template: dict[str, str] = field(default_factory=dict)
    source: str = "<memory>"

    def describe(self) -> str:
        """One line for people."""
        return describe(self.counts, self.tokens)


def describe(counts: Mapping[str, int], tokens: Mapping[str, int]) -> str:
    """One line for people; see ``Prepared``."""
    named = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == "records")
    return f"{named}; {tokens['all']:,} tokens, {tokens['all'] / max(tokens['main'], 1):.2f} of regular"


COUNTS = ("records", "pairs", "without a pair", "over length", "truncated", "pairs cut by truncation", "skipped")


def prepare(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    config: JepaConfig,
    *,
    what: str = "training data",
    cache: ForestCache | None = None,
) -> Prepared:
    """Build the forests of all records, or read them where they were built before.

    Args:
        records: from ``records.read_records`` or ``as_records``.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        what: names the data on the progress bar and in errors.
        cache: where prepared forests are kept; None for nowhere. What ends in an error is never kept.

    Raises:
        UserError: a record is wrong, none is left, or a mode with views finds no pair at all.
    """
    if cache is None or getattr(tokenizer, "backend_tokenizer", None) is None:
        return _as_prepared(_build(records, tokenizer, config, what), records)
    key = cache_key(records, tokenizer, config)
    found = cache.load(key, what)
    if found is None:
        found = _build(records, tokenizer, config, what)
        cache.store(key, found)
    return _as_prepared(found, records)


def _as_prepared(found: Found, records: Sequence[Record]) -> Prepared:
    files = {record.path for record in records}
    # A forest knows its line, and not in which of several files.
    source = files.pop() if len(files) == 1 else "<several files>"
    return Prepared(ForestDataset(found.forests), found.counts, found.tokens, found.template, source)


def _build(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, what: str) -> Found:
    from tqdm.auto import tqdm

    builder, collected = ForestBuilder(tokenizer, config), FlatForestsBuilder()
    bar = tqdm(total=len(records), desc=f"prepare {what}", unit="rec", disable=not sys.stderr.isatty())
    with bar, _collector_paused():
        for start in range(0, len(records), BLOCK):
            block = records[start : start + BLOCK]
            collected.add(builder.build_flat(block))
            bar.update(len(block))
    forests = collected.build()
    path = records[0].path if records else what
    refuse_useless(builder.counts, config, path)
    counts = {name: builder.counts[name] for name in COUNTS}
    tokens = {"all": sum(forests.lengths), "main": sum(forests.text_lengths)}
    return Found(forests, counts, tokens, builder.template.describe())


def refuse_useless(counts: Mapping[str, int], config: JepaConfig, path: object) -> None:
    """What can't be trained on as it is meant.

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


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Leave cyclic garbage for later: none is made here, and looking for it takes a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
