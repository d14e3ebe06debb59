"""Make the page of ``stepjepa report``: one HTML file that loads nothing and runs only its own scripts."""

import base64
import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

from stepjepa.base.counting import counted
from stepjepa.base.errors import UserError
from stepjepa.base.files import atomic_write, check_output_file, claimed_output
from stepjepa.base.terminal import visible_lines
from stepjepa.study.arms import ComparedArms
from stepjepa.study.comparison import compare
from stepjepa.study.page.answers import answers_section
from stepjepa.study.page.charts import looks
from stepjepa.study.page.logged_run import LoggedRun, by_evaluation, read_runs
from stepjepa.study.page.markup import read_template, render
from stepjepa.study.page.parts import Section
from stepjepa.study.page.sections import (
    ComparedEvaluation,
    accuracy_section,
    comparison_section,
    embedding_section,
    overview_section,
    steps_section,
)
from stepjepa.study.run_folders import notes_on_missing_trials

_TITLED = 4
"""Maximum number of arms that the title names."""

_DAMAGED = (UserError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def write_page(
    runs: Sequence[str],
    output_file: str,
    *,
    overwrite: bool = False,
    baseline: str | None = None,
    analysis: str | None = None,
    mixed_runs: bool = False,
) -> None:
    """Write the page of runs to a file, and print its name.

    Args:
        runs: run folders and folders of sweeps.
        output_file: the file, HTML.
        overwrite: replace an existing file.
        baseline: the arm to compare with; None for that of the sweep, or the regular one.
        analysis: output folder of ``stepjepa analyze``, for its pictures; None without.
        mixed_runs: include runs whose launches had different settings.

    Raises:
        UserError: the file exists and ``overwrite`` is off, ``analysis`` holds none, or a run can't be read.
    """
    target = check_output_file(output_file, overwrite)
    if analysis is not None and not (Path(analysis) / "analysis.json").is_file():
        raise UserError("holds no analysis; name the output folder of 'stepjepa analyze'", path=analysis)
    missing = notes_on_missing_trials(runs)
    page = make_page(read_runs(runs), baseline, analysis, mixed_runs=mixed_runs, notes=missing)
    # Files of other programs may hold half of a surrogate pair, which UTF-8 can't encode.
    content = page.encode("utf-8", errors="replace")
    with claimed_output(target, overwrite), atomic_write(target, "wb") as stream:
        stream.write(content)
    print(f"written: {visible_lines(str(target))} ({len(content) / 1e6:.1f} MB); open it in a browser")


def make_page(
    runs: Sequence[LoggedRun],
    baseline: str | None = None,
    analysis: str | None = None,
    *,
    mixed_runs: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """Return the page of runs as HTML text; the same runs give the same text.

    Args:
        runs: those that the page shows.
        baseline: name of the arm to compare with; None for that of :func:`~stepjepa.study.comparison.compare`.
        analysis: output folder of ``stepjepa analyze``; None for the first that is in a run folder.
        mixed_runs: include runs whose launches had different settings.
        notes: sentences that stand above all sections, before those on the runs.
    """
    compared = compare_runs(runs, baseline, mixed_runs=mixed_runs)
    look = looks(runs, next((each.comparison for each in compared if each.comparison), None))
    scores: dict[str, Callable[[], Section]] = {"scores": lambda: accuracy_section(runs)}
    is_compared = any(each.comparison for each in compared)
    makers: dict[str, Callable[[], Section]] = {
        "arms": lambda: comparison_section(compared),
        # The outcome comes first: of arms the comparison, of other runs their scores.
        **({} if is_compared else scores),
        "charts over steps": lambda: steps_section(runs, look),
        "answers": lambda: answers_section(runs),
        **(scores if is_compared else {}),
        "embeddings": lambda: embedding_section(runs, analysis),
        "overview": lambda: overview_section(runs),
    }
    on_runs = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    on_sections: list[str] = []
    sections = []
    for name, make in makers.items():
        try:
            section = make()
            if section.parts:
                sections.append((section, section.html))
        except _DAMAGED as error:
            fault = (
                str(error) if isinstance(error, UserError) else f"a file is damaged ({type(error).__name__}: {error})"
            )
            on_sections.append(f"The section on {name} is missing: {fault}")
    first, scripts = read_template("theme.js"), [read_template("charts.js")]
    if any(section.anchor == "answers" for section, _ in sections):
        scripts.append(read_template("answers.js"))
    return render(
        "page.html",
        title=_title(runs, [each.comparison for each in compared if each.comparison]),
        policy=_content_policy([first, *scripts]),
        version=importlib.metadata.version("stepjepa"),
        style=read_template("page.css"),
        first=first,
        sections=sections,
        notes=[*notes, *on_runs, *on_sections],
        scripts=scripts,
    )


def _title(runs: Sequence[LoggedRun], comparisons: Sequence[ComparedArms]) -> str:
    """Return the title of the page: the arms by name, or the number of runs that can't be compared."""
    if len(runs) == 1:
        return f"Run {runs[0].name}"
    names = list(dict.fromkeys(arm.name for comparison in comparisons for arm in comparison.arms))
    if not names:
        return counted(len(runs), "run")
    shown, more = names[:_TITLED], len(names) - _TITLED
    further = [f"{more} more"] if more > 0 else []
    return f"{', '.join([*shown, *further])}: {counted(len(runs), 'run')}"


def _content_policy(scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that forbids all requests, and all scripts except these."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    parts = ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data:"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def compare_runs(
    runs: Sequence[LoggedRun], baseline: str | None = None, *, mixed_runs: bool = False
) -> list[ComparedEvaluation]:
    """Compare the runs by each evaluation that two finished ones have.

    Args:
        runs: those of the page.
        baseline: name of the arm to compare with; None to choose one.
        mixed_runs: include runs whose launches had different settings.

    Raises:
        UserError: the user named a baseline, and the runs can't be compared with it.
    """
    comparisons: list[ComparedEvaluation] = []
    for name, evaluated in by_evaluation(runs).items():
        finished = [run for run in evaluated if run.get("status") == "finished"]
        if len(finished) < 2:
            continue
        try:
            comparison = compare(finished, baseline=baseline, evaluation=name, mixed_runs=mixed_runs)
            comparisons.append(ComparedEvaluation(name, comparison))
        except UserError as error:
            if baseline is not None:
                raise
            comparisons.append(ComparedEvaluation(name, None, str(error)))
    if baseline is not None and not comparisons:
        raise UserError("baseline: no evaluation that two finished runs have; leave it out, or add runs")
    return comparisons
