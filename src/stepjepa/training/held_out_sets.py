"""Held-out records, in one set or in several with names."""

from collections.abc import Mapping

from stepjepa.batch.dataset import Prepared
from stepjepa.data.record import Data
from stepjepa.store.metric_names import UNNAMED

EvalData = Data | Prepared | Mapping[str, Data | Prepared]
"""Held-out records, or several sets of them by name, as transformers' ``Trainer`` takes them."""


def named_sets(data: EvalData | None) -> dict[str, Data | Prepared]:
    """Return the sets of held-out records by name."""
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) else {UNNAMED: data}
