"""The page of ``stepjepa report``: one HTML file that loads nothing and runs no scripts but its own."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stepjepa import __version__
from stepjepa.errors import UserError
from stepjepa.files import atomic_write
from stepjepa.pages.curves import looks, loss_section, representation_section
from stepjepa.pages.overview import overview_section
from stepjepa.pages.render import Section, read_template, render
from stepjepa.pages.results import accuracy_section, compare_runs, comparison_section, error_section
from stepjepa.pages.runs import Run


def write_page(
    runs: Sequence[Run],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    baseline: str | None = None,
    analysis: Path | None = None,
) -> int:
    """Write the page of some runs atomically.

    Args:
        runs: from ``runs.read_runs``.
        path: of the HTML file.
        title: of the page; by default made of the names of the runs.
        baseline: the arm that the others are compared with; by default the regular one.
        analysis: output folder of ``stepjepa analyze``; by default the first one in the folder of a run.

    Returns:
        Bytes written.

    Raises:
        UserError: ``baseline`` is none of the arms, or the runs can't be compared with it.
    """
    # Files of other programs may hold half of a surrogate pair, which UTF-8 can't encode.
    page = make_page(runs, title=title, baseline=baseline, analysis=analysis).encode("utf-8", errors="replace")
    with atomic_write(path, "wb") as stream:
        stream.write(page)
    return len(page)


def make_page(
    runs: Sequence[Run],
    *,
    title: str | None = None,
    baseline: str | None = None,
    analysis: Path | None = None,
) -> str:
    """The page of some runs as text, the same for the same runs; see :func:`write_page`."""
    notes: list[str] = []
    sections = list(_sections(runs, baseline, analysis, notes))
    names = ["charts.js", *dict.fromkeys(section.script for section in sections if section.script)]
    scripts, first, plotly = [read_template(name) for name in names], read_template("theme.js"), None
    if any('class="chart"' in section.html for section in sections):
        from plotly.offline import get_plotlyjs

        # Browsers hash scripts after they have normalised line ends.
        plotly = get_plotlyjs().replace("\r\n", "\n")
    return render(
        "page.html",
        title=title or default_title(runs),
        policy=content_policy([first, *scripts, *filter(None, [plotly])]),
        version=__version__,
        style=read_template("page.css"),
        first=first,
        sections=sections,
        notes=notes,
        plotly=plotly,
        scripts=scripts,
    )


def default_title(runs: Sequence[Run]) -> str:
    """A title from the names of the runs."""
    if len(runs) == 1:
        return f"Run {runs[0].name}"
    return f"{len(runs)} runs" + (f": {', '.join(run.name for run in runs)}" if len(runs) <= 3 else "")


def content_policy(scripts: Sequence[str]) -> str:
    """A Content-Security-Policy that forbids all requests and all scripts but these."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    # Plotly writes style elements of its own, and saves a chart as a picture from a blob.
    parts = ["default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*parts, "font-src data:", "base-uri 'none'", "form-action 'none'"])


def _sections(runs: Sequence[Run], baseline: str | None, analysis: Path | None, notes: list[str]) -> Iterator[Section]:
    from stepjepa.pages.answers import answers_section
    from stepjepa.pages.embeddings import embedding_section
    from stepjepa.pages.inspector import inspector_section

    compared = compare_runs(runs, baseline)
    look = looks(runs, compared)
    makers: dict[str, Callable[[], Section | None]] = {
        "arms": lambda: comparison_section(compared),
        "overview": lambda: overview_section(runs),
        "accuracy": lambda: accuracy_section(runs),
        "losses": lambda: loss_section(runs, look),
        "similarity and ranks": lambda: representation_section(runs, look),
        "errors": lambda: error_section(runs),
        "answers": lambda: answers_section(runs),
        "embeddings": lambda: _first(runs, lambda run: embedding_section(run, analysis)),
        "records": lambda: _first(runs, inspector_section),
    }
    for name, make in makers.items():
        try:
            section = make()
        except UserError as error:
            notes.append(f"Without {name}: {error}")
            continue
        if section is not None:
            yield section


def _first(runs: Sequence[Run], make: Callable[[Run], Section | None]) -> Section | None:
    """The section of the first run that has one; runs with views come before the others."""
    return next((found for run in sorted(runs, key=lambda run: not run.uses_views) if (found := make(run))), None)
