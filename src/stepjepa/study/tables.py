"""Format a comparison of arms as text, Markdown and JSON."""

import html
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from stepjepa.base.columns import aligned_columns, numbered_names, wrapped
from stepjepa.base.counting import counted
from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import finite, spelled, visible_lines
from stepjepa.evaluation.summary_text import MAPS, score_words
from stepjepa.study.arms import Arm, ComparedArms, Difference
from stepjepa.study.evaluated_run import (
    FIGURES,
    HITS_AT_1,
    MAP_MEASURES,
    MEASURES,
    RANKING_MEASURES,
    RETRIEVAL_MEASURES,
    readouts,
)
from stepjepa.study.statistics import PairedT, Spread
from stepjepa.study.table import (
    FIGURE_FORMATS,
    FIGURE_HEADS,
    UNKNOWN,
    Table,
    formatted,
    interval,
)

_RETRIEVAL_HEADS = ("hits at 1", "hits at 10", "MRR", "nDCG@10")


def overview(comparison: ComparedArms) -> Table:
    """Return the first table of a comparison: six columns, which :func:`legend` explains."""
    best = _best(comparison)
    rows = []
    for arm in comparison.arms:
        spread, difference = arm.spread("headline"), comparison.differences.get(arm.name)
        test = difference.measures["headline"] if difference else None
        rows.append(
            (
                arm.name,
                str(len(arm.runs)),
                f"{'* ' * (arm is best)}{mean_and_deviation(spread)}",
                difference_in_points(test),
                _p_text(difference.holm if difference else None),
                "baseline" if difference is None else difference.budget or UNKNOWN,
            )
        )
    heads = ("arm", "runs", "right answers", "difference in points", "p", "same budget")
    title = f"Right answers ({score_words(comparison.scores['headline'])}), against {comparison.baseline.name}"
    return Table(title, heads, rows)


def legend(comparison: ComparedArms) -> list[str]:
    """Explain the heads of :func:`overview`, one sentence each."""
    base = comparison.baseline.name
    mark = ["*: the highest mean"] if _best(comparison) else []
    return [
        "arm: a folder of the run" if comparison.one_run else "arm: runs that differ only in their seed",
        f"right answers: {score_words(comparison.scores['headline'])}; mean over the runs ± their standard deviation",
        *mark,
        f"difference: to {base}, mean over the seeds that both have [95% interval]; not always that of the two means",
        f"p: of a {comparison.tails}-tailed t-test over seeds, corrected for the number of arms; below 0.05 it counts",
        f"same budget: what the arm spent as {base} did, optimizer steps or training FLOPs",
    ]


_NEAREST = ("nearest answer right", "its difference in points")

_NEAREST_LEGEND = (
    f"{_NEAREST[0]}: by embeddings, the nearest of all distinct answers (of steps: next steps) is a right one; "
    "means, deviations and differences as above, not corrected for the number of arms"
)


def first_table(comparison: ComparedArms) -> tuple[Table, list[str]]:
    """Return :func:`overview` and :func:`legend`, with retrieval if an arm has it; may be wider than a terminal."""
    table, explained = overview(comparison), legend(comparison)
    hits = [arm.spread(HITS_AT_1) for arm in comparison.arms]
    if not any(hits):
        return table, explained
    tests = [None if each is None else each.retrieval.get(HITS_AT_1) for each in _differences(comparison)]
    # In front of the last column: the first difference and p are those of the answers.
    rows = [
        [*row[:-1], mean_and_deviation(spread), difference_in_points(test), row[-1]]
        for row, spread, test in zip(table.rows, hits, tests, strict=True)
    ]
    return Table(table.title, [*table.columns[:-1], *_NEAREST, table.columns[-1]], rows), [*explained, _NEAREST_LEGEND]


def _best(comparison: ComparedArms) -> Arm | None:
    """Return the arm whose mean headline score is highest; None if several are equal."""
    means = {arm.name: spread.mean for arm in comparison.arms if (spread := arm.spread("headline")) is not None}
    best = [arm for arm in comparison.arms if means.get(arm.name) == max(means.values(), default=None)]
    return best[0] if len(best) == 1 else None


