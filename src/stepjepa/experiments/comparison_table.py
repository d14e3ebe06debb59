"""A comparison written down: tables for people, for papers and for programs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from stepjepa.experiments.comparison import Comparison, Difference
from stepjepa.experiments.evaluated_run import FIGURES, MEASURES
from stepjepa.experiments.statistics import ExampleTest, PairedT, Spread
from stepjepa.experiments.text_table import UNKNOWN, Table, as_lines, legend, short_names, wrap
from stepjepa.experiments.verdict import groups, verdict
from stepjepa.terminal import finite


def measure_names(comparison: Comparison) -> dict[str, str]:
    """What to call each of ``MEASURES``; what is another under the same name, or unknown everywhere, is left out."""
    names = {**comparison.scores, "stopped": "stop rate"}
    if names["lenient"] == names["headline"]:
        del names["lenient"]
    return {key: name for key, name in names.items() if any(arm.spread(key) is not None for arm in comparison.arms)}


def tables(comparison: Comparison) -> list[Table]:
    """All tables: what the arms came to, their differences from the baseline over seeds and over examples, the runs.

    Differences are grouped by what is equal; an arm that is equal in both stands in both groups.
    """
    by_group = [
        table(comparison, f"At {heading}", names)
        for table in (_over_seeds, _over_examples)
        for heading, names in groups(comparison).items()
    ]
    return [_arms(comparison), *by_group, _runs(comparison)]


def _arms(comparison: Comparison) -> Table:
    names = measure_names(comparison)
    best = max((found.mean for arm in comparison.arms if (found := arm.spread("headline"))), default=None)
    rows = []
    for arm in comparison.arms:
        cells = [arm.name, str(len(arm.runs)), *(_percent(arm.spread(name)) for name in names)]
        headline = arm.spread("headline")
        if headline is not None:
            cells[2] = f"{'* ' if headline.mean == best else ''}{cells[2]}"
        cells += [_number(arm.spread(name), "{:.3f}") for name in FIGURES[:3]]
        cells += [_number(arm.spread(name), "{:,.0f}") for name in FIGURES[3:5]]
        rows.append((*cells, _number(arm.spread("flops"), "{:.3g}")))
    heads = ("arm", "seeds", *names.values(), "LM loss", "matched", "shuffled", "tokens", "seconds", "FLOPs")
    return Table("Mean ± standard deviation over seeds; *: best", heads, tuple(rows))


def _over_seeds(comparison: Comparison, heading: str, arms: Sequence[str]) -> Table:
    names, rows = measure_names(comparison), []
    for name in arms:
        found = comparison.differences[name]
        test = found.measures["headline"]
        p_values = (None, None) if test is None else (test.p_greater, test.p_two_sided)
        cells = [name, str(len(found.seeds)), *(_points(found.measures[measure]) for measure in names)]
        rows.append((*cells, *map(p_text, (*p_values, found.holm)), _times(found.tokens), _times(found.flops)))
    heads = ("arm", "pairs", *(f"Δ {name}" for name in names.values()), "p, one-tailed", "p, two-tailed")
    return Table(
        f"{heading}, against {comparison.baseline.name}, paired by seed: percentage points [95 % interval], t-test of "
        f"{comparison.scores['headline']}, Holm's correction of the {comparison.tails}-tailed p over all arms of all "
        "groups",
        (*heads, "Holm", "tokens", "FLOPs"),
        tuple(rows),
    )


def _over_examples(comparison: Comparison, heading: str, arms: Sequence[str]) -> Table:
    known, rows = "lenient" in measure_names(comparison), []
    for name in arms:
        found = comparison.differences[name]
        test = found.by_example
        counts = [UNKNOWN] * 2 if test is None else [str(test.gained), str(test.lost)]
        if known:
            counts.insert(1, UNKNOWN if found.known is None else str(found.known))
        p_values = (None, None) if test is None else (test.p_greater, test.p_two_sided)
        rows.append((name, *counts, *map(p_text, (*p_values, found.by_example_holm))))
    before = (f"of them {comparison.scores['lenient']} before",) if known else ()
    return Table(
        f"{heading}, against {comparison.baseline.name}, paired by example: {comparison.scores['headline']} where the "
        "baseline was wrong and the other way round, all seeds; exact test whose units are examples (one seed: "
        "McNemar's), Holm's correction over all arms of all groups",
        ("arm", "gained", *before, "lost", "p, one-tailed", "p, two-tailed", "Holm"),
        tuple(rows),
    )


def _runs(comparison: Comparison) -> Table:
    names, rows = measure_names(comparison), []
    # Sweeps give folders of different arms the same last name.
    parent = os.path.commonpath([run.folder.resolve().parent for arm in comparison.arms for run in arm.runs])
    for arm in comparison.arms:
        found = comparison.differences.get(arm.name)
        for run in arm.runs:
            test = found.by_seed.get(run.seed) if found else None
            counts = (UNKNOWN, UNKNOWN) if test is None else (str(test.gained), str(test.lost))
            means = [run.mean(name) for name in names]
            cells = [arm.name, run.seed, *(UNKNOWN if mean is None else f"{mean:.2%}" for mean in means)]
            cells += [*counts, p_text(None if test is None else test.p_two_sided)]
            rows.append((*cells, str(run.folder.resolve().relative_to(parent))))
    heads = ("arm", "seed", *names.values(), "gained", "lost", "McNemar p, two-tailed", "folder")
    return Table("Runs, each against the baseline of its seed", heads, tuple(rows))


def _percent(found: Spread | None) -> str:
    if found is None:
        return UNKNOWN
    return f"{found.mean:.2%}" + ("" if found.std is None else f" ± {100 * found.std:.2f}")


def _number(found: Spread | None, form: str) -> str:
    return UNKNOWN if found is None else form.format(found.mean)


def _points(found: PairedT | None) -> str:
    if found is None:
        return UNKNOWN
    ends = "" if found.low is None or found.high is None else f" [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"
    return f"{100 * found.mean:+.2f}{ends}"


def _times(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"× {ratio:.2f}"


def p_text(value: float | None) -> str:
    """A p for people: four places."""
    return UNKNOWN if value is None else "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _heading(comparison: Comparison) -> str:
    test = comparison.test
    return (
        f"{len(comparison.arms)} arms, {sum(len(arm.runs) for arm in comparison.arms)} runs, baseline "
        f"{comparison.baseline.name}; evaluation {test['evaluation']}: task {test['task']}, {test['examples']:,} "
        f"examples, test file {test['sha256'][:12]}"
    )


def as_text(comparison: Comparison) -> str:
    """For a terminal: the verdict in one sentence, then tables of at most 80 columns."""
    names = short_names([arm.name for arm in comparison.arms])
    blocks = [wrap(verdict(comparison)), wrap(_heading(comparison)), legend(names)]
    for table in tables(comparison):
        columns, rows = table.columns, [(names[row[0]], *row[1:]) for row in table.rows]
        if columns[-1] == "folder":
            # Folders can be as long as they like; the other formats name them.
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        blocks.append(f"{wrap(table.title)}\n\n{as_lines(columns, rows)}")
    blocks.append("\n".join(wrap(f"note: {note}", "  ") for note in comparison.notes))
    return "\n\n".join(filter(None, blocks)) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """For a README or an issue."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"

    blocks = [_markdown(verdict(comparison)), _markdown(_heading(comparison))]
    for table in tables(comparison):
        rule = "|---|" + "---:|" * (len(table.columns) - 1)
        blocks.append(
            "\n".join([f"**{_markdown(table.title)}**", "", line(table.columns), rule, *map(line, table.rows)])
        )
    blocks.append("\n".join(f"- {_markdown(note)}" for note in comparison.notes))
    return "\n\n".join(blocks) + "\n"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>])", r"\\\1", text)


