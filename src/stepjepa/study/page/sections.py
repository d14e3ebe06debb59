"""The sections of the page: comparison, scores, charts over steps, embeddings, what was trained."""

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stepjepa.base.json_object import JsonObject
from stepjepa.base.terminal import spelled
from stepjepa.config.jepa import NEEDS_VIEWS
from stepjepa.evaluation.output import RETRIEVAL_METRICS
from stepjepa.evaluation.summary_text import MAPS, describe_readout
from stepjepa.store.metric_names import HELD_OUT, set_and_metric
from stepjepa.study.arms import ComparedArms
from stepjepa.study.page.charts import Look, curves, run_legend
from stepjepa.study.page.logged_run import LoggedRun, by_evaluation, is_number
from stepjepa.study.page.parts import Part, Section
from stepjepa.study.plot import CAPTION, picture
from stepjepa.study.table import UNKNOWN, Table, interval
from stepjepa.study.tables import first_table, heading, tables


class ComparedEvaluation(NamedTuple):
    """The comparison of the runs that have an evaluation."""

    name: str  # of the evaluation
    comparison: ComparedArms | None  # None if the runs can't be compared
    reason: str = ""  # why they can't


def comparison_section(compared: Sequence[ComparedEvaluation]) -> Section:
    """Make the section of each comparison: its verdict, a table with its legend, a picture, and all other tables."""
    parts = []
    for name, comparison, reason in compared:
        heading = f"Evaluation {name}" if len(compared) > 1 else ""
        if comparison is None:
            parts.append(Part(heading=heading, warnings=[f"The runs are not compared: {reason}"]))
        else:
            parts.append(replace(_comparison(comparison), heading=heading))
    return Section("arms", "Which arm is better", parts)


def _comparison(comparison: ComparedArms) -> Part:
    """Return the part of a comparison."""
    drawn = _embedded("svg+xml", picture(comparison, "svg", captioned=False))
    table, explained = first_table(comparison)
    return Part(
        verdicts=[f"{text[0].upper()}{text[1:]}." for text in comparison.sentences],
        texts=[heading(comparison)],
        tables=[table],
        table_legend=explained,
        pictures=[(CAPTION, drawn)],
        notes=[*map(spelled, comparison.notes)],
        more=("All scores, losses, costs and tests of the arms", tables(comparison)),
    )


def _embedded(kind: str, content: bytes) -> str:
    """Return a picture as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def accuracy_section(runs: Sequence[LoggedRun]) -> Section:
    """Make the section of all scores of every run with their intervals, and of the errors by kind."""
    evaluations = by_evaluation(runs).items()
    title = "Scores of every run" if len(runs) > 1 else "Scores"
    return Section("accuracy", title, [_scores_and_errors(name, group) for name, group in evaluations])


def _scores_and_errors(name: str, runs: Sequence[LoggedRun]) -> Part:
    """Return the part of an evaluation: headline, lenient score and stopping; errors by kind; all other figures."""
    summaries = {run.name: run.evaluations[name] for run in runs}
    # Headline and lenient score first.
    scores = dict.fromkeys(summary[name] for summary in summaries.values() for name in ("headline", "lenient"))
    scores["stopped"] = None
    first = len(scores)
    scores |= dict.fromkeys(score for summary in summaries.values() for score in summary["scores"])
    kinds = dict.fromkeys(kind for summary in summaries.values() for kind in summary.get("errors") or ())
    descriptions = dict.fromkeys(
        f"{_plain(summary['n'])} examples of {_plain(summary.get('test_file'))}, task {_plain(summary.get('task'))}, "
        f"decided by {summary['headline']}"
        for summary in summaries.values()
    )
    rows, errors = [], []
    for run, summary in summaries.items():
        similarity, counts = summary.get("similarity") or {}, summary.get("errors") or {}
        figures = (summary.get("gold_loss"), *map(similarity.get, ("matched_similarity", "shuffled_similarity")))
        rows.append((run, *(_score(summary["scores"].get(score)) for score in scores), *map(_plain, figures)))
        numbers = [counts.get(kind, 0) for kind in kinds]
        errors.append((run, *(f"{_plain(count)} ({count / summary['n']:.1%})" for count in numbers)))
    title = f"Evaluation {name}: {'; '.join(descriptions)}. Intervals are of 95% (Wilson), for the choice of examples"
    heads = ("run", *("stopped by itself" if score == "stopped" else score for score in scores))
    heads = (*heads, "LM loss on right answers", "cosine, matched", "cosine, shuffled")
    shown = [_known(title, heads[: first + 1], [row[: first + 1] for row in rows])]
    shown += _retrieval(name, summaries)
    if kinds:
        shown.append(Table(f"Evaluation {name}: wrong answers by kind", ("run", *kinds), errors))
    other = (heads[0], *heads[first + 1 :])
    others = _known(f"Evaluation {name}: other figures", other, [(row[0], *row[first + 1 :]) for row in rows])
    more = ("Other scores, losses and cosines", [others]) if len(others.columns) > 1 else None
    return Part(tables=shown, more=more)


def _known(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without the columns in which nothing is known."""
    places = [place for place in range(len(heads)) if any(row[place] != UNKNOWN for row in rows)]
    return Table(title, [heads[place] for place in places], [[row[place] for place in places] for row in rows])


