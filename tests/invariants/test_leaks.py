"""Invariant 3: what must not be seen changes nothing when it is changed; what must be seen changes something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from slow_trees import batch_of, random_sequences, row_mask
from stepjepa.batch.pack import Rows, pack
from stepjepa.config.jepa import JepaConfig
from stepjepa.models.attention import enable_trees
from stepjepa.views.sequences import SampledRecord, TokenSequence

ModelFactory = Callable[..., Any]

MODELS = [("llama", "sdpa"), ("llama", "eager"), ("gemma2_window", "eager"), ("qwen2_window", "sdpa"), ("gpt2", "sdpa")]
each_model = pytest.mark.parametrize(("architecture", "attention"), MODELS)

# Sums over more keys may round differently where masked ones change; nothing larger than that may be seen.
SILENT = 1e-6
HEARD = 1e-4


class Subject:
    """Some sequences in one row under a model, asked what changes when some of its tokens do."""

    def __init__(self, model: Any, sequences: list[TokenSequence], *, row_length: int = 10**4) -> None:
        enable_trees(model)
        self.model, self.sequences = model, sequences
        self.rows: Rows = pack(sequences, row_length=row_length)
        self.before = self._run(self.rows.ids)

    def _run(self, ids: Any) -> Tensor:
        with torch.no_grad():
            return tiny.hidden_states(self.model, batch_of(replace(self.rows, ids=ids)))

    def change(self, places: Iterable[int]) -> Tensor:
        """``[R * T]``: how much each place's hidden state moves when the ids at these places change."""
        ids = self.rows.ids.copy()
        chosen = np.asarray(list(places))
        ids.flat[chosen] = (ids.flat[chosen] + 7) % tiny.VOCABULARY
        return (self._run(ids) - self.before).abs().amax(-1)


def subject(factory: ModelFactory, architecture: str, attention: str, tokenizer: Any, **options: Any) -> Subject:
    """The first record under a configuration; main sequence first."""
    config = JepaConfig(**options)
    record = tiny.tokenized(tokenizer, config)[0]
    sequences = tiny.collator(tokenizer, config).sequences(SampledRecord(record))
    return Subject(factory(architecture, attention), sequences)


LAYOUTS = {
    "step branched": {"mode": "step-jepa", "predictors": 2, "pairs": "all"},
    "llm separate": {"mode": "llm-jepa", "layout": "separate", "predictors": 2},
    "llm branched": {"mode": "llm-jepa", "layout": "branched", "predictors": 2},
}


@each_model
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequence_sees_itself_and_nothing_else(
    name: str, architecture: str, attention: str, tiny_model: ModelFactory, trained_tokenizer: Any
) -> None:
    """Neither what other sequences of the row have for themselves, nor what comes later in its own."""
    tested = subject(tiny_model, architecture, attention, trained_tokenizer, **LAYOUTS[name])
    every = set(range(len(tested.before)))
    for number, path in enumerate(tested.rows.paths):
        others = tested.change(every - set(path.tolist()))
        assert others[path].max() <= SILENT, f"sequence {number} sees another one"
        middle = len(path) // 2
        later = tested.change(path[middle:])[path]
        assert later[:middle].max() <= SILENT, f"sequence {number} sees what comes later"
        assert later[middle:].min() > HEARD, f"sequence {number} does not see itself"


@pytest.mark.parametrize("row_length", [13, 10**4])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_token_by_token(seed: int, isolated: bool, row_length: int, tiny_model: ModelFactory) -> None:
    """One layer, so that influence is visibility: a token moves exactly those that see it by the sequences."""
    tested = Subject(
        tiny_model("llama", num_hidden_layers=1), random_sequences(seed, isolated=isolated), row_length=row_length
    )
    mask = row_mask(tested.sequences, tested.rows)
    length = mask.shape[1]
    for place in {int(place) for path in tested.rows.paths for place in path}:
        moved = tested.change([place])
        row, column = divmod(place, length)
        sees = torch.zeros(mask.shape[:2], dtype=torch.bool)
        sees[row] = mask[row, :, column]
        assert moved[~sees.flatten()].max() <= SILENT if not sees.all() else True
        assert moved[sees.flatten()].min() > SILENT
