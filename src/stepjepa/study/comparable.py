"""Check that runs are comparable: the same data, test set, generation, scoring and starting point."""

from collections.abc import Sequence

from stepjepa.base.differing_values import describe_difference
from stepjepa.base.errors import UserError
from stepjepa.study.evaluated_run import EvaluatedRun

DATA = ("training data (sha256)", "eval_split", "split_by", "split_seed", "bytes")
"""Parts of the protocol that identify the files of the training data."""

_TEXT_SETTINGS = ("model", "pretrain", "plain", "labels", "max_length", "over_length")
"""Settings that affect the tokens of a record's main text."""


def check_comparable(runs: Sequence[EvaluatedRun], only: Sequence[str] = ()) -> None:
    """Raise ``UserError`` if runs differ in training data, test set, generation or scoring.

    Two runs of the same seed must have equal tokens of the main texts and equal base weights, if both record them. If
    the tokens are equal, the data files may differ.

    Args:
        runs: the runs.
        only: compare just these keys of the protocol and the examples, and ignore runs that do not record them (e.g.
            external predictions); empty for all keys.
    """
    first = runs[0]
    recorded = {key: value for run in reversed(runs) for key, value in run.protocol.items() if value is not None}
    for run in runs[1:]:
        same_texts = (
            not only and run.fingerprints.texts is not None and run.fingerprints.texts == first.fingerprints.texts
        )
        differences = [
            describe_difference(key.replace("_", " "), own, expected, "{name} is {own} instead of {other}")
            for key in only or first.protocol | run.protocol
            if (own := run.protocol.get(key)) != (expected := (recorded if only else first.protocol).get(key))
            if not (only and own is None) and not (same_texts and key in DATA)
        ]
        if not differences and run.indices != first.indices:
            differences = ["it was evaluated on other examples"]
        if differences:
            raise _incomparable(run, first, differences[0])
    if not only:
        _check_same_start(runs)


def _check_same_start(runs: Sequence[EvaluatedRun]) -> None:
    """Raise ``UserError`` if runs of the same seed started from different training texts or base weights."""
    for number, run in enumerate(runs):
        for other in runs[:number]:
            if other.seed != run.seed:
                continue
            if _differ(run.fingerprints.texts, other.fingerprints.texts) and _alike(run, other, _TEXT_SETTINGS):
                raise _incomparable(run, other, "its training texts differ, by columns, template, records or order")
            if _differ(run.fingerprints.weights, other.fingerprints.weights) and _alike(run, other, _WEIGHT_SETTINGS):
                raise _incomparable(run, other, "its base weights differ")


_WEIGHT_SETTINGS = ("model", "pretrain", "quantized")
"""Settings that affect the base weights."""


def _differ(first: str | None, second: str | None) -> bool:
    """Return whether two fingerprints are both recorded, and differ."""
    return None not in (first, second) and first != second


def _alike(run: EvaluatedRun, other: EvaluatedRun, settings: Sequence[str]) -> bool:
    """Return whether two runs should have equal texts or weights: these settings and the loading are equal."""
    loaded = all(run.loaded.get(name) == other.loaded.get(name) for name in ("dtype", "chat_template"))
    return loaded and all(run.settings.get(name) == other.settings.get(name) for name in settings)


def _incomparable(run: EvaluatedRun, other: EvaluatedRun, difference: str) -> UserError:
    fault = f"can't be compared with {other.folder}: {difference}"
    return UserError(f"{fault}; train and evaluate all runs in the same way, or leave this one out", path=run.folder)
