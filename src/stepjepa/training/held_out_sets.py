"""The names of sets of held-out records, and of their metrics."""

from collections.abc import Mapping

from stepjepa.batch.dataset import Prepared
from stepjepa.data.records import Data

UNNAMED = ""
"""The name of the only set of held-out records; several have the names under which they were passed."""

EvalData = Data | Prepared | Mapping[str, Data | Prepared]
"""Held-out records, or several sets of them by name, as transformers' ``Trainer`` takes them."""


def named_sets(data: EvalData | None) -> dict[str, Data | Prepared]:
    """Return the sets of held-out records by name."""
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) else {UNNAMED: data}


def named_metric(name: str, metric: str) -> str:
    """Return the name of a metric of a set of held-out records: ``loss`` of the set ``a`` is ``a_loss``."""
    return metric if name == UNNAMED else f"{name}_{metric}"
