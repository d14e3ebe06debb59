"""Embed both views of the pairs of records, at one place or at several in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stepjepa.base.json_object import JsonObject
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.data.record import Record
from stepjepa.data.records import as_records
from stepjepa.models.architecture import number_of_layers
from stepjepa.models.encode import check_layer
from stepjepa.objectives.reading import ViewReader, without_predictors
from stepjepa.objectives.view_embeddings import ALL_LAYERS, ReadoutPlace, ViewEmbeddings


@dataclass(frozen=True)
class PairEmbedder:
    """Embeds both views of all pairs of records; made by :meth:`Jepa.pair_embedder`.

    Attributes:
        tokenizer: of records.
        reader: runs the model, and says where embeddings are read.
    """

    tokenizer: RecordTokenizer
    reader: ViewReader

    def __repr__(self) -> str:
        return f"PairEmbedder(layer {self.place.layer}, pooling {self.place.pooling})"

    @property
    def place(self) -> ReadoutPlace:
        """Where the settings read embeddings."""
        return self.reader.place

    def __call__(self, records: Iterable[Record | JsonObject]) -> ViewEmbeddings:
        """Embed the pairs where the settings read embeddings; arguments and errors as for :meth:`at`."""
        return self.at(records, [self.place])[self.place]

    def at(
        self, records: Iterable[Record | JsonObject], places: Sequence[ReadoutPlace]
    ) -> dict[ReadoutPlace, ViewEmbeddings]:
        """Embed the pairs at several places in one pass.

        Args:
            records: records, or dicts with ``messages``; those without a pair, or longer than ``max_length``, give no
                row.
            places: at least one ``(layer, pooling)``, or ``(layer, pooling, False)`` for views without predictor
                tokens. The layer ``all`` joins those of all layers. The settings must have ``pooling='mean'`` if one of
                the former has.

        Returns:
            The embeddings, by place.

        Raises:
            ValueError: there is no place, or one with a layer or pooling that there is not; or one has pooling
                ``mean``, and the settings have not.
            UserError: a record is wrong, no record has a pair, or an embedding is not finite.
        """
        checked, pooling = [*as_records(records)], self.place.pooling
        places = [ReadoutPlace(*place) for place in places]
        if not places:
            raise ValueError("places: expected at least one (layer, pooling), got none")
        for place in places:
            if place.layer != ALL_LAYERS:
                check_layer(number_of_layers(self.reader.model), place.layer, "layer")
            if place.pooling not in ("last", "mean"):
                raise ValueError(f"pooling: expected 'last' or 'mean', got {place.pooling!r}")
        as_set = [place for place in places if place.predictors]
        if pooling != "mean" and any(place.pooling != pooling for place in as_set):
            raise ValueError(f"places: expected pooling '{pooling}', which is that of the settings, got 'mean'")
        embedded = self._at(checked, as_set) if as_set else {}
        if texts_alone := [place for place in places if not place.predictors]:
            embedded |= self._without_predictors()._at(checked, texts_alone)
        return {place: embedded[place] for place in places}

    def _at(self, records: Sequence[Record], places: Sequence[ReadoutPlace]) -> dict[ReadoutPlace, ViewEmbeddings]:
        """Embed the pairs at places that have the same views."""
        self.tokenizer.count_anew()
        embedded = self.reader.pairs_at(records, self.tokenizer.tokenize_each(records), places)
        without_pair = self.tokenizer.without_pair
        return {place: replace(pairs, without_pair=without_pair) for place, pairs in embedded.items()}

    def _without_predictors(self) -> PairEmbedder:
        """Return the embedder of the same views without predictor tokens, at every layer and with both poolings."""
        # A mean reads all tokens of a view, its last one among them.
        config = without_predictors(self.reader.config, "mean")
        tokenizer = RecordTokenizer(self.tokenizer.tokenizer, config)
        return PairEmbedder(tokenizer, replace(self.reader, config=config, predictors=()))
