"""The names of metrics of held-out records: columns of ``metrics.jsonl``, of one set or of several with names."""

from collections.abc import Collection

HELD_OUT = "eval_"
"""Beginning of the names of metrics of held-out records."""

UNNAMED = ""
"""The name of the only set of held-out records; several have the names under which they were passed."""


def named_metric(name: str, metric: str) -> str:
    """Return the name of a metric of a set of held-out records: ``loss`` of the set ``a`` is ``a_loss``."""
    return metric if name == UNNAMED else f"{name}_{metric}"


def set_and_metric(column: str, trained: Collection[str]) -> tuple[str, str]:
    """Split the name of a column of held-out records, such as ``eval_easy_lm_loss``, into ``easy`` and ``lm_loss``.

    Args:
        column: begins with :data:`HELD_OUT`.
        trained: the columns of training, which have the names of metrics. The longest that fits is taken, so that
            ``loss`` is no metric of a set ``easy_lm``.

    Returns:
        The name of the set and the metric; :data:`UNNAMED` and the whole name if no metric fits.
    """
    name = column.removeprefix(HELD_OUT)
    if name in trained:
        return UNNAMED, name
    metric = max((metric for metric in trained if name.endswith(f"_{metric}")), key=len, default=None)
    return (UNNAMED, name) if metric is None else (name.removesuffix(f"_{metric}"), metric)