_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}
    | {"<": "$<$", ">": "$>$", '"': "''", "±": r"$\pm$", "Δ": r"$\Delta$", "×": r"$\times$", "–": "--"}
)


def latex_escape(text: str) -> str:
    """A text that LaTeX prints as it is."""
    # Two hyphens would become one dash.
    return "-{}".join(each.translate(_LATEX) for each in re.split("-(?=-)", text))


def as_latex(comparison: Comparison) -> str:
    """For a paper; needs the package booktabs."""
    blocks = ["% needs \\usepackage{booktabs}; with names that are not in Latin script also XeLaTeX or LuaLaTeX"]
    for table in tables(comparison):
        # Behind {}, a bracket or a star does not belong to the end of the row before.
        head, *rows = ["{}" + " & ".join(map(latex_escape, cells)) + r" \\" for cells in (table.columns, *table.rows)]
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_escape(table.title)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            *[r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}"],
        ]
        blocks.append("\n".join(lines))
    # A line break would end a comment, and names are the user's.
    blocks.append("\n".join(f"% {' '.join(note.split())}" for note in comparison.notes))
    return "\n\n".join(blocks) + "\n"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Every number, for programs; what is not known is None."""
    arms = []
    for arm in comparison.arms:
        found = comparison.differences.get(arm.name)
        runs = [
            {
                "folder": str(run.folder),
                "seed": run.seed,
                "steps": run.steps,
                **{name: run.mean(name) for name in MEASURES},
                **run.figures,
                "mcnemar": _fields(found.by_seed.get(run.seed)) if found else None,
            }
            for run in arm.runs
        ]
        arms.append(
            {
                "name": arm.name,
                "settings": arm.settings,
                "seeds": [run.seed for run in arm.runs],
                **{name: _fields(arm.spread(name)) for name in (*MEASURES, *FIGURES)},
                "difference": None if found is None else _difference(found),
                "runs": runs,
            }
        )
    return {
        "verdict": verdict(comparison),
        "test": comparison.test,
        "scores": comparison.scores,
        "baseline": comparison.baseline.name,
        "corrected": f"{comparison.tails}-tailed p, Holm",
        "arms": arms,
        "notes": list(comparison.notes),
    }


def _difference(found: Difference) -> dict[str, Any]:
    return {
        "seeds": list(found.seeds),
        **{name: _fields(test) for name, test in found.measures.items()},
        "holm": found.holm,
        "by_example": _fields(found.by_example),
        "by_example_holm": found.by_example_holm,
        "gained_lenient_before": found.known,
        "token_ratio": found.tokens,
        "flops_ratio": found.flops,
        "equal": list(found.equal),
    }


def _fields(found: Spread | PairedT | ExampleTest | None) -> dict[str, Any] | None:
    return None if found is None else found._asdict()


def as_json(comparison: Comparison) -> str:
    """:func:`as_dict` as text; numbers that JSON does not have, as a ``max_grad_norm`` of infinity, are null in it."""
    return json.dumps(finite(as_dict(comparison)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(comparison: Comparison) -> str:
    """One line for each arm, shares as numbers between 0 and 1; an empty cell for what is not known."""
    rows: list[dict[str, Any]] = []
    for arm in as_dict(comparison)["arms"]:
        row: dict[str, Any] = {"arm": arm["name"], "seeds": " ".join(arm["seeds"])}
        for name in (*MEASURES, *FIGURES):
            row |= {f"{name}_{part}": (arm[name] or {}).get(part) for part in ("mean", "std")}
        found = arm["difference"] or {}
        row["paired_seeds"] = " ".join(found.get("seeds", []))
        for name in MEASURES:
            test = found.get(name) or {}
            row |= {f"{name}_difference_{part}": test.get(part) for part in PairedT._fields if part != "n"}
        row["headline_difference_holm"] = found.get("holm")
        test = found.get("by_example") or {}
        row |= {f"example_{part}": test.get(part) for part in ExampleTest._fields}
        row |= {
            "example_holm": found.get("by_example_holm"),
            "gained_lenient_before": found.get("gained_lenient_before"),
        }
        row |= {name: found.get(name) for name in ("token_ratio", "flops_ratio")}
        rows.append(row | {"equal": " ".join(found["equal"]) or "neither" if found else None})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


FORMATS: dict[str, Callable[[Comparison], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
    "json": as_json,
}
"""What a comparison can be written as."""
