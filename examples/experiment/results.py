"""From the figures of the experiment to the tables and pictures of ``docs/results.md``.

    python examples/experiment/results.py            # rewrites what stands between the markers of the page
    python examples/experiment/results.py --check    # exit code 1 where the page is not what the figures give

A marker names a file of figures: ``<!-- synth: begin -->`` to ``<!-- synth: end -->``. What stands between those called
``overview``, ``arms``, ``unseen`` and ``shares`` has a script of that name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import arms as flags_of_arms
import overview
import shares
import unseen
from collect import FIGURES
from overview import REFERENCE
from run_figures import Figures, read_figures

from stepjepa.experiments.comparison import compare_runs
from stepjepa.experiments.comparison_plot import write_picture
from stepjepa.experiments.comparison_table import tables
from stepjepa.experiments.statistics import spread
from stepjepa.experiments.text_table import Table
from stepjepa.experiments.verdict import SAME_FLOPS
from stepjepa.files import atomic_write, read_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"
PLOTS = ROOT / "docs" / "plots"
MARKERS = re.compile(r"(<!-- (\S+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
NOTHING = "–"
NOT_RUN = "Not run yet."

STOPPED = "stopped"
# Head of a column, where its number is, how it is written.
SIMILARITY = (
    ("matched", "matched_similarity", "{:.3f}"),
    ("shuffled", "shuffled_similarity", "{:.3f}"),
    ("rank of source", "source_rank", "{:.1f}"),
    ("rank of target", "target_rank", "{:.1f}"),
    ("partner found", "retrieval_top1", "{:.1%}"),
)


def cell(values: Iterable[float | None], form: str) -> str:
    """Mean, and standard deviation where there are several values; a dash where one is unknown."""
    known = list(values)
    if not known or None in known:
        return NOTHING
    found = spread([value for value in known if value is not None])
    text = form.format(found.mean)
    return text if found.std is None else f"{text} ± {form.format(found.std).removesuffix('%')}"


def arms_of(figures: Sequence[Figures]) -> dict[str, list[Figures]]:
    """The runs of every arm, the baseline's first."""
    arms: dict[str, list[Figures]] = {}
    for each in sorted(figures, key=lambda one: (not one.label.startswith("regular"), one.label)):
        arms.setdefault(each.label, []).append(each)
    return arms


def arms_tables(figures: Sequence[Figures], baseline: str | None) -> list[str]:
    """Scores of every arm and its cost over the baseline's, and what its embeddings are, where that was measured.

    With one seed each, the best arm comes first.
    """
    arms = arms_of(figures)
    headline, lenient = (str(figures[0].run.protocol[name]) for name in ("headline", "lenient"))
    # Each once, in this order; some tasks have no exact match of their own.
    wanted = dict.fromkeys((headline, "exact", lenient, STOPPED))
    scores = [name for name in wanted if all(name in each.scores for each in figures)]
    if all(len(runs) == 1 for runs in arms.values()):
        arms = dict(sorted(arms.items(), key=lambda item: -item[1][0].scores[headline]))
    heads = ["arm", "seeds", *("stop rate" if name == STOPPED else name.replace("_", " ") for name in scores)]
    heads.append("LM loss, gold")
    rows, alive = [], []
    for label, runs in arms.items():
        line = [label, str(len(runs))]
        line += [cell([each.scores[name] for each in runs], "{:.1%}") for name in scores]
        line.append(cell([each.run.figures["gold_loss"] for each in runs], "{:.3f}"))
        if baseline is not None:
            line += [ratio(runs, arms[baseline], name) for name in ("tokens", "flops")]
        rows.append(line)
        alive.append(
            [label, *(cell([each.similarity.get(name) for each in runs], form) for _, name, form in SIMILARITY)]
        )
    if baseline is not None:
        heads += [f"{what}, {baseline} = 1" for what in ("tokens", "FLOPs")]
    made = [markdown(heads, rows)]
    if any(each.similarity for each in figures):
        made.append(f"Their embeddings:\n\n{markdown(['arm', *(head for head, *_ in SIMILARITY)], alive)}")
    return made


