"""Answers and retrieval of the same models on each data set: tests over seeds, tables, and what they show in words.

The figures of retrieval are the rows that ``retrieval.py`` wrote, the right answers those of the grid of the same runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import pandas as pd
import retrieval
from cells import NOTHING, interval, listed, mean, table
from ranking import DATA
from retrieval_models import (
    LENGTHS,
    LONGER,
    MODELS,
    PLAIN,
    READINGS,
    SHORTER,
    UNTRAINED,
    VARIANTS,
    WAYS,
    Model,
)
from retrieval_sets import DATA_SETS, FILE, JOINT, RIGHT, DataSet

from stepjepa.study.statistics import PairedT, paired_t

HITS = "hits_at_1"
OF_ALL_SEEDS = ("best readout", "ridge")
"""Readings that every run of plain training has."""
MAPPED = ("trained, ridge", "trained, canonical", "trained, heads")
"""Maps behind embeddings that training reads."""
MORE, EQUAL, FEWER, ONE_SEED = "more", "not told apart", "fewer", "one seed"
"""What the difference of two models shows; see :func:`outcome`."""


def joined(runs: pd.DataFrame, file: str = FILE) -> pd.DataFrame:
    """Return the rows of ``retrieval.py`` with ``right``, the share of right answers of the same run, in per cent.

    Args:
        runs: of :func:`frame.read`.
        file: its name without suffix, and that of the figures of the same runs.
    """
    rows = retrieval.read(retrieval.FILE.with_stem(file))
    answers = runs[runs.file == file].set_index(["arm", "seed"]).right
    keys = zip(rows.arm, rows.seed, strict=True)
    shares_right = [answers.get(key, measured) for key, measured in zip(keys, rows.right, strict=True)]
    return rows.assign(right=shares_right)


def of_model(rows: pd.DataFrame, arm: str, method: str) -> pd.DataFrame:
    """Return the runs of a model by seed; empty if there is none yet."""
    of_arm = rows[(rows.arm == arm) & (rows.method == method)]
    return of_arm.set_index("seed").sort_index()


def difference(
    rows: pd.DataFrame, ours: tuple[str, str], theirs: tuple[str, str], column: str = HITS
) -> PairedT | None:
    """Return the t-test over the seeds of two models (arm, method), in points; None without a common seed.

    A pretrained model is one for all seeds: what is tested against it says nothing about other such models.
    """
    first, second = (of_model(rows, *each)[column].dropna() for each in (ours, theirs))
    if theirs[0] == UNTRAINED and len(second) == 1:
        # One model for all seeds: its own variation from seed to seed is in no interval.
        second = pd.Series(second.mean(), first.index)
    seeds = first.index.intersection(second.index)
    return paired_t(list(first[seeds]), list(second[seeds])) if len(seeds) else None


def plain_of(rows: pd.DataFrame, arm: str) -> str:
    """Return plain training for the FLOPs of an arm; that for those of ``branched`` if no longer one has runs."""
    apart = arm == "infonce-alone" or arm.startswith("separate")
    return LONGER if apart and (rows.arm == LONGER).any() else PLAIN


def better_plain(rows: pd.DataFrame, arm: str) -> tuple[str, str]:
    """Return the model without a JEPA objective whose reading finds most, and the reading.

    It is plain training for the FLOPs of an arm or fewer, or the model before any training, with all seeds of the arm.
    Where plain training was not read behind a canonical map with all of them, the model before training counts with
    the seeds that it has.
    """
    plain, seeds = plain_of(rows, arm), set(of_model(rows, arm, "trained").index)
    hits = {}
    for model, method in product(dict.fromkeys((plain, PLAIN, UNTRAINED)), READINGS):
        runs = of_model(rows, model, method)[HITS].dropna()
        if len(runs) and (seeds <= set(runs.index) or (model == plain and method in OF_ALL_SEEDS)):
            hits[model, method] = runs.mean()
    before = of_model(rows, UNTRAINED, "canonical")[HITS].dropna()
    if len(before) and (plain, "canonical") not in hits:
        hits[UNTRAINED, "canonical"] = before.mean()
    return max(hits, key=lambda model: hits[model], default=(plain, "ridge"))


def models_with_runs(rows: pd.DataFrame) -> Iterator[tuple[Model, pd.DataFrame]]:
    """Yield the models that have runs, in the order of the table: those of ``MODELS``, then all others."""
    arms = [*VARIANTS, *sorted(set(rows.arm) - set(VARIANTS) - {model.arm for model in MODELS})]
    ways = {"trained": "", "best readout": ", best readout"}
    ways |= {trained + method: f", {words}" for trained in ("", "trained, ") for method, words in WAYS.items()}
    # Of plain training a map is at the best layer anyway.
    at_best = {arm: " at the best layer" for arm in arms if len(of_model(rows, arm, "trained"))}
    others = [
        Model(arm, way, VARIANTS.get(arm, f"`{arm}`") + words + (at_best.get(arm, "") if way in WAYS else ""))
        for arm in arms
        for way, words in ways.items()
    ]
    for model in (*MODELS, *others):
        runs = of_model(rows, model.arm, model.method)
        if len(runs):
            yield model, runs


def outcome(test: PairedT) -> str:
    """Return what a difference shows: a single seed, and differences that are all equal, show nothing."""
    if test.low is None or test.high is None:
        return ONE_SEED if test.n == 1 else EQUAL
    return MORE if test.low > 0 else FEWER if test.high < 0 else EQUAL


class Retrieval:
    """Figures of one data set, for the text of a page.

    Args:
        runs: of :func:`frame.read`.
        data: the data set.
    """

    def __init__(self, runs: pd.DataFrame, data: DataSet) -> None:
        self.file, self.name, self.about, self.anchor = data.file, data.name, data.about, data.anchor
        self.joint, self.long, self.in_readme = data.joint, data.long, data.in_readme
        model = DATA[data.data].model
        self.other_model, self.pretrained = model != "preset:tiny", not model.startswith("preset:")
        # Without a task nobody knows which other texts are right.
        self.hit = "equal texts alone" if DATA[data.data].task is None else "equal meanings, too"
        self.rows = joined(runs, data.file)
        scores = sorted(set(runs.headline[runs.file == data.file].dropna()))
        self.right = listed([RIGHT.get(score, score) for score in scores]) if scores else "not evaluated yet"
        of_file = runs[runs.file == data.file]
        self.answered = 0 if of_file.empty else int(of_file.records.max())
        compared = [
            part
            for model, part in models_with_runs(self.rows)
            if model.arm in (*LENGTHS, *self.joint.values()) and model.method in ("trained", *OF_ALL_SEEDS)
        ]
        self.counts = sorted({len(part) for part in compared}) or [0]

    def has(self, arm: str, method: str = "trained") -> bool:
        """Return whether a model has runs."""
        return len(of_model(self.rows, arm, method)) > 0

    def score(self, arm: str, method: str = "trained", column: str = HITS) -> str:
        """Return mean and standard deviation over seeds, in per cent."""
        return mean(of_model(self.rows, arm, method)[column])

    @property
    def seeds(self) -> str:
        """Number of seeds of the arms that are compared: plain training, and InfoNCE beside the LM loss."""
        low, high = self.counts[0], self.counts[-1]
        return f"{low} to {high} seeds" if low != high else {0: "no seed yet", 1: "one seed"}.get(high, f"{high} seeds")

    def counts_of(self, arm: str) -> str:
        """Write the number of seeds of an arm."""
        count = len(of_model(self.rows, arm, "trained"))
        return "one seed" if count == 1 else f"{count} seeds"

    @property
    def one_seed(self) -> bool:
        """Whether nothing can be claimed: no layout has two seeds that plain training for its FLOPs has, too."""
        tests = [difference(self.rows, (arm, "trained"), self.plain(arm)) for _, arm in self.layouts()]
        return all(test is None or test.n < 2 for test in tests)

    @property
    def exploratory(self) -> bool:
        """Whether an arm that is compared has fewer than five seeds."""
        return self.counts[0] < 5

    @property
    def size(self) -> str:
        """Number of queries and of candidates, and of answers where not all queries were answered."""
        row = self._row
        answers = f", {self.answered:,} of them answered" if self.answered not in (0, row.queries) else ""
        return f"{row.queries:,} queries{answers}, {row.candidates:,} candidates"

    @property
    def candidates(self) -> int:
        """Number of distinct answers of the test file."""
        return int(self._row.candidates)

    @property
    def _row(self) -> pd.Series:
        """A row whose candidates are the answers of the test file."""
        return self.rows[self.rows.method != "trained, all answers"].iloc[0]

    def plain(self, arm: str, column: str = HITS) -> tuple[str, str]:
        """Return the model that an arm is compared with: for hits that of :func:`better_plain`.

        For any other column it is plain training, since the model before training does not answer.
        """
        return better_plain(self.rows, arm) if column == HITS else (plain_of(self.rows, arm), "ridge")

    def over(self, arm: str, baseline: str | None = None, column: str = HITS) -> str:
        """Return the difference of an arm that was trained for retrieval from another, in points.

        Args:
            arm: the arm.
            baseline: an arm that was trained for retrieval, too; by default plain training for the FLOPs of ``arm``.
            column: what is compared.
        """
        theirs = (baseline, "trained") if baseline else self.plain(arm, column)
        return interval(difference(self.rows, (arm, "trained"), theirs, column))

    def of_models(self, ours: tuple[str, str], theirs: tuple[str, str]) -> str:
        """Return the difference in hits of two models (arm, method), in points."""
        return interval(difference(self.rows, ours, theirs))

    def mapped_over_plain(self, arm: str) -> str:
        """Return the difference in hits of an arm behind its better map from :meth:`plain`, in points."""
        return interval(difference(self.rows, (arm, self.better_map(arm)), self.plain(arm)))

    def better_map(self, arm: str) -> str:
        """Return the method of the map that finds more behind the embeddings that the training of an arm reads."""
        hits = {method: of_model(self.rows, arm, method)[HITS].mean() for method in MAPPED}
        return max(hits, key=lambda method: -1 if math.isnan(hits[method]) else hits[method])

    def shows(self, column: str = HITS) -> dict[str, str]:
        """Return what each layout's difference from plain training shows, of layouts that have runs beside it."""
        tests = {
            layout: difference(self.rows, (arm, "trained"), self.plain(arm, column), column)
            for layout, arm in self.joint.items()
        }
        return {layout: outcome(test) for layout, test in tests.items() if test is not None}

    @property
    def behind_plain(self) -> bool:
        """Whether InfoNCE beside the LM loss is shown to have fewer hits than plain training for its FLOPs."""
        return FEWER in self.shows().values()

    @property
    def ahead_of_plain(self) -> bool:
        """Whether InfoNCE beside the LM loss is shown to have more hits than plain training for its FLOPs."""
        return MORE in self.shows().values()

    def layouts(self) -> list[tuple[str, str]]:
        """Return the layouts of InfoNCE beside the LM loss that have runs, each with its arm."""
        return [(layout, arm) for layout, arm in self.joint.items() if self.has(arm)]

    def tests_of_predictors(self, column: str = HITS) -> dict[str, PairedT]:
        """Return by layout what predictor tokens add to InfoNCE beside the LM loss; without the arm there is none."""
        tests = {
            layout: difference(self.rows, (arm, "trained"), (f"{arm}-k0", "trained"), column)
            for layout, arm in self.joint.items()
        }
        return {layout: test for layout, test in tests.items() if test is not None}

    def of_predictors(self, column: str = HITS) -> str:
        """Write what predictor tokens add to InfoNCE beside the LM loss, in points; empty if no arm is without them."""
        return listed([f"{interval(test)} (`{layout}`)" for layout, test in self.tests_of_predictors(column).items()])

    @property
    def means(self) -> str:
        """The arm of ``separate`` that reads the mean of each text, without predictor tokens."""
        return f"{self.joint['separate'].removesuffix('-mean')}-mean"

    @property
    def best_arm(self) -> str:
        """The arm of InfoNCE beside the LM loss that README has: of pretrained models that on means, if it has runs."""
        return self.means if self.pretrained and self.has(self.means) else self.joint["separate"]

    @property
    def reading(self) -> str:
        """Where the arms of a pretrained model that are compared are read, in brackets; empty for any other model."""
        where = "means of texts" if self.means in self.joint.values() else "last predictor token"
        return f" ({where})" if self.pretrained else ""

    def choice(self, arm: str, method: str) -> str:
        """Return the readouts that were chosen, each once."""
        return "; ".join(f"`{readout}`" for readout in dict.fromkeys(of_model(self.rows, arm, method).choice))

    def choice_of_plain(self, method: str) -> str:
        """Return the readouts that were chosen for plain training, the shorter one if it has runs."""
        return next((choice for arm in LENGTHS if (choice := self.choice(arm, method))), NOTHING)

    def hits(self) -> str:
        """Write the hits of the models that are compared, in per cent."""
        models = [
            *((arm, "trained", f"with InfoNCE beside the LM loss (`{layout}`)") for layout, arm in self.layouts()),
            ("infonce-alone", "trained", "with InfoNCE alone"),
            *(
                (arm, method, f"with plain training, {length}, {words}")
                for method, words in reversed(READINGS.items())
                for arm, length in LENGTHS.items()
            ),
        ]
        return ", ".join(f"{self.score(*model)} % {words}" for *model, words in models if self.has(*model))

    def hits_over(self, baseline: str | None = None, column: str = HITS) -> str:
        """Write the points of both layouts of InfoNCE beside the LM loss over another arm; empty if none is known.

        By default the other arm is plain training for the FLOPs of the layout.
        """
        return listed(
            [
                f"`{layout}` {points}"
                for layout, arm in self.layouts()
                if (points := self.over(arm, baseline, column)) != NOTHING
            ]
        )

    def share_of_plain(self) -> str:
        """Write how many of the hits of the better layout the best model without a JEPA objective has, and how read."""
        hits = [of_model(self.rows, arm, "trained")[HITS].mean() for _, arm in self.layouts()]
        plain = {self.plain(arm): None for _, arm in self.layouts() if self.has(*self.plain(arm))}
        without = {model: of_model(self.rows, *model)[HITS].mean() for model in plain}
        if not without:
            return "InfoNCE beside the LM loss and plain training are not both trained yet"
        arm, method = max(without, key=lambda model: without[model])
        share = 100 * without[arm, method] / max(hits)
        reading = f"{'The untrained model' if arm == UNTRAINED else 'Plain training'} {READINGS[method]}"
        return f"{reading} has {share:.0f} % of the hits of the better layout"

    def answers(self) -> str:
        """Write the right answers of the same models, and their differences from plain training."""
        shares = [f"{self.score(arm, column='right')} % with `{layout}`" for layout, arm in self.layouts()]
        shares += [
            f"{self.score(arm, 'ridge', 'right')} % with plain training, {length}"
            for arm, length in LENGTHS.items()
            if self.has(arm, "ridge")
        ]
        over = self.hits_over(column="right")
        return f"{', '.join(shares)}" + (f"; points over plain training: {over}" if over else "")

    def variants(self) -> str:
        """Write the hits of all other arms beside those of ``separate`` with the same seeds; empty if there is none."""
        others = [
            (model.words, part)
            for model, part in models_with_runs(self.rows)
            if model.method == "trained" and not model.short and model.arm not in (*self.joint.values(), self.means)
        ]
        if not others:
            return ""
        seeds = max(len(part) for _, part in others)
        claim = "One seed each, so nothing is claimed" if seeds == 1 else f"At most {seeds} seeds each"
        hits = "; ".join(f"{words} {mean(part[HITS])} %" for words, part in others)
        own = of_model(self.rows, self.joint["separate"], "trained")
        common = own.index.intersection(others[0][1].index)
        same = "the same seed" if len(common) == seeds == 1 else f"seed {listed([*common])}"
        compared = VARIANTS.get(self.joint["separate"], "InfoNCE of weight 0.1").removeprefix("LM loss + ")
        return f"{claim}. Hits at 1: {hits}; with {same} {compared} has {mean(own.loc[common][HITS])} %"

    def full_table(self) -> str:
        """Write all figures of all models."""
        heads = ["model", "seeds", "right, %", "hits at 1, %", "own text, %", "hits at 10, %", "MRR, %"]
        return self._table(heads, ("right", HITS, "hits_at_1_of_text", "hits_at_10", "mrr"))

    def short_table(self) -> str:
        """Write answers and hits of the models, without maps behind embeddings that training reads."""
        heads = ["model", "seeds", "right answers, %", "hits at 1, %", "hits at 10, %"]
        return self._table(heads, ("right", HITS, "hits_at_10"), [model for model in MODELS if model.short])

    def _words(self, model: Model) -> str:
        """Return what a model is called; its weight is said where the data set's joint arm has another one."""
        other_weight = model.arm in JOINT.values() and model.arm not in self.joint.values()
        return model.words.replace("InfoNCE", "InfoNCE of weight 0.1", 1) if other_weight else model.words

    def _table(self, heads: Sequence[str], columns: Sequence[str], models: Sequence[Model] | None = None) -> str:
        lines = []
        for model, runs in models_with_runs(self.rows):
            if models is not None and model not in models:
                continue
            seeds = NOTHING if model.arm == "none" else str(len(runs))
            row = [self._words(model), seeds, *(mean(runs[column]) for column in columns)]
            for column in ("right", HITS):
                shown = model.arm not in ("none", UNTRAINED, *LENGTHS, *SHORTER)
                plain = self.plain(model.arm, column)
                test = difference(self.rows, (model.arm, model.method), plain, column) if shown else None
                row.append(interval(test))
            lines.append(row)
        return table([*heads, "right, over plain [95 %]", "hits at 1, over plain [95 %]"], lines)


def data_sets(runs: pd.DataFrame) -> list[Retrieval]:
    """Return the data sets that have rows."""
    return [Retrieval(runs, data) for data in DATA_SETS if has_rows(data.file)]


def has_rows(file: str) -> bool:
    """Return whether ``retrieval.py`` has written rows of a file of figures."""
    return retrieval.FILE.with_stem(file).exists()