def mean_and_deviation(spread: Spread | None) -> str:
    """Format the mean of shares and their standard deviation: ``33.9% ± 6.3``."""
    return f"{formatted(spread and spread.mean, '{:.1%}')}{_deviation(spread)}"


def difference_in_points(test: PairedT | None) -> str:
    """Format a difference of shares with its interval: ``+12.8 [-2.9, +28.5]``."""
    ends = interval(test.low, test.high, "+.1f") if test else ""
    return formatted(100 * test.mean if test else None, "{:+.1f}") + ends


def _deviation(spread: Spread | None, pattern: str = " ± {:.1f}") -> str:
    return "" if spread is None or spread.std is None else pattern.format(100 * spread.std)


def tables(comparison: ComparedArms) -> list[Table]:
    """Return the tables of a comparison: means of the arms, differences over seeds and over examples, retrieval."""
    return [_arms(comparison), _over_seeds(comparison), _over_examples(comparison), *retrieval_tables(comparison)]


def _arms(comparison: ComparedArms) -> Table:
    """Return the table of means and deviations of each arm."""
    names = comparison.measure_names()
    best, rows = _best(comparison), []
    for arm in comparison.arms:
        cells = [arm.name, str(len(arm.runs))]
        for measure in names:
            spread = arm.spread(measure)
            mark = "* " * (measure == "headline" and arm is best)
            cells.append(f"{mark}{formatted(spread and spread.mean, '{:.2%}')}{_deviation(spread, ' ± {:.2f}')}")
        spreads = {head: arm.spread(figure) for head, figure in FIGURE_HEADS.items()}
        rows.append(
            [*cells, *(formatted(value and value.mean, FIGURE_FORMATS[head]) for head, value in spreads.items())]
        )
    mark = "; *: the highest" if best else ""
    return Table(f"Mean ± standard deviation over seeds{mark}", ("arm", "seeds", *names.values(), *FIGURE_HEADS), rows)


def _over_seeds(comparison: ComparedArms) -> Table:
    """Return the table of differences from the baseline, tested over seeds."""
    names, rows = comparison.measure_names(), []
    for name, difference in comparison.differences.items():
        cells = [name, difference.budget or UNKNOWN, str(len(difference.seeds))]
        cells += [_in_points(difference.measures.get(name)) for name in names]
        test = difference.measures["headline"]
        cells += map(_p_text, (test and test.p_greater, test and test.p_two_sided, difference.holm))
        rows.append(
            [*cells, *(formatted(ratio, "× {:.2f}") for ratio in (difference.token_ratio, difference.flops_ratio))]
        )
    heads = ("arm", "equal", "pairs", *(f"Δ {name}" for name in names.values()), "p, one-tailed", "p, two-tailed")
    return Table(
        f"Difference to {comparison.baseline.name} over the seeds that both have: points [95 % interval], t-test, "
        f"Holm's correction of the {comparison.tails}-tailed p; equal: to the baseline, in steps or training FLOPs",
        (*heads, "Holm", "tokens", "FLOPs"),
        rows,
    )


def _over_examples(comparison: ComparedArms) -> Table:
    """Return the table of differences from the baseline, tested over examples."""
    has_lenient, rows = "lenient" in comparison.measure_names(), []
    for name, difference in comparison.differences.items():
        test = difference.by_example
        lenient_before = [difference.gained_lenient_before] if has_lenient else []
        counts = [test and test.gained, *lenient_before, test and test.lost]
        p_values = [test and test.p_greater, test and test.p_two_sided, difference.by_example_holm]
        rows.append((name, *(formatted(count, "{}") for count in counts), *map(_p_text, p_values)))
    lenient_head = (f"of them {comparison.scores['lenient']} before",) if has_lenient else ()
    return Table(
        f"Against {comparison.baseline.name}, paired by example: {comparison.scores['headline']} gained and lost over "
        "all seeds; exact test whose units are examples (one seed: McNemar's), Holm's correction over all arms",
        ("arm", "gained", *lenient_head, "lost", "p, one-tailed", "p, two-tailed", "Holm"),
        rows,
    )


