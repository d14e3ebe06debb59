"""The page of ``stepjepa report``: one HTML file that loads nothing and runs no scripts but its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stepjepa import terminal
from stepjepa.compare.charts import UNKNOWN, Look, curves, json_block, looks, number, plain, read_template, render
from stepjepa.compare.comparison import Comparison, compare, verdict
from stepjepa.compare.evaluated_run import settings_of
from stepjepa.compare.logged_run import Evaluation, Run, is_number
from stepjepa.compare.plot import svg
from stepjepa.compare.tables import Table, tables
from stepjepa.errors import UserError
from stepjepa.files import atomic_write, read_jsonl
from stepjepa.terminal import visible_lines

LONGEST = 4000
"""Characters of an answer that are shown."""

_DAMAGED = (UserError, KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class Section:
    """A part of the page: its ``id``, its heading, safe markup, and the name of its script in ``templates``."""

    anchor: str
    title: str
    html: Markup
    script: str | None = None


def write_page(runs: Sequence[Run], path: str | os.PathLike[str], **options: Any) -> int:
    """Write the page of some runs atomically; options as for :func:`make_page`. Returns the number of bytes written."""
    # Files of other programs may hold half of a surrogate pair, which UTF-8 can't encode.
    page = make_page(runs, **options).encode("utf-8", errors="replace")
    with atomic_write(path, "wb") as stream:
        stream.write(page)
    return len(page)


def make_page(
    runs: Sequence[Run], *, title: str | None = None, baseline: str | None = None, analysis: Path | None = None
) -> str:
    """The page of some runs as text, the same for the same runs.

    Args:
        runs: from ``logged_run.read_runs``.
        title: of the page; by default made of the names of the runs.
        baseline: the arm that the others are compared with; by default the regular one.
        analysis: output folder of ``stepjepa analyze``; by default the first one in the folder of a run.

    Raises:
        UserError: ``baseline`` is none of the arms, or the runs can't be compared with it.
    """
    compared = compare_runs(runs, baseline)
    look = looks(runs, [comparison for _, comparison, _ in compared])
    makers: dict[str, Callable[[], Section | None]] = {
        "arms": lambda: comparison_section(compared),
        "accuracy": lambda: accuracy_section(runs),
        "losses": lambda: loss_section(runs, look),
        "similarity and ranks": lambda: representation_section(runs, look),
        "answers": lambda: answers_section(runs),
        "embeddings": lambda: embedding_section(runs, analysis),
        "overview": lambda: overview_section(runs),
    }
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    sections = []
    for name, make in makers.items():
        try:
            sections.append(make())
        except _DAMAGED as error:
            notes.append(f"Without {name}: {error}")
    shown = [section for section in sections if section is not None]
    scripts = [read_template(name) for name in ("charts.js", *(each.script for each in shown if each.script))]
    first, plotly = read_template("theme.js"), None
    if any('class="chart"' in section.html for section in shown):
        from plotly.offline import get_plotlyjs

        # Browsers hash scripts after they have normalised line ends.
        plotly = get_plotlyjs().replace("\r\n", "\n")
    return render(
        "page.html",
        title=title or (f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"),
        policy=_content_policy([first, *scripts, *filter(None, [plotly])]),
        version=importlib.metadata.version("stepjepa"),
        style=read_template("page.css"),
        first=first,
        sections=shown,
        notes=notes,
        plotly=plotly,
        scripts=scripts,
    )


def _content_policy(scripts: Sequence[str]) -> str:
    """A Content-Security-Policy that forbids all requests and all scripts but these."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    # Plotly writes style elements of its own, and saves a chart as a picture from a blob.
    parts = ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*parts, "font-src data:", "base-uri 'none'", "form-action 'none'"])


def by_evaluation(runs: Sequence[Run]) -> dict[str, list[tuple[Run, Evaluation]]]:
    """The runs that have each evaluation, by its name."""
    found: dict[str, list[tuple[Run, Evaluation]]] = {}
    for run in runs:
        for name, evaluation in run.evaluations.items():
            found.setdefault(name, []).append((run, evaluation))
    return found


