"""Fit a linear map or projection heads for a model, to embed and to search behind them."""

from __future__ import annotations

from collections.abc import Iterable

from stepjepa.base.arguments import kind_of
from stepjepa.base.json_object import JsonObject
from stepjepa.config.batch_sizes import EMBEDDED
from stepjepa.config.jepa import Pooling
from stepjepa.data.record import Record
from stepjepa.data.records import as_records
from stepjepa.evaluation.map_fitting import DrawnPairs, draw_pairs, fit_map, places_to_try, train_heads
from stepjepa.models.architecture import number_of_layers
from stepjepa.models.encode import check_layer
from stepjepa.objectives.fitted import FittedHeads, FittedMap
from stepjepa.objectives.jepa import Jepa
from stepjepa.store.prompts import with_system_prompt


def fit_linear_map(
    jepa: Jepa,
    records: Iterable[Record | JsonObject],
    *,
    layer: int | None = None,
    pooling: Pooling | None = None,
    max_length: int | None = None,
    batch_size: int = EMBEDDED,
) -> FittedMap:
    """Fit a linear map of embeddings on pairs of records, by which partners are near; the model itself is not trained.

    ``jepa.embed(texts, linear_map=fitted)`` and ``jepa.index(answers, linear_map=fitted)`` embed behind the map.
    Every layer is tried with both poolings, unless a readout is named: of texts without predictor tokens, and of a
    model with a JEPA objective also where its training reads.

    Args:
        jepa: any model, also one that was never trained here; its ``system_prompt``, if any, replaces that of records.
        records: pairs that belong together, at least 20; those without a pair, or longer than ``max_length``, are left
            out. A tenth of them, at most 1,000, drawn at random, chooses readout, penalty and fit: ridge regression or
            canonical correlations.
        layer: index of ``hidden_states`` to read, instead of trying all.
        pooling: ``last`` or ``mean``, instead of trying both; without a layer at that of training.
        max_length: most tokens of a record, instead of those of training.
        batch_size: sequences at a time.

    Raises:
        TypeError: ``jepa`` is no ``Jepa``, or ``layer`` no whole number.
        ValueError: the model has no such layer.
        UserError: a record is wrong, or too few have a pair.

    Example:
        >>> fitted = stepjepa.fit_linear_map(jepa, stepjepa.read_records("train.jsonl"))
        >>> jepa.index(answers, linear_map=fitted).search(["a question"], k=5)
    """
    return fit_map(
        _drawn(jepa, records, layer, pooling, all_layers=False, max_length=max_length, batch_size=batch_size)
    )


def fit_projection_heads(
    jepa: Jepa,
    records: Iterable[Record | JsonObject],
    *,
    layer: int | None = None,
    pooling: Pooling | None = None,
    all_layers: bool = True,
    max_length: int | None = None,
    batch_size: int = EMBEDDED,
) -> FittedHeads:
    """Train projection heads on pairs of records: two small networks, behind which partners are near.

    They may find what no linear map does, an answer that has to be computed. ``jepa.embed(texts,
    projection_heads=fitted)`` and ``jepa.index(answers, projection_heads=fitted)`` embed behind them; the model itself
    is not trained. Arguments and errors are those of :func:`fit_linear_map`.

    Args:
        jepa: see :func:`fit_linear_map`.
        records: the tenth that chooses layer, pooling and epochs is not trained on.
        layer: see :func:`fit_linear_map`. Trying all takes minutes where they are many.
        pooling: see :func:`fit_linear_map`.
        all_layers: if neither is named, try the means of all layers at once, too.
        max_length: see :func:`fit_linear_map`.
        batch_size: sequences at a time through the model.

    Example:
        >>> fitted = stepjepa.fit_projection_heads(jepa, stepjepa.read_records("train.jsonl"))
        >>> jepa.index(answers, projection_heads=fitted).search(["a question"], k=5)
    """
    return train_heads(
        _drawn(jepa, records, layer, pooling, all_layers=all_layers, max_length=max_length, batch_size=batch_size)
    )


def _drawn(
    jepa: Jepa,
    records: Iterable[Record | JsonObject],
    layer: int | None,
    pooling: Pooling | None,
    *,
    all_layers: bool,
    max_length: int | None,
    batch_size: int,
) -> DrawnPairs:
    """Draw pairs of records, read where ``fit_linear_map`` says."""
    if not hasattr(jepa, "pair_embedder"):
        raise TypeError(f"jepa: expected Jepa.from_pretrained(path) or Jepa(...), got {kind_of(jepa)}")
    known = [*as_records(records)]
    if jepa.system_prompt is not None and not jepa.config.plain:
        known = with_system_prompt(known, jepa.system_prompt)
    named = layer is not None or pooling is not None
    readout = pooling if named or jepa.has_objective else "mean"
    embedder = jepa.pair_embedder(batch_size, layer=layer, pooling=readout, max_length=max_length)
    layers = number_of_layers(jepa.model)
    check_layer(layers, -1 if layer is None else layer, "layer")
    places = places_to_try(
        embedder.place, None if named else layers, has_objective=jepa.has_objective, all_layers=all_layers
    )
    return draw_pairs(embedder, known, places, file=known[0].path if known else None)
