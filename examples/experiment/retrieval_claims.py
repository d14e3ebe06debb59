"""What the data sets of retrieval show together, in words and as the table of README."""

from __future__ import annotations

from collections.abc import Sequence

from cells import NOTHING, listed, table
from retrieval_models import UNTRAINED, WAYS
from retrieval_results import (
    EQUAL,
    FEWER,
    HITS,
    MORE,
    Retrieval,
    difference,
    of_model,
    outcome,
    plain_of,
)
from retrieval_sets import JOINT

LESS = {FEWER: "InfoNCE finds fewer", EQUAL: "no difference is shown"}
"""What is written where InfoNCE beside the LM loss is not shown to find more."""


def claim(sets: Sequence[Retrieval]) -> str:
    """Write what InfoNCE beside the LM loss is seen to give in retrieval, over plain training and its maps.

    First where the intervals show a gain, then what they show elsewhere; a single seed shows nothing.
    """
    places: dict[str, list[str]] = {}
    for each in sets:
        shown = each.shows()
        for result in dict.fromkeys(shown.values()):
            layouts = [f"`{layout}`" for layout in shown if shown[layout] == result]
            alike = len(layouts) == len(JOINT)
            places.setdefault(result, []).append(each.name if alike else f"{each.name} ({', '.join(layouts)})")
    if MORE in places:
        text = f"**Better embeddings are shown for InfoNCE beside the LM loss on {listed(places[MORE])}.** The nearest "
        text += "text is the right one more often than with plain training, even behind a map."
    else:
        text = "**No gain in embeddings is shown for InfoNCE beside the LM loss.** The nearest text is not shown to be "
        text += "the right one more often than behind a map of a model without it."
    less = [words for result, words in LESS.items() if result in places]
    return f"{text} {'Elsewhere' if MORE in places else 'Instead'} {', or '.join(less)}." if less else text


def with_gain(sets: Sequence[Retrieval]) -> list[str]:
    """Return the data sets on which README's InfoNCE is shown to find more than any map of a model without it."""
    tests = {each.name: difference(each.rows, (each.best_arm, "trained"), each.plain(each.best_arm)) for each in sets}
    return [name for name, test in tests.items() if test is not None and outcome(test) == MORE]


def gain(sets: Sequence[Retrieval]) -> str:
    """Write on which data sets InfoNCE beside the LM loss is shown to find more than any map of a model without it."""
    shown = with_gain(sets)
    if not shown:
        return "On no data set below is InfoNCE shown to find more than a map behind a model without it."
    alone = " alone" if len(shown) < len(sets) else ""
    return f"InfoNCE is shown to find more than a map behind a model without it on {listed(shown)}{alone}."


WITH_MORE = {MORE: "more on {}", FEWER: "fewer on {}", EQUAL: "no difference is shown on {}"}


def of_long_training(sets: Sequence[Retrieval]) -> str:
    """Write what InfoNCE is seen to find and to answer where it has 16 epochs of 128 pairs a step.

    Hits are compared with those of the best map without it, right answers with plain training for the same FLOPs.
    """
    long = [each for each in sets if each.long and not each.one_seed]
    hits, right = (_by_outcome(long, column) for column in (HITS, "right"))
    return f"hits over that map: {hits}; right answers over plain training: {right}"


def _by_outcome(sets: Sequence[Retrieval], column: str) -> str:
    names: dict[str, list[str]] = {}
    for each in sets:
        for result in each.shows(column).values():
            names.setdefault(result, []).append(each.name.partition(",")[0])
    return ", ".join(WITH_MORE[result].format(listed(of)) for result, of in names.items())


SUMMARY_HEADS = (
    "",
    "plain training, as it is",
    "the best map without InfoNCE",
    "**InfoNCE beside the LM loss**, as it is",
    "over that map, points",
    "right answers, over plain training, points",
)


def summary(data_sets: Sequence[Retrieval]) -> str:
    """Write for README the hits of plain training, of the best map without InfoNCE and of it, and its price in answers.

    A data set is a row; long training is first. Those with one seed, of which nothing is claimed, are left to the
    other pages unless all are of that kind; so are those that are not meant for README.
    """
    data_sets = [each for each in data_sets if each.in_readme and not each.one_seed] or data_sets
    data_sets = sorted(data_sets, key=lambda each: not each.long)
    return table(SUMMARY_HEADS, [_summary_row(each) for each in data_sets])


def _summary_row(data_set: Retrieval) -> list[str]:
    rows, arm = data_set.rows, data_set.best_arm
    baseline, method = data_set.plain(arm)
    plain = of_model(rows, plain_of(rows, arm), "best readout")
    whose = "before training" if baseline == UNTRAINED else "plain training"
    whose += f", {WAYS[method]}" if method.endswith("heads") else ""
    seeds = f"{len(of_model(rows, arm, 'trained'))} seeds{': no claim' if data_set.one_seed else ''}"
    return [
        f"{data_set.name}, {seeds}",
        f"{plain[HITS].mean():.1f}" if len(plain) else NOTHING,
        f"{of_model(rows, baseline, method)[HITS].mean():.1f} ({whose})",
        f"{of_model(rows, arm, 'trained')[HITS].mean():.1f}",
        data_set.over(arm),
        data_set.over(arm, column="right"),
    ]