def compare_runs(runs: Sequence[Run], baseline: str | None = None) -> list[tuple[str, Comparison | None, str]]:
    """Compare the finished runs, once for each evaluation that at least two of them have.

    Returns:
        The name of the evaluation, the comparison, and the reason where there is none.

    Raises:
        UserError: the user named a baseline, and the runs can't be compared with it.
    """
    found: list[tuple[str, Comparison | None, str]] = []
    for name, evaluated in by_evaluation(runs).items():
        finished = [run for run, _ in evaluated if run.get("status") == "finished"]
        if len(finished) < 2:
            continue
        try:
            found.append((name, compare(finished, baseline=baseline, evaluation=name), ""))
        except UserError as error:
            if baseline is not None:
                raise
            found.append((name, None, str(error)))
    return found


def comparison_section(compared: Sequence[tuple[str, Comparison | None, str]]) -> Section | None:
    """The verdict, the tables and the picture of each comparison; None where there was nothing to compare."""
    parts: list[dict[str, Any]] = []
    for name, comparison, reason in compared:
        part: dict[str, Any] = {"name": name, "reason": reason}
        if comparison is not None:
            said = verdict(comparison)
            part |= {"verdict": f"{said[0].upper()}{said[1:]}.", "notes": comparison.notes}
            part |= {"tables": tables(comparison), "picture": _embedded("svg+xml", svg(comparison))}
        parts.append(part)
    return Section("arms", "Arms over seeds", render("arms.html", parts=parts)) if parts else None


