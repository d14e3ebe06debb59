"""From the figures of the experiment to the pages on results, their lines in README, and a table of all runs.

    python examples/experiment/results.py            # writes them
    python examples/experiment/results.py --check    # exit code 1 where a number is not what the figures give

Every result on them is computed here: their texts have none. ``results.md.jinja`` is the page that one reads,
``results-tables.md.jinja`` has all tables and notes, ``evidence.md.jinja`` the controls, ``readme.md.jinja`` the lines
between ``<!-- results -->`` and ``<!-- end -->`` of README.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pictures
import retrieval
import word_order
from cells import NOTHING, interval, listed, mean
from cells import table as written
from collect import FIGURES
from embeddings import KEPT
from frame import BASELINE, REFERENCE, TESTS, copies, objectives, partners, read, runs, same_flops, searched, test
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from retrieval_claims import claim, gain, of_long_training, summary, with_gain
from retrieval_results import FEWER, HITS, MORE, ONE_SEED, Retrieval, data_sets, has_rows, outcome
from splits import read_splits

from stepjepa.base.files import atomic_write, read_json_object, read_text
from stepjepa.study.statistics import PairedT, detectable, holm

HERE = Path(__file__).resolve().parent
DOCS, RUNS = HERE.parents[1] / "docs", HERE / "runs.csv"
DEMONSTRATIONS = HERE / "demonstrations.csv"
README = HERE.parents[1] / "README.md"
PAGES = ("results", "results-tables", "evidence")
BLOCK = re.compile(r"(<!-- results -->\n).*?(\n<!-- end -->)", re.DOTALL)
"""The lines of README that are written here."""
OTHER_VERSION, OF_AGAIN = "\\*", "†"
FEW = 3
"""Arms with fewer seeds are named, and left to the table of runs."""
PARTS = ("number", "rest", "rest, language new")
HEADS = (
    *("data", "arm", "seeds", "right, %", "number", "rest", "rest, new", "copy", "FLOPs"),
    *("at equal steps, points [95 %]", "Holm", "at equal FLOPs, points [95 %]", "Holm", "could show"),
)
AT_EQUAL = (9, 11)
"""The columns of the differences at equal steps, and at equal FLOPs."""


class Questions:
    """Figures that the text of the page takes from the table of runs.

    Args:
        table: of :func:`frame.read`.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        self.table = table
        self.of_embeddings = read_json_object(KEPT, "record", "run embeddings.py")
        made = read_json_object(HERE / "untouched.json", "record", "run untouched.py")
        self.untouched, self.effective = made["untouched"], made["weighted"]["effective records"]
        self._rows: dict[str, list[list[str]]] = {}
        trivial = read_splits()["synth"]["trivial"]
        self.trivial = f"{100 * sum(trivial) / len(trivial):.0f}"

    @cached_property
    def retrieval(self) -> list[Retrieval]:
        """Answers and retrieval of the same models, of each data set that has rows."""
        return data_sets(self.table)

    @cached_property
    def demonstrations(self) -> pd.DataFrame | None:
        """Answers behind known pairs, as ``demonstrations.py`` wrote them; None if it did not run."""
        return pd.read_csv(DEMONSTRATIONS) if DEMONSTRATIONS.exists() else None

    def demonstrations_table(self) -> str:
        """Right answers behind known pairs, by the way in which the pairs are chosen."""
        assert self.demonstrations is not None
        columns = ("right", "demonstration_right", "right_elsewhere")
        cells = self.demonstrations[[*columns]].map(lambda share: NOTHING if math.isnan(share) else f"{share:.1f}")
        rows = zip(self.demonstrations.way, *(cells[column] for column in columns), strict=True)
        return written(["known pairs", "right, %", "a pair is right, %", "elsewhere, %"], rows)

    def word_order_table(self) -> str:
        """How many answers are nearer to their question than their twins, as ``word_order.py`` wrote it."""
        rows = word_order.read()
        heads = ["data", "model", "read", "seeds", "questions", "nearer than the twin, %", "hits at 1, %"]
        models = rows.groupby(["data", "arm", "method"], sort=False)
        lines = [
            [
                *(data, "–" if arm == "none" else f"`{arm}`", method, "–" if arm == "none" else str(len(part))),
                *(str(part.queries.max()), mean(part.nearer_than_twin), mean(part.hits_at_1)),
            ]
            for (data, arm, method), part in models
        ]
        return written(heads, lines, texts=3)

    def margin_of_demonstrations(self) -> str:
        """Half of the 95 % interval of a share of one half."""
        assert self.demonstrations is not None
        return f"{98 / math.sqrt(self.demonstrations.questions.max()):.1f}"

    def score(self, file: str, arm: str, column: str = "right") -> str:
        """Mean and standard deviation over seeds, in per cent."""
        return mean(runs(self.table, file, arm)[column])

    def has(self, file: str, arm: str) -> bool:
        """Whether there is a run of an arm."""
        return bool(((self.table.file == file) & (self.table.arm == arm)).any())

    def title(self, file: str) -> str:
        """Return the title of the test of a file."""
        return TESTS[file].title

    def similarity(self, file: str, arm: str, column: str, digits: int = 3) -> str:
        """Mean over seeds of a number of the embeddings."""
        return f"{runs(self.table, file, arm)[column].mean():.{digits}f}"

    def percent(self, file: str, arm: str, column: str) -> str:
        """Mean over seeds of a share, in per cent."""
        return f"{100 * runs(self.table, file, arm)[column].mean():.0f} %"

    def untrained(self, column: str, digits: int = 2) -> str:
        """A number of the embeddings of SmolLM2 before training; see ``embeddings.py``."""
        return f"{self.of_embeddings[column]:.{digits}f}"

    def seeds(self, file: str, arm: str) -> int:
        """Return the number of runs of an arm."""
        return len(runs(self.table, file, arm))

    def against(self, file: str, arm: str, baseline: str = BASELINE, column: str = "right") -> str:
        """The difference of two arms, in points; a star where they are of different versions."""
        text = interval(test(self.table, file, arm, baseline, column))
        return text + (OTHER_VERSION if partners(self.table, file, arm, baseline)[1] else "")

    def p(self, file: str, arm: str, baseline: str) -> str:
        """The two-sided p-value of the difference of two arms, asked alone."""
        difference = test(self.table, file, arm, baseline)
        return NOTHING if difference is None or difference.p_two_sided is None else f"{difference.p_two_sided:.3f}"

    def by_seed(self, file: str, arm: str, baseline: str = BASELINE) -> str:
        """The difference of two arms in points, of each seed."""
        differences = (runs(self.table, file, arm).right - partners(self.table, file, arm, baseline)[0].right).dropna()
        return ", ".join(f"{each:+.1f}" for each in differences)

    def at_equal_flops(self, file: str, arm: str, column: str = "right") -> str:
        """The difference from plain training for the same FLOPs, in points."""
        partner = same_flops(self.table, file, arm)
        return self.against(file, arm, partner, column) if partner else NOTHING

    def above(self, file: str) -> str:
        """Count the arms with views and enough seeds that are above plain training for the same FLOPs."""
        views = [arm for arm in objectives(self.table, file) if arm.startswith(("branched", "separate"))]
        right = [arm for arm in views if not arm.endswith("-wrong") and self.seeds(file, arm) >= FEW]
        pairs = [(arm, partner) for arm in right if (partner := same_flops(self.table, file, arm))]
        tests = [test(self.table, file, arm, partner) for arm, partner in pairs]
        return f"{sum(each is not None and each.mean > 0 for each in tests)} of {len(tests)}"

    def corrected(self, file: str, arm: str) -> str:
        """Holm's corrected p-value of an arm against plain training at equal steps."""
        return next(row for row in self.rows(file) if row[1] == arm)[HEADS.index("Holm")]

    def copying(self, file: str, arm: str) -> str:
        """Count the runs of an arm that copy the number."""
        do_copy = runs(self.table, file, arm).apply(copies, axis=1)
        return f"{do_copy.sum()} of {len(do_copy)}"

    def between(self, file: str, low: float, high: float, column: str = "number") -> int:
        """Count the runs with right labels whose score is from ``low`` to below ``high``."""
        with_right_labels = self.table[(self.table.file == file) & ~self.table.arm.str.endswith(REFERENCE)]
        return int(with_right_labels[column].between(low, high, inclusive="left").sum())

    def margin(self, file: str, arm: str) -> str:
        """Half of the 95 % interval that the number of test records alone leaves."""
        run = runs(self.table, file, arm).iloc[0]
        share = run["right"] / 100
        return f"{196 * math.sqrt(share * (1 - share) / run['records']):.1f}"

    def shown(self, file: str, arm: str, baseline: str = BASELINE) -> str:
        """The smallest difference that the seeds of two arms could have shown, asked alone."""
        return _shown(test(self.table, file, arm, baseline))

    def best(self, file: str, arm: str) -> str:
        """The best point of a search over learning rates and lengths: its score, rate and epochs."""
        points = searched(self.table, file)
        best = points[points.arm == arm].sort_values("right").iloc[-1]
        return f"{best.right:.1f} % (learning rate {best.rate:g}, {best.epochs} epochs)"

    def cost(self, file: str, arm: str) -> str:
        """FLOPs of training over those of plain training."""
        ratio = float(runs(self.table, file, arm).cost.mean())
        return NOTHING if math.isnan(ratio) else f"{ratio:.2f}"

    def rows(self, file: str) -> list[list[str]]:
        """Rows of one test: plain training, then every arm with its tests, corrected over the arms of this test."""
        # The text asks for many a single one of them.
        if file not in self._rows:
            self._rows[file] = list(self._rows_of(file))
        return self._rows[file]

    def _rows_of(self, file: str) -> Iterator[list[str]]:
        arms = objectives(self.table, file)
        every = set(self.table.arm[self.table.file == file])
        plain = sorted(arm for arm in every - set(arms) if not arm.endswith(REFERENCE))
        steps = {arm: test(self.table, file, arm, BASELINE) for arm in arms}
        longer = {arm: same_flops(self.table, file, arm) for arm in arms}
        flops = {arm: test(self.table, file, arm, other) if other else None for arm, other in longer.items()}
        corrected = [_corrected(tests) for tests in (steps, flops)]
        for arm in [*plain, *arms]:
            of_arm = runs(self.table, file, arm)
            row = [TESTS[file].title, arm, str(len(of_arm)), mean(of_arm["right"])]
            row += [mean(of_arm[each]) if each in of_arm else NOTHING for each in PARTS]
            row.append(self.copying(file, arm) if TESTS[file].split in read_splits() else NOTHING)
            row.append(self.cost(file, arm))
            for partner, p_values in zip((BASELINE, longer.get(arm)), corrected, strict=True):
                text = NOTHING
                if partner and arm in arms:
                    again = set(partners(self.table, file, arm, partner)[0].file) != {file}
                    text = self.against(file, arm, partner) + (OF_AGAIN if again else "")
                row += [text, f"{p_values[arm]:.3f}" if arm in p_values else NOTHING]
            yield [*row, _shown(flops.get(arm) or steps.get(arm), len(corrected[0]))]

    def on(self, file: str) -> Retrieval:
        """Return answers and retrieval on a data set, by its file of figures."""
        return next(each for each in self.retrieval if each.file == file)

    def claim_of_retrieval(self) -> str:
        """Write what InfoNCE is seen to give in retrieval, on all data sets."""
        return claim(self.retrieval)

    def of_predictors(self) -> str:
        """Write what predictor tokens add in hits at 1 to InfoNCE beside the LM loss; empty if it was not measured."""
        sets = [each for each in self.retrieval if each.of_predictors() and not each.one_seed]
        if not sets:
            return ""
        tests = [
            (each.name, layout, test)
            for each in sets
            for layout, test in each.tests_of_predictors().items()
            if outcome(test) != ONE_SEED
        ]
        several = len({layout for _, layout, _ in tests}) > 1
        points = [
            f"{interval(test)} points on {name}{f' (`{layout}`)' if several else ''}" for name, layout, test in tests
        ]
        nothing = (
            "" if {outcome(test) for _, _, test in tests} & {MORE, FEWER} else ", so no gain is shown to be theirs"
        )
        text = f"three predictor tokens change hits at 1 by {listed(points)}{nothing}"
        return f"{text}; the rest is contrastive training of last tokens"

    def retrieval_gain(self) -> str:
        """Return on which data sets InfoNCE finds more than maps behind models without it."""
        return gain(self.retrieval)

    def of_long_training(self) -> str:
        """Return what InfoNCE finds and answers where it is trained for long."""
        return of_long_training(self.retrieval)

    def sets_with_gain(self) -> str:
        """Return the data sets on which InfoNCE finds more than any map without it; empty if there is none."""
        return listed(with_gain(self.retrieval))

    def retrieval_summary(self) -> str:
        """Return the table of README: the hits of the models, what they gain and its price."""
        return summary(self.retrieval)

    def has_retrieval(self, file: str) -> bool:
        """Return whether ``retrieval.py`` has written rows of a file of figures."""
        return has_rows(file)

    def retrieval_table(self, file: str) -> str:
        """Retrieval of all arms of a file of figures, from the table beside this script that is called as it is."""
        rows = retrieval.read(HERE / f"{file}.csv")
        columns = (HITS, "hits_at_1_of_text", "hits_at_10", "mrr")
        heads = ["arm", "ranked by", "seeds", "hits at 1, %", "own text, %", "hits at 10, %", "MRR, %"]
        models = rows.groupby(["arm", "method"])
        lines = [[*model, str(len(part)), *(mean(part[column]) for column in columns)] for model, part in models]
        return written(heads, lines, texts=2)

    def short_table(self, file: str, arms: Iterable[tuple[str, str]]) -> str:
        """Right answers of some arms, with their differences from plain training.

        Args:
            file: of figures.
            arms: of each its name, and what it is called on the page.
        """
        heads = ["seeds", "right, %", "FLOPs", *(HEADS[place] for place in AT_EQUAL)]
        rows = {row[1]: row for row in self.rows(file)}
        columns = [HEADS.index(head) for head in heads]
        return written(["arm", *heads], [[words, *(rows[arm][column] for column in columns)] for arm, words in arms])

    def parts_table(self, file: str, arms: Iterable[tuple[str, str]]) -> str:
        """Right answers of some arms on number records and on the rest; arguments as of ``short_table``."""
        heads = ["arm", "number records, %", "the rest, %", "runs that copy"]
        heads += ["number records, equal steps", "the rest, equal steps"]
        parts = PARTS[:2]
        lines = []
        for arm, words in arms:
            over = [NOTHING if arm == BASELINE else self.against(file, arm, BASELINE, part) for part in parts]
            lines.append([words, *(self.score(file, arm, part) for part in parts), self.copying(file, arm), *over])
        return written(heads, lines)

    def intervals_at_equal_flops(self, *files: str) -> tuple[int, int, int]:
        """Count the objectives with enough seeds and a plain partner: all, with an interval above 0, and below 0.

        Neither the LM loss on the prompt, which is a second baseline, nor controls with wrong partners are among them.
        """
        arms = [(file, arm) for file in files for arm in objectives(self.table, file) if self.seeds(file, arm) >= FEW]
        arms = [(file, arm) for file, arm in arms if arm != "regular-prompt" and not arm.endswith("-wrong")]
        pairs = [(file, arm, same_flops(self.table, file, arm)) for file, arm in arms]
        tests = [test(self.table, file, arm, partner) for file, arm, partner in pairs if partner]
        intervals = [(each.low, each.high) for each in tests if each and each.low is not None and each.high is not None]
        return len(intervals), sum(low > 0 for low, _ in intervals), sum(high < 0 for _, high in intervals)

    def main_table(self) -> str:
        """All tests of arms that have enough seeds."""
        return self.arms([file for file, about in TESTS.items() if about.tabled], FEW)

    def arms(self, files: Iterable[str], seeds: int = 1) -> str:
        """The tests of all arms that have so many seeds, in the files that are there."""
        files = [file for file in files if self.has(file, BASELINE)]
        lines = [row for file in files for row in self.rows(file) if self.seeds(file, row[1]) >= seeds]
        return written(HEADS, lines, texts=2)

    def few(self) -> str:
        """The arms that have too few seeds for the table, by what they are tested on."""
        by_title: dict[str, list[str]] = {}
        for (file, arm), seeds_of_arm in self.table.groupby(["file", "arm"]).seed.nunique().items():
            if file in TESTS and TESTS[file].tabled and seeds_of_arm < FEW and not arm.endswith(REFERENCE):
                by_title.setdefault(TESTS[file].title, []).append(f"`{arm}`")
        return "; ".join(f"{title}: {', '.join(arms)}" for title, arms in by_title.items())


