"""Checks of the names of metrics: those of sets of held-out records, and the one that chooses the best checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from transformers.trainer_utils import IntervalStrategy

from stepjepa.base.errors import shown
from stepjepa.base.similar_names import did_you_mean
from stepjepa.store.metric_names import UNNAMED, named_metric

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Metrics that Trainer adds to every evaluation.
_ADDED = ("epoch", "runtime", "samples_per_second")
LESS_IS_BETTER = frozenset({"shuffled_similarity"})
"""Metrics beside losses of which the least is best: Trainer takes the greatest of all whose name ends otherwise."""

# Prefix of metrics -> the setting of a run that measures them.
_SCORED_BY = {"answer": "`eval_generate N`", "retrieval": "`eval_retrieval`"}


def check_set_names(names: Iterable[str], measured: Collection[str]) -> None:
    """Raise a ``ValueError`` for the name of a set that is not printable, or that gives a metric another one's name.

    Args:
        names: of the sets.
        measured: names of the metrics of a set, ``Objective.metrics``.
    """
    for name in names:
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError(f"eval_dataset: expected texts as the names of data sets, got {name!r}")
        clash = [metric for metric in measured if named_metric(name, metric) in measured]
        if name in _SCORED_BY or (name != UNNAMED and clash):
            other = f"eval_{name}_{clash[0] if clash else 'NAME'}"
            raise ValueError(f"eval_dataset: {shown(name)} gives {other}, which is another metric; name it otherwise")


def check_best_metric(
    args: TrainingArguments,
    measured: Collection[str],
    scores: Mapping[str, object | None],
    sets: Collection[str] = (UNNAMED,),
) -> None:
    """Raise a ``ValueError`` for a ``metric_for_best_model`` that no evaluation measures.

    Trainer would notice that at the first evaluation, and end the run.

    Args:
        args: the Trainer's arguments.
        measured: names of the metrics of a set of held-out records, ``Objective.metrics``.
        scores: prefix of metrics -> the object that measures them, None for none. It measures those of its attribute
            ``names``; without one, any metric of the prefix is accepted.
        sets: names of the sets of held-out records.
    """
    name = str(args.metric_for_best_model or "").removeprefix("eval_")
    if not name or args.eval_strategy == IntervalStrategy.NO:
        return
    metrics = [*measured, *_ADDED]
    names = [named_metric(of_set, metric) for of_set in sets or (UNNAMED,) for metric in metrics]
    for prefix, measuring in scores.items():
        if measuring is not None and name.startswith(f"{prefix}_") and name not in names:
            # Read only where it is needed: a task scores an answer to name its scores.
            names += [f"{prefix}_{score}" for score in getattr(measuring, "names", (name.removeprefix(f"{prefix}_"),))]
    if name not in names:
        remedy = did_you_mean(name, names) or f"; expected one of {', '.join(names)}"
        for prefix, setting in _SCORED_BY.items():
            if scores.get(prefix) is None and name.startswith(f"{prefix}_"):
                remedy = f"; add {setting}, or name one of {', '.join(names)}"
        raise ValueError(f"metric_for_best_model: no evaluation of this run measures {shown(name)}{remedy}")