def _retrieval(name: str, summaries: Mapping[str, JsonObject]) -> list[Table]:
    """Return the tables of retrieval in an evaluation, as it is and behind each map; none of what no run has."""
    as_it_is = {run: summary.get("retrieval") or {} for run, summary in summaries.items()}
    title = f"Evaluation {name}: right answers by embeddings"
    tables = [(f"{title}. Intervals are of 95%, for the choice of examples", as_it_is)]
    for of_map, (words, _) in MAPS.items():
        mapped = {run: retrieval.get(of_map) or {} for run, retrieval in as_it_is.items()}
        tables.append((f"{title} behind {words}, fitted on known pairs", mapped))
    heads = ("run", "hits at 1", "hits at 10", "MRR", "nDCG@10", "queries", "candidates", "read at")
    return [
        Table(heading, heads, [(run, *_ranking_cells(ranking)) for run, ranking in rankings.items()])
        for heading, rankings in tables
        if any(rankings.values())
    ]


def _ranking_cells(ranking: JsonObject) -> tuple[str, ...]:
    """Format the metrics of a ranking, its numbers of queries and candidates, and where embeddings were read."""
    readout = ranking.get("readout")
    counts = (ranking.get("queries"), ranking.get("candidates"), readout and describe_readout(readout))
    return (*(_score(ranking.get(metric)) for metric in RETRIEVAL_METRICS), *map(_plain, counts))


def _score(score: JsonObject | None) -> str:
    """Format a score with its 95 % interval, if it has one: ``12.5% [9.1, 16.0]``."""
    return f"{score['mean']:.1%}{interval(score.get('low'), score.get('high'))}" if score else UNKNOWN


