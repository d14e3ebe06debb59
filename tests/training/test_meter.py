"""A line of logs over several steps: each mean is over the steps, and the records, that it has a value of."""

from __future__ import annotations

import pytest
import torch

from stepjepa.batch.micro_batch import Batch
from stepjepa.objectives.alignment import Alignment
from stepjepa.objectives.objective import Losses, Objective
from stepjepa.objectives.text import LMLoss
from stepjepa.training.meter import Meter

NO_PAIRS = torch.empty(0, 2)


def test_steps_without_views_are_in_no_mean_of_pairs_by_hand() -> None:
    """Five steps of which two have views; of their seven records each, three and two have no pair."""
    meter = Meter(Objective([LMLoss(), Alignment()]), list, 1)
    batch = Batch(num_tokens=11, num_records=7, num_without_pair=7)
    for views, without, lm_loss, jepa_loss in (
        (1, 3, 2.0, 0.5),
        (0, 7, 3.0, 0.0),
        (1, 2, 2.0, 0.2),
        *[(0, 7, 4.0, 0.0)] * 2,
    ):
        counts = {"lm_loss": 13.0, "jepa_loss": 5.0 * views}
        parts = {"lm_loss": torch.tensor(lm_loss), "jepa_loss": torch.tensor(jepa_loss)}
        meter.begin_step(counts)
        losses = Losses(torch.tensor(0.0), parts, parts, NO_PAIRS, NO_PAIRS)
        meter.add(Batch(batch | {"num_without_pair": without}), losses, counts)
    line = meter.line({}, 0.0)
    assert line["lm_loss"] == pytest.approx(15 / 5)
    assert line["jepa_loss"] == pytest.approx(0.7 / 2)
    assert line["without_pair_share"] == pytest.approx(5 / 14)
    assert line["num_tokens"] == 55
