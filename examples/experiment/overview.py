"""All arms with a JEPA objective in one table: each against plain training of as many steps, and of as many FLOPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from run_figures import Figures
from shares import BASELINE, difference, score

from stepjepa.experiments.statistics import spread
from stepjepa.experiments.verdict import SAME_FLOPS

# What the rows are of, the file of figures of a test set, and the score if it is not the headline. The shares of synth
# have a table of their own.
TESTS = (
    ("synth", "synth", None),
    ("synth, preset:small", "synth-small", None),
    ("synth, 12 epochs", "synth-long", None),
    ("synth, pretrained", "synth-finetune", None),
    ("TURK", "turk", None),
    ("problems of two steps", "steps-test", None),
    ("problems of two steps, exact match", "steps-test", "exact"),
    ("problems of two and three steps", "steps-3-test", None),
    ("problems of two and three steps, exact match", "steps-3-test", "exact"),
    ("GSM8K", "gsm8k", None),
)
# The end of the names of arms with `labels: reference`.
REFERENCE = "-reference"
HEADS = (
    *("data", "arm", "seeds", "score", "regular", "at equal steps, points [95 %]"),
    *("at equal FLOPs, points [95 %]", "FLOPs, regular = 1", "shuffled similarity"),
)


def rows(title: str, figures: Sequence[Figures], name: str | None = None) -> list[list[str]]:
    """One row for each arm with views or STP under right labels; a dash where there is nothing to compare with.

    Args:
        title: what they are of.
        figures: runs.
        name: of the score; by default the headline.
    """
    scores: dict[str, dict[str, float]] = {}
    for each in figures:
        scores.setdefault(each.label, {})[each.run.seed] = each.scores[name or str(each.run.protocol["headline"])]
    plain = [label for label in scores if label.startswith(BASELINE) and not label.endswith(REFERENCE)]
    cost = {label: _flops([each for each in figures if each.label == label]) for label in scores}
    lines = []
    for label in sorted(label for label in scores if not label.startswith(BASELINE) and not label.endswith(REFERENCE)):
        near = [other for other in plain if abs(cost[label] / cost[other] - 1) <= SAME_FLOPS]
        # Where plain training was tried at several learning rates: the best of them.
        same = max(near, key=lambda other: spread(list(scores[other].values())).mean, default=None)
        lines.append(
            [
                title,
                label,
                str(len(scores[label])),
                score(scores[label]).partition(" (")[0],
                score(scores[BASELINE]).partition(" (")[0],
                difference(scores[label], scores[BASELINE]),
                difference(scores[label], scores[same]) if same else "–",
                f"{cost[label] / cost[BASELINE]:.2f}",
                _shuffled([each for each in figures if each.label == label]),
            ]
        )
    return lines


def _flops(runs: Sequence[Figures]) -> float:
    return spread([each.run.figures["flops"] or 0.0 for each in runs]).mean


def _shuffled(runs: Sequence[Figures]) -> str:
    """Near 1 where all views are embedded alike."""
    return f"{spread([each.similarity['shuffled_similarity'] for each in runs]).mean:.3f}"


def table(figures: Mapping[str, Sequence[Figures]]) -> list[list[str]]:
    """Heads and rows of all tests that have been run.

    Args:
        figures: runs by name of the file.
    """
    return [
        list(HEADS),
        *(row for title, file, name in TESTS if file in figures for row in rows(title, figures[file], name)),
    ]