def _plain(value: object) -> str:
    """Format any value on one line."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


_CHARTED = (
    "loss",
    "answer_",
    "similarity",
    "_rank",
    "retrieval",
    "lbd",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
)
"""Parts of the names of columns that get a chart, in the order of the charts. Columns that begin with ``train_`` get
none: they are of the whole run."""


def _compares_pairs(run: LoggedRun) -> bool:
    """Return whether the objective of a run has a term that compares pairs, as its record says."""
    return run.get("jepa", "jepa_loss_type") == "infonce" or any(
        run.get("jepa", name) for name in ("sigreg", "variance", "covariance")
    )


_HELD_OUT_LINES = (
    "Lines with diamonds are of held-out records: dotted beside training, each of several sets in its own style."
)

_ON_COLLAPSE = (
    "A falling alignment loss alone shows no success: embeddings are collapsing where shuffled pairs become as similar "
    "as matched ones, or a rank falls to 1."
)


_ON_PAIRS = (
    "A loss that compares pairs, such as InfoNCE, is the greater the more pairs it compares; held-out batches have "
    "another number of them than training, so that the two lines of a run are not on one scale."
)


def _compares_other_numbers(run: LoggedRun) -> bool:
    """Return whether a run compares more or fewer pairs at a time in training than on held-out records."""
    trained, held_out = (run.get("training", f"per_device_{part}_batch_size") for part in ("train", "eval"))
    of_step = run.get("jepa", "compare_pairs_in") == "step"
    return _compares_pairs(run) and (trained != held_out or of_step)


def _collapses(runs: Sequence[LoggedRun]) -> list[str]:
    """Return a warning of the runs whose embeddings collapsed, one line each, for each way to prevent it."""
    from stepjepa.objectives.monitors import collapse_remedies, describe_collapse

    collapsed: dict[str, list[str]] = {}
    for run in runs:
        logged = [line for line in run.metrics if is_number(line.get("shuffled_similarity"))]
        last = {name: value for name, value in logged[-1].items() if is_number(value)} if logged else {}
        if fault := describe_collapse(last):
            remedies = spelled(collapse_remedies(_compares_pairs(run)))
            collapsed.setdefault(remedies, []).append(f"{run.name}: step {last['step']:g}: {fault}")
    return ["\n".join([*lines, f"{remedies[0].upper()}{remedies[1:]}."]) for remedies, lines in collapsed.items()]


def steps_section(runs: Sequence[LoggedRun], look: Look) -> Section:
    """Make the section of charts over steps, with a legend of the runs and a warning if embeddings collapsed.

    Args:
        runs: those of the page.
        look: name of a run -> its colour and line style.
    """
    logged_names = dict.fromkeys(name for run in runs for line in run.metrics for name in line)
    trained = [name for name in logged_names if not name.startswith(HELD_OUT)]
    columns = dict.fromkeys(set_and_metric(name, trained)[1] for name in logged_names)
    charted = dict.fromkeys(name for part in _CHARTED for name in columns if part in name and name[:6] != "train_")
    charts = curves(runs, list(charted), look)
    texts = [_HELD_OUT_LINES] if len(trained) < len(logged_names) else []
    texts += [_ON_PAIRS] if texts and any(map(_compares_other_numbers, runs)) else []
    texts += [_ON_COLLAPSE] if "shuffled_similarity" in logged_names else []
    text = " ".join([*texts, "Point at a line for its numbers; drag to zoom, double-click to see all."])
    shown = run_legend([run for run in runs if run.metrics], look) if len(runs) > 1 else []
    part = Part(warnings=_collapses(runs), texts=[text], run_legend=shown, charts=charts)
    return Section("steps", "Over steps", [part] if charts else [])


def embedding_section(runs: Sequence[LoggedRun], analysis: str | None = None) -> Section:
    """Make the section of pictures of ``stepjepa analyze`` from a folder; by default the first in a run folder.

    Args:
        runs: those of the page.
        analysis: output folder of ``stepjepa analyze``; None for the first in a run folder.
    """
    inside = (file.parent for run in runs for file in sorted(run.folder.glob("*/analysis.json")))
    folder = Path(analysis) if analysis else next(inside, None)
    files = [] if folder is None else sorted(folder.glob("*.png"), key=lambda file: file.name != "projection.png")
    pictures = [(file.stem.replace("_", " "), _embedded("png", file.read_bytes())) for file in files]
    part = Part(texts=["Drawn by stepjepa analyze."], pictures=pictures)
    return Section("embeddings", "Embeddings of the views", [part] if pictures else [])


_FACTS = {
    "model": ("model",),
    "mode": ("jepa", "mode"),
    "K": ("jepa", "predictors"),
    "layout": ("jepa", "layout"),
    "seed": ("training", "seed"),
    "steps": ("results", "steps"),
    "tokens": ("results", "tokens"),
    "FLOPs": ("results", "flops"),
    "seconds": ("results", "train_seconds"),
}


def _fact(run: LoggedRun, path: Sequence[str]) -> object:
    """Return a value of the run record; None for a setting that needs views if the run has none."""
    has_no_views = path[0] == "jepa" and path[1] in NEEDS_VIEWS and run.get("jepa", "mode") == "regular"
    return None if has_no_views else run.get(*path)


def overview_section(runs: Sequence[LoggedRun]) -> Section:
    """Make the section of what was trained: main facts, command lines and the complete run record."""
    facts = [(run.name, *(_plain(_fact(run, path)) for path in _FACTS.values())) for run in runs]
    details = []
    for run in runs:
        command = shlex.join(["stepjepa", *map(str, run.get("command") or ())])
        details.append((run.name, command, json.dumps(run.run, indent=2, ensure_ascii=False)))
    part = Part(tables=[_known("Runs", ("run", *_FACTS), facts)], records=details)
    return Section("overview", "What was trained", [part])