def _shown(difference: PairedT | None, arms: int = 1) -> str:
    size = None if difference is None else detectable(difference, "two", arms)
    return NOTHING if size is None else f"{size:.1f}" if size < 100 else "> 100"


def _corrected(tests: dict[str, PairedT | None]) -> dict[str, float]:
    p_values = {
        arm: difference.p_two_sided
        for arm, difference in tests.items()
        if difference and difference.p_two_sided is not None
    }
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))


def pages(table: pd.DataFrame, readme: str) -> dict[str, str]:
    """The text of each of ``PAGES``, and of README with its lines on retrieval.

    Args:
        table: of :func:`frame.read`.
        readme: README as it is.
    """
    environment = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True)
    questions: Any = Questions(table)
    made = {f"{name}.md": environment.get_template(f"{name}.md.jinja").render(q=questions) for name in PAGES}
    lines = environment.get_template("readme.md.jinja").render(q=questions)
    return made | {README.name: BLOCK.sub(lambda match: match[1] + lines + match[2], readme)}


def csv(table: pd.DataFrame) -> str:
    """All runs as a table for other programs."""
    return str(table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def main(argv: list[str] | None = None) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="DIR", help="files of figures")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="folder of the pages (docs)")
    parser.add_argument("--readme", type=Path, default=README, metavar="FILE", help="(README.md)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="(runs.csv)")
    help_of_check = "write nothing; print what is not as the figures give it, or that all agree"
    parser.add_argument("--check", action="store_true", help=help_of_check)
    args = parser.parse_args(argv)
    table = read(args.figures)
    texts = pages(table, read_text(args.readme))
    made = {args.readme if name == README.name else args.docs / name: text for name, text in texts.items()}
    made[args.runs] = csv(table)
    if args.check:
        wrong = [line for file, text in made.items() for line in _changes(file, text)]
        sys.stdout.writelines(wrong)
        if not wrong:
            print(f"all figures agree: {', '.join(file.name for file in made)}")
        return int(bool(wrong))
    for file, text in made.items():
        with atomic_write(file) as stream:
            stream.write(text)
        print(f"written: {file}")
    pictures.draw(table, args.docs / "plots")
    return 0


def _changes(file: Path, text: str) -> Iterator[str]:
    old = read_text(file).splitlines(keepends=True) if file.exists() else []
    return difflib.unified_diff(old, text.splitlines(keepends=True), str(file), "figures", n=0)


if __name__ == "__main__":
    raise SystemExit(main())