def retrieval_tables(comparison: ComparedArms) -> list[Table]:
    """Return the table of retrieval, and that of retrieval behind each map; none of what no arm has."""
    base = comparison.baseline.name
    heads = ("arm", "seeds", *_RETRIEVAL_HEADS, *(f"Δ {head}" for head in _RETRIEVAL_HEADS[::2]))
    result = []
    if rows := _rankings(comparison, RETRIEVAL_MEASURES):
        title = (
            "Retrieval: a right answer is the nearest of all distinct ones, or among ten; mean reciprocal rank, nDCG "
            f"at 10; Δ: difference to {base} in points [95% interval] over the seeds that both have"
        )
        result.append(Table(f"{title}{_readouts(comparison)}", heads, rows))
    for of_map, (name, short) in MAPS.items():
        if rows := _rankings(comparison, MAP_MEASURES[of_map]):
            beyond = [None if each is None else each.over(of_map) for each in _differences(comparison)]
            rows = [[*row, _in_points(test)] for row, test in zip(rows, beyond, strict=True)]
            title = (
                f"Retrieval behind {name}; last column: hits at 1 of the arm as it is, over those of {base} behind "
                f"{short}, without training of the model"
            )
            result.append(Table(title, (*heads, f"Δ as it is to {base} behind {short}"), rows))
    return result


def _differences(comparison: ComparedArms) -> list[Difference | None]:
    """Return the difference of each arm; None for the baseline."""
    return [comparison.differences.get(arm.name) for arm in comparison.arms]


def _rankings(comparison: ComparedArms, measures: Sequence[str]) -> list[list[str]]:
    """Return the rows of a table of retrieval: means and differences; none if no arm has one of the measures."""
    if all(arm.spread(name) is None for arm in comparison.arms for name in measures):
        return []
    rows = []
    for arm, difference in zip(comparison.arms, _differences(comparison), strict=True):
        cells = [arm.name, str(len(arm.runs))]
        for name in measures:
            spread = arm.spread(name)
            cells.append(formatted(spread and spread.mean, "{:.2%}") + _deviation(spread, " ± {:.2f}"))
        retrieval = difference.retrieval if difference else {}
        rows.append([*cells, *(_in_points(retrieval.get(name)) for name in measures[::2])])
    return rows


def _readouts(comparison: ComparedArms) -> str:
    """Return where arms with views and arms without are read, if each kind has one readout, and these differ."""
    kinds = readouts([run for arm in comparison.arms for run in arm.runs])
    if len(kinds) < 2 or any(len(kind) > 1 for kind in kinds.values()) or kinds[True] == kinds[False]:
        return ""
    return f"; embeddings are read at {kinds[True][0]}, in arms without views at {kinds[False][0]}"


def _in_points(test: PairedT | None) -> str:
    """Format a difference in percentage points with its interval: ``+33.33 [+18.99, +47.68]``."""
    ends = interval(test.low, test.high, "+.2f") if test else ""
    return formatted(test and 100 * test.mean, "{:+.2f}") + ends


def _p_text(value: float | None) -> str:
    return "< 0.0001" if value is not None and value < 0.0001 else formatted(value, "{:.4f}")


def heading(comparison: ComparedArms) -> str:
    """Describe what is compared: the numbers of arms and runs, the baseline, the evaluation and its test file."""
    test = comparison.test
    return (
        f"{counted(len(comparison.arms), 'arm')}, {counted(sum(len(arm.runs) for arm in comparison.arms), 'run')}, "
        f"baseline {comparison.baseline.name}; evaluation {test['evaluation']}: task {test['task']}, "
        f"{counted(test['examples'], 'example')}, test file {test['sha256'][:12]}"
    )


def as_text(comparison: ComparedArms, *, details: bool = False) -> str:
    """Format a comparison for a terminal: the verdict, a sentence on retrieval, then tables of at most 80 columns.

    ``details`` replaces :func:`overview`, its legend and the table of retrieval by all :func:`tables`.
    """
    names, arm_legend = numbered_names([arm.name for arm in comparison.arms])
    blocks = [*map(wrapped, comparison.sentences), f"{wrapped(heading(comparison))}\n\n{arm_legend}".rstrip()]
    first = overview(comparison)
    for table in tables(comparison) if details else [first, *retrieval_tables(comparison)]:
        rows = [(names[row[0]], *row[1:]) for row in table.rows]
        title = f"{wrapped(table.title)}\n\n" * (table is not first)
        blocks.append(f"{title}{aligned_columns(table.columns, rows)}")
    if not details:
        blocks.append("\n".join(wrapped(line, "  ") for line in legend(comparison)))
    blocks.append("\n".join(wrapped(f"note: {note}", "  ") for note in comparison.notes))
    return "\n\n".join(blocks) + "\n"