def _embedded(kind: str, content: bytes) -> str:
    """A picture as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def accuracy_section(runs: Sequence[Run]) -> Section | None:
    """Every score of every run with its interval, and its errors by kind; None where nothing was evaluated."""
    found = [table for name, evaluated in by_evaluation(runs).items() for table in _scores_and_errors(name, evaluated)]
    return Section("accuracy", "Accuracy", render("tables.html", tables=found)) if found else None


def _scores_and_errors(name: str, evaluated: Sequence[tuple[Run, Evaluation]]) -> list[Table]:
    # Headline and lenient score first.
    scores = dict.fromkeys(each.summary[which] for _, each in evaluated for which in ("headline", "lenient"))
    scores |= dict.fromkeys(score for _, each in evaluated for score in each.summary["scores"])
    kinds = dict.fromkeys(kind for _, each in evaluated for kind in each.summary.get("errors") or ())
    rows, errors = [], []
    about = dict.fromkeys(
        f"{number(each.summary['n'])} examples of {plain(each.summary.get('test_file'))}, task "
        f"{plain(each.summary.get('task'))}, decided by {each.summary['headline']}"
        for _, each in evaluated
    )
    for run, each in evaluated:
        summary, similarity = each.summary, each.summary.get("similarity") or {}
        cells = [_interval(summary["scores"].get(score)) for score in scores]
        cells += [number(summary.get("gold_loss"), "{:.3f}")]
        cells += [number(similarity.get(f"{kind}_similarity"), "{:.3f}") for kind in ("matched", "shuffled")]
        rows.append((run.name, *cells))
        counts = [(summary.get("errors") or {}).get(kind, 0) for kind in kinds]
        errors.append((run.name, *(f"{number(count)} ({count / summary['n']:.1%})" for count in counts)))
    title = f"Evaluation {name}: {'; '.join(about)}. Intervals are of 95 % (Wilson), for the choice of examples"
    heads = ("run", *("stopped by itself" if score == "stopped" else score for score in scores))
    found = [Table(title, (*heads, "LM loss on right answers", "cosine, matched", "cosine, shuffled"), rows)]
    return [*found, Table(f"Evaluation {name}: errors by kind", ("run", *kinds), errors)] if kinds else found


def _interval(score: dict[str, Any] | None) -> str:
    """A score with its 95 % interval, where it has one: ``12.5% [9.1, 16.0]``."""
    if score is None:
        return UNKNOWN
    ends = [f"{100 * score[end]:.1f}" for end in ("low", "high") if is_number(score.get(end))]
    return f"{score['mean']:.1%}" + (f" [{', '.join(ends)}]" if ends else "")


def _columns(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name.removeprefix("eval_") for run in runs for line in run.metrics for name in line)
    return [f"eval_{name}" if name.startswith("answer_") else name for name in names]


def _over_steps(
    anchor: str, title: str, runs: Sequence[Run], look: Look, columns: Sequence[str], **values: Any
) -> Section | None:
    charts = curves(anchor, runs, columns, look)
    legend = [(run.name, *look[run.name]) for run in runs if run.metrics] if len(runs) > 1 else []
    html = render("curves.html", anchor=anchor, charts=charts, legend=legend, **{"rest": [], "collapsed": [], **values})
    return Section(anchor, title, html) if charts else None


def loss_section(runs: Sequence[Run], look: Look) -> Section | None:
    """Losses, scores during training, gradient norm, learning rate and speed; None where nothing was logged."""
    columns = [name for name in _columns(runs) if name.endswith("loss") or name.startswith("eval_answer_")]
    rest = curves("losses-rest", runs, ("lbd", "grad_norm", "learning_rate", "tokens_per_second"), look)
    return _over_steps("losses", "Losses over steps", runs, look, columns, rest=rest)


def representation_section(runs: Sequence[Run], look: Look) -> Section | None:
    """Similarity and effective ranks, with a warning where embeddings collapsed; None where nothing was logged."""
    from stepjepa.objectives.monitors import REMEDIES, collapse

    collapsed = []
    for run in runs:
        logged = [line for line in run.metrics if is_number(line.get("shuffled_similarity"))]
        if logged and (found := collapse({name: each for name, each in logged[-1].items() if is_number(each)})):
            collapsed.append((run.name, f"step {logged[-1]['step']:g}: {found}; {REMEDIES}"))
    # What a rank is of, rank_pairs, is no sign of anything.
    signs = ("similarity", "_rank", "retrieval")
    columns = [name for name in _columns(runs) if any(part in name for part in signs)]
    title = "Similarity and effective rank over steps"
    return _over_steps("representations", title, runs, look, columns, collapsed=collapsed)


def embedding_section(runs: Sequence[Run], analysis: Path | None = None) -> Section | None:
    """The pictures of ``stepjepa analyze``; None where there are none.

    Args:
        runs: in whose folders an analysis is looked for.
        analysis: its folder, if it lies elsewhere.
    """
    inside = (file.parent for run in runs for file in sorted(run.folder.glob("*/analysis.json")))
    folder = analysis or next(inside, None)
    pictures = [] if folder is None else sorted(folder.glob("*.png"), key=lambda file: file.name != "projection.png")
    shown = [(file.stem.replace("_", " "), _embedded("png", file.read_bytes())) for file in pictures]
    return Section("embeddings", "Embeddings of the views", render("pictures.html", pictures=shown)) if shown else None


def overview_section(runs: Sequence[Run]) -> Section:
    """What was trained: main facts, the settings in which runs differ, command lines, versions."""
    facts = [_facts(run) for run in runs]
    rows = [(run.name, *found.values()) for run, found in zip(runs, facts, strict=True)]
    found = [Table("Runs", ("run", *facts[0]), rows)]
    settings = []
    for run in runs:
        try:
            settings.append({name: plain(value) for name, value in settings_of(run.folder).items()})
        except UserError:
            settings.append({})
    names = dict.fromkeys(name for each in settings for name in each)
    differing = [name for name in names if len({each.get(name) for each in settings}) > 1]
    if differing:
        rows = [
            (run.name, *(each.get(name, UNKNOWN) for name in differing))
            for run, each in zip(runs, settings, strict=True)
        ]
        found.append(Table("Settings in which the runs differ", ("run", *differing), rows))
    texts = [
        (
            run.name,
            shlex.join(["stepjepa", *map(str, run.get("command") or ())]),
            json.dumps(run.run, indent=2, ensure_ascii=False),
        )
        for run in runs
    ]
    return Section("overview", "What was trained", render("overview.html", tables=found, runs=texts))


def _facts(run: Run) -> dict[str, str]:
    mode = plain(run.get("jepa", "mode"))
    if mode not in (UNKNOWN, "regular"):
        mode += f", K = {plain(run.get('jepa', 'predictors'))}, layout {plain(run.get('jepa', 'layout'))}"
    seconds = run.get("results", "train_seconds")
    return {
        "model": plain(run.get("model")),
        "mode": mode,
        "status": plain(run.get("status")),
        "seed": plain(run.get("training", "seed")),
        "trained parameters": number(run.get("parameters", "trained")),
        "training data": plain(run.get("data", "train", "file")),
        "records": number(run.get("data", "train", "records")),
        "steps": number(run.get("results", "steps")),
        "tokens": number(run.get("results", "tokens")),
        "tokens over regular": number(run.get("tokens", "ratio"), "× {:.2f}"),
        "FLOPs": number(run.get("results", "flops"), "{:.3g}"),
        "time": terminal.duration(seconds) if is_number(seconds) and seconds >= 0 else UNKNOWN,
    }


def answers_section(runs: Sequence[Run]) -> Section | None:
    """The answers of all evaluations; None where no evaluation has kept any.

    Raises:
        UserError: a file of answers can't be read.
    """
    # Two evaluations ask the same questions, so each distinct text stands once.
    texts: dict[str, int] = {}
    evaluations = [_answers(run.name, evaluation, texts) for run in runs for evaluation in run.evaluations.values()]
    found = [each for each in evaluations if each is not None]
    data = json_block("answers-data", {"texts": list(texts), "evaluations": found})
    return Section("answers", "Generated answers", render("answers.html", data=data), "answers.js") if found else None


def _answers(run: str, evaluation: Evaluation, texts: dict[str, int]) -> dict[str, Any] | None:
    """One evaluation for the script, or None where nothing was generated.

    Of each answer: index, number of the prompt, number of the right answer, what was generated, whether it is right,
    whether the model stopped (null: not known), the kind of error, and the scores in the order of ``scores``.
    """
    lines = [] if evaluation.answers is None else [line for _, line in read_jsonl(evaluation.answers)]
    lines = [line for line in lines if isinstance(line.get("generated"), str)]
    if not lines:
        return None
    headline = evaluation.summary["headline"]
    prompts = [shown_text(line.get("prompt")) for line in lines]
    # The system prompt, which all prompts begin with, stands once.
    begin = os.path.commonprefix(prompts) if len(prompts) > 1 else ""  # noqa: RUF071  # of characters, not of folders
    begin = begin[: begin.rfind("\n") + 1]
    names = list(dict.fromkeys(name for line in lines for name in line["scores"]))

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    answers = [
        [
            line["index"],
            place(prompt[len(begin) :]),
            place(shown_text(line.get("truth"))),
            shown_text(line["generated"]),
            # The mean over samples.
            line["scores"][headline] > 0.5,
            None if line.get("stopped") is None else line["stopped"] == 1,
            shown_text(line.get("error")),
            [round(float(line["scores"][name]), 4) for name in names],
        ]
        for line, prompt in zip(lines, prompts, strict=True)
    ]
    return {
        "run": visible_lines(run),
        "name": visible_lines(evaluation.name),
        "test": evaluation.summary.get("test_fingerprint"),
        "headline": shown_text(headline),
        "scores": [visible_lines(name) for name in names],
        "samples": max(len(line.get("samples") or ()) for line in lines),
        "begin": begin,
        "answers": answers,
    }


def shown_text(value: Any) -> str:
    """A field as the page shows it: several right answers on lines of their own, control characters escaped, cut."""
    if isinstance(value, Iterable) and not isinstance(value, str | dict):
        return "\n".join(map(shown_text, value))
    text = "" if value is None else str(value)
    more = len(text) - LONGEST
    return visible_lines(text) if more <= 0 else f"{visible_lines(text[:LONGEST])}\n[... {more:,} more characters]"
