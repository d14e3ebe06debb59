"""How alike are the views of a trained model? Matched against shuffled pairs, on held-out records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from stepjepa.architecture import choose_encoding
from stepjepa.attention import enable_forest
from stepjepa.collate import ForestCollator
from stepjepa.config import JepaConfig
from stepjepa.embeddings import forward
from stepjepa.errors import UserError
from stepjepa.monitors import Window, share
from stepjepa.preparation import prepare
from stepjepa.records import Record
from stepjepa.run_folder import read_run


def similarity_config(run_folder: str | os.PathLike[str], views: str) -> JepaConfig:
    """The configuration under which a model's views are embedded.

    A model trained on the views that are asked for is read where it was trained to be read; any other, ``regular``
    runs among them, at the end of the source view, with no predictor token, which it has never seen.

    Args:
        run_folder: of ``stepjepa train``.
        views: ``llm-jepa`` or ``step-jepa``.

    Raises:
        UserError: no run folder.
    """
    trained: dict[str, Any] = read_run(run_folder)["jepa"]
    shared = {name: trained[name] for name in ("step_separator", "max_length", "labels")}
    shared |= {"over_length": "skip", "mode": views}
    if trained["mode"] == views:
        if trained["layout"] == "inplace":
            # Read as branches: the same views without a row that is cut up between them.
            trained["layout"] = "branched"
        kept = ("layout", "predictors", "pairs", "front_pred", "reverse_pred", "last_token")
        return JepaConfig(**shared, **{name: trained[name] for name in kept})
    return JepaConfig(**shared, predictors=0)


@torch.no_grad()
def measure_similarity(
    model: Any, tokenizer: Any, records: Sequence[Record], config: JepaConfig, *, batch_size: int = 16
) -> dict[str, float]:
    """Embed all pairs of some records.

    Args:
        model: in evaluation mode, not wrapped.
        tokenizer: with the predictor tokens that ``config`` asks for.
        records: held-out ones.
        config: a mode with views.
        batch_size: records per batch; shuffled pairs are those within a batch.

    Returns:
        ``pairs``, ``matched_similarity``, ``shuffled_similarity`` (missing if no batch has two pairs) and what
        ``monitors.Window.geometry`` gives.

    Raises:
        UserError: no record has a pair, or the model can't be run on views.
    """
    try:
        encoding, _ = choose_encoding(model, "auto")
    except ValueError as error:
        raise UserError(str(error)) from None
    if encoding == "forest":
        enable_forest(model)
    forests = [f for f in prepare(records, tokenizer, config, what="test data").dataset.forests if len(f.pairs)]
    window = Window()
    for start in range(0, len(forests), batch_size):
        batch = ForestCollator(0, encoding)(forests[start : start + batch_size])
        outputs = forward(model, {name: value.to(model.device) for name, value in batch.items()})
        window.add_pairs(outputs.source, outputs.target)
    matched, shuffled, pairs, crossings = window.totals(["matched", "shuffled", "pairs", "crossings"])
    return {
        "pairs": pairs,
        **share("matched_similarity", matched, pairs),
        **share("shuffled_similarity", shuffled, crossings),
        **window.geometry(),
    }