def as_markdown(comparison: ComparedArms) -> str:
    """Format a comparison as Markdown, for a README or an issue."""

    def escaped(text: str) -> str:
        return re.sub(r"([\\`*_|<>])", r"\\\1", spelled(text))

    blocks = [*map(escaped, comparison.sentences), escaped(heading(comparison))]
    for table in tables(comparison):
        head, *rows = ["| " + " | ".join(map(escaped, cells)) + " |" for cells in (table.columns, *table.rows)]
        rule = "|---|" + "---:|" * (len(table.columns) - 1)
        blocks.append("\n".join([f"**{escaped(table.title)}**", "", head, rule, *rows]))
    blocks.append("\n".join(f"- {escaped(note)}" for note in comparison.notes))
    return "\n\n".join(blocks) + "\n"


def as_html(comparison: ComparedArms) -> str:
    """Format a comparison for a notebook: the sentences, the first table with its legend, and the notes."""

    def escaped(text: str) -> str:
        return html.escape(visible_lines(spelled(text)))

    table, explained = first_table(comparison)
    rows = [
        f"<tr><th>{escaped(row[0])}</th>{''.join(f'<td>{escaped(cell)}</td>' for cell in row[1:])}</tr>"
        for row in table.rows
    ]
    heads = "".join(f"<th>{escaped(head)}</th>" for head in table.columns)
    blocks = [f"<p>{escaped(text)}</p>" for text in (*comparison.sentences, heading(comparison))]
    blocks += [f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"]
    blocks += [f"<p><small>{'<br>'.join(map(escaped, explained))}</small></p>"]
    blocks += [f"<ul>{''.join(f'<li>{escaped(note)}</li>' for note in comparison.notes)}</ul>"]
    return "\n".join(blocks)


def as_json(comparison: ComparedArms) -> str:
    """Return every number as JSON; unknown and infinite values (such as ``max_grad_norm``) are null."""
    value = {
        "verdict": comparison.verdict,
        "retrieval": comparison.retrieval,
        "test": comparison.test,
        "scores": comparison.scores,
        "baseline": comparison.baseline.name,
        "corrected": f"{comparison.tails}-tailed p, Holm",
        "arms": [_arm_json(arm, comparison.differences.get(arm.name)) for arm in comparison.arms],
        "kept_out": [
            {
                "folder": str(excluded.run.folder),
                "seed": excluded.run.seed,
                "arm": excluded.arm,
                "reasons": list(excluded.run.mixed),
            }
            for excluded in comparison.kept_out
        ],
        "notes": list(comparison.notes),
    }
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _arm_json(arm: Arm, difference: Difference | None) -> JsonObject:
    """Return the numbers of an arm, of its difference from the baseline, and of each of its runs."""
    names = (*MEASURES, *FIGURES, *RANKING_MEASURES)
    tests = {**vars(difference), **difference.measures, **difference.retrieval} if difference else {}
    against_baseline = {
        name: _plain(test) for name, test in tests.items() if name not in ("measures", "retrieval", "by_seed")
    }
    return {
        "name": arm.name,
        "settings": arm.settings,
        "seeds": [run.seed for run in arm.runs],
        **{name: _plain(arm.spread(name)) for name in names},
        "difference": against_baseline or None,
        "runs": [
            {
                "folder": str(run.folder),
                "seed": run.seed,
                "steps": run.steps,
                "readout": run.readout,
                **{name: run.mean(name) for name in names},
                "mcnemar": _plain(difference.by_seed.get(run.seed)) if difference else None,
            }
            for run in arm.runs
        ],
    }


def _plain(value: object) -> Any:
    """Return a NamedTuple as a dict, any other value unchanged."""
    return value._asdict() if hasattr(value, "_asdict") else value


FORMATS: dict[str, Callable[[ComparedArms], str]] = {"text": as_text, "markdown": as_markdown, "json": as_json}
"""Name of an output format -> its formatter."""