def ratio(runs: Sequence[Figures], baseline: Sequence[Figures], name: str) -> str:
    """Tokens or FLOPs of training over those of the baseline."""
    sums = [[each.run.figures[name] for each in side] for side in (runs, baseline)]
    if any(value is None for side in sums for value in side):
        return NOTHING
    ours, theirs = (spread([value for value in side if value is not None]).mean for side in sums)
    return f"{ours / theirs:.2f}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, numbers to the right."""
    rule = "|---|" + "---:|" * (len(heads) - 1)
    return "\n".join(["| " + " | ".join(heads) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def differences(figures: Sequence[Figures], baseline: str, picture: Path | None) -> list[str]:
    """The tests of every arm against a baseline, as ``stepjepa compare`` makes them; draws the picture."""
    arms = arms_of(figures)
    ordered = [each for runs in arms.values() for each in runs]
    comparison = compare_runs([each.run for each in ordered], names=list(arms), baseline=baseline, tails="two")
    if picture is not None:
        write_picture(comparison, picture)
    # The first table is told by arms_tables, the last names every run. Tests over examples ask whether these very
    # models differ on other examples; what training again would give is the question here.
    middle = tables(comparison)[1:-1]
    return [block(each) for each in middle if "paired by seed" in each.title]


def block(table: Table) -> str:
    """A table of a comparison with its title."""
    return f"{table.title}:\n\n{markdown(table.columns, table.rows)}"


def equal_flops(figures: Sequence[Figures], baseline: str) -> list[Figures]:
    """The baseline, and the arms that train for as many FLOPs."""
    arms = arms_of(figures)
    of_arm = {label: spread([each.run.figures["flops"] or 0.0 for each in runs]).mean for label, runs in arms.items()}
    near = {label for label, flops in of_arm.items() if abs(flops / of_arm[baseline] - 1) <= SAME_FLOPS}
    # Plain training for other FLOPs, and what has other labels, is no arm of this question.
    near -= {
        label for label in near if label != baseline and (label.startswith("regular") or label.endswith(REFERENCE))
    }
    return [each for each in figures if each.label in near]


def with_reference_labels(figures: Sequence[Figures]) -> list[Figures]:
    """The arms with the labels of the published code, plain training among them."""
    return [each for each in figures if each.label.endswith(REFERENCE)]


def part(name: str, figures: Sequence[Figures], plots: Path) -> str:
    """What a file of figures gives: arms, tests, picture, and tests against every other plain training.

    Those that are longer are compared with what spends as many FLOPs, the one with the published labels with those that
    have them, too.
    """
    arms = arms_of(figures)
    baseline = "regular" if "regular" in arms else None
    common = figures[0].run
    head = f"{len(figures)} runs, each evaluated on {len(common.indices):,} examples (`figures/{name}.json`)."
    parts = [head, *arms_tables(figures, baseline)]
    if baseline is not None and any(len(runs) > 1 for runs in arms.values()):
        picture = plots / f"results-{name}.png"
        parts += differences(figures, baseline, picture)
        parts.append(f"![every arm of {name} with its seeds](plots/{picture.name})")
        for label in arms:
            if label.startswith("regular-"):
                reference = label.endswith(REFERENCE)
                like = with_reference_labels(figures) if reference else equal_flops(figures, label)
                if len(like) > len(arms[label]):
                    parts += differences(like, label, None)
    return "\n\n".join(parts)


def shares_part(directory: Path, plots: Path) -> str:
    """Table and picture over shares of the data."""
    files = {records: directory / f"{name}.json" for name, records in shares.SHARES.items()}
    found = shares.curves({records: read_figures(file) for records, file in files.items() if file.exists()})
    if not found:
        return NOT_RUN
    picture = plots / "results-shares.png"
    shares.draw(found, picture)
    heads, *lines = shares.rows(found)
    return f"{markdown(heads, lines)}\n\n![scores against the number of records](plots/{picture.name})"


def overview_part(directory: Path) -> str:
    """All arms of all tests."""
    files = {file: directory / f"{file}.json" for _, file, _ in overview.TESTS}
    heads, *lines = overview.table({name: read_figures(file) for name, file in files.items() if file.exists()})
    return markdown(heads, lines) if lines else NOT_RUN


def unseen_part(directory: Path) -> str:
    """The arms of synth on what they can't have learnt by heart."""
    file = directory / "synth.json"
    if not file.exists():
        return NOT_RUN
    ordered = [each for runs in arms_of(read_figures(file)).values() for each in runs]
    heads, *lines = unseen.rows(ordered, unseen.read_seen())
    return markdown(heads, lines)


def arms_part() -> str:
    """What the arms of synth are."""
    heads, *lines = flags_of_arms.rows(Path(__file__).with_name("synth.yaml"))
    return markdown(heads, lines).replace("---:", "---")


def rewrite(page: str, directory: Path, plots: Path) -> str:
    """The page with all that stands between markers made anew."""
    special: dict[str, Callable[[], str]] = {
        "overview": lambda: overview_part(directory),
        "arms": arms_part,
        "unseen": lambda: unseen_part(directory),
        "shares": lambda: shares_part(directory, plots),
    }

    def made(match: re.Match[str]) -> str:
        name, file = match[2], directory / f"{match[2]}.json"
        if name in special:
            text = special[name]()
        else:
            text = part(name, read_figures(file), plots) if file.exists() else NOT_RUN
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return MARKERS.sub(made, page)


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="DIR", help="files of figures")
    parser.add_argument("--page", type=Path, default=PAGE, help="(docs/results.md)")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="folder of pictures (docs/plots)")
    parser.add_argument("--check", action="store_true", help="write no page; exit code 1 where it is out of date")
    args = parser.parse_args(argv)
    before = read_text(args.page)
    after = rewrite(before, args.figures, args.plots)
    if args.check:
        return int(before != after)
    with atomic_write(args.page) as file:
        file.write(after)
    print(f"rewritten: {args.page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
