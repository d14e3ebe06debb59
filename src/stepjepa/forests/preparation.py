"""A data file to forests, with progress and with counts of what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.errors import UserError
from stepjepa.forests.forest import Forest
from stepjepa.forests.sampler import ForestDataset
from stepjepa.forests.segments import ForestBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BLOCK = 256


@dataclass(frozen=True)
class Prepared:
    """Records ready for training.

    Attributes:
        dataset: the forests.
        counts: records, pairs, records without a pair, truncated, over length, pairs cut by truncation, skipped.
        tokens: tokens of all forests, and of the main texts alone: their ratio is the price of the views.
        template: what was derived from the chat template.
    """

    dataset: ForestDataset
    counts: dict[str, int]
    tokens: dict[str, int]
    template: dict[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for people."""
        named = ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count or name == "records")
        return f"{named}; {self.tokens['all']:,} tokens, {self.tokens['all'] / self.tokens['main']:.2f} of regular"


COUNTS = ("records", "pairs", "without a pair", "over length", "truncated", "pairs cut by truncation", "skipped")


def prepare(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, config: JepaConfig, *, what: str = "training data"
) -> Prepared:
    """Build the forests of all records.

    Args:
        records: from ``records.read_records`` or ``as_records``.
        tokenizer: with predictor tokens and a chat template.
        config: see ``JepaConfig``.
        what: names the data on the progress bar and in errors.

    Raises:
        UserError: a record is wrong, none is left, or a mode with views finds no pair at all.
    """
    from tqdm.auto import tqdm

    builder = ForestBuilder(tokenizer, config)
    forests: list[Forest] = []
    with tqdm(total=len(records), desc=f"prepare {what}", unit="rec", disable=not sys.stderr.isatty()) as bar:
        for start in range(0, len(records), BLOCK):
            block = records[start : start + BLOCK]
            forests.extend(builder.build(block))
            bar.update(len(block))
    path = records[0].path if records else what
    if not forests:
        raise UserError(f"none of the {len(records)} records can be trained on; check --max_length", path=path)
    if config.uses_views and not builder.counts["pairs"]:
        remedy = (
            "check --step_separator (blank, line or a string)" if config.mode == "step-jepa" else "check --max_length"
        )
        raise UserError(f"none of the {len(forests)} records has a pair; {remedy}, or use --regular", path=path)
    counts = {name: builder.counts[name] for name in COUNTS}
    tokens = {
        "all": sum(len(forest) for forest in forests),
        "main": sum(len(forest.without_views()) for forest in forests),
    }
    return Prepared(ForestDataset(forests), counts, tokens, builder.template.describe())
