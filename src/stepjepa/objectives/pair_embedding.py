"""Embed both views of the pairs of records, at one place or at several in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.data.record import Record
from stepjepa.objectives.reading import ViewReader
from stepjepa.objectives.view_embeddings import ReadoutPlace, ViewEmbeddings


@dataclass(frozen=True)
class PairEmbedder:
    """Embeds both views of all pairs of records; made by :meth:`Jepa.pair_embedder`."""

    tokenizer: RecordTokenizer
    reader: ViewReader

    def __repr__(self) -> str:
        return f"PairEmbedder(layer {self.reader.place.layer}, pooling {self.reader.place.pooling})"

    def __call__(self, records: Sequence[Record]) -> ViewEmbeddings:
        """Embed the pairs where the settings read embeddings; see :meth:`at`."""
        return self.at(records, [self.reader.place])[self.reader.place]

    def at(self, records: Sequence[Record], places: Sequence[ReadoutPlace]) -> dict[ReadoutPlace, ViewEmbeddings]:
        """Embed the pairs at several places in one pass.

        Args:
            records: those without a pair, or longer than ``max_length``, give no row.
            places: at least one; the settings must have ``pooling='mean'`` if one of them has.

        Raises:
            ValueError: a place has pooling ``mean``, and the settings have not.
            UserError: no record has a pair, or an embedding is not finite.
        """
        pooling = self.reader.place.pooling
        if pooling != "mean" and any(place.pooling != pooling for place in places):
            raise ValueError(f"places: expected pooling '{pooling}', which is that of the settings, got 'mean'")
        self.tokenizer.count_anew()
        embedded = self.reader.pairs_at(records, self.tokenizer.tokenize_each(records), places)
        without_pair = self.tokenizer.without_pair
        return {place: replace(pairs, without_pair=without_pair) for place, pairs in embedded.items()}
