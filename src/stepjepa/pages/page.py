"""The page of a report: sections in order, in one file that needs nothing else and runs nothing that came with data."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from stepjepa import __version__
from stepjepa.errors import UserError
from stepjepa.files import atomic_write
from stepjepa.pages.arms import arms_section, compare_runs, looks
from stepjepa.pages.curves import loss_section, representation_section
from stepjepa.pages.markup import environment
from stepjepa.pages.material import Run, sweep_names
from stepjepa.pages.overview import overview_section
from stepjepa.pages.scores import accuracy_section, error_section
from stepjepa.pages.section import Section

Say = Callable[[str], None]

# More names than this are no title.
_MOST_ARMS = 4


def write_page(
    runs: Sequence[Run],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    baseline: str | None = None,
    analysis: Path | None = None,
    say: Say = lambda line: None,
) -> int:
    """Write the page of some runs, whole or not at all.

    Args:
        runs: from ``material.read_runs``.
        path: of the HTML file.
        title: of the page; by default made of the names of the runs.
        baseline: the arm that the others are compared with; by default the regular one.
        analysis: output folder of ``stepjepa analyze``; by default the first one in the folder of a run.
        say: is told what is being made.

    Returns:
        Bytes written.

    Raises:
        UserError: ``baseline`` is none of the arms, or the runs can't be compared with it.
        OSError: the file can't be written.
    """
    # What files held may be half of a character, which can't be written.
    page = make_page(runs, title=title, baseline=baseline, analysis=analysis, say=say).encode("utf-8", errors="replace")
    with atomic_write(path, "wb") as stream:
        stream.write(page)
    return len(page)


def make_page(
    runs: Sequence[Run],
    *,
    title: str | None = None,
    baseline: str | None = None,
    analysis: Path | None = None,
    say: Say = lambda line: None,
) -> str:
    """The page of some runs as text, the same for the same runs; see :func:`write_page`."""
    notes: list[str] = []
    sections = list(_sections(runs, baseline, analysis, notes, say))
    scripts = list(dict.fromkeys(section.script for section in sections if section.script))
    plotly = None
    if any('class="chart"' in section.html for section in sections):
        from plotly.offline import get_plotlyjs

        # As a browser reads it, since it hashes what it has read.
        plotly = get_plotlyjs().replace("\r\n", "\n")
        scripts = [_template("charts.js"), *scripts]
    first = _template("theme.js")
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title or default_title(runs, baseline),
            policy=content_policy([first, *scripts, *filter(None, [plotly])]),
            version=__version__,
            styles=[_template("page.css"), *dict.fromkeys(section.style for section in sections if section.style)],
            first=first,
            sections=sections,
            notes=notes,
            plotly=plotly,
            scripts=scripts,
        )
    )


def default_title(runs: Sequence[Run], baseline: str | None = None) -> str:
    """A title from the names of the runs, or of the arms of a sweep.

    Args:
        runs: of the page.
        baseline: the arm that the others are compared with, where it is not that of the sweep.
    """
    if len(runs) == 1:
        return f"Run {runs[0].name}"
    known = sweep_names(runs)
    if known is not None and 1 < len(known[0]) <= _MOST_ARMS:
        names, base = known
        base = base if baseline is None else baseline
        return f"{', '.join(name for name in names if name != base)} against {base}: {len(runs)} runs"
    names = [run.name for run in runs]
    return f"{len(runs)} runs: {', '.join(names)}" if len(runs) <= 3 else f"{len(runs)} runs"


def content_policy(scripts: Sequence[str]) -> str:
    """A Content-Security-Policy under which a page loads nothing and runs these scripts and no others.

    Args:
        scripts: of the page, as they stand between their tags.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    # Plotly writes style elements of its own, and makes a picture to save from a blob.
    parts = ["default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data: blob:"]
    return "; ".join([*parts, "font-src data:", "base-uri 'none'", "form-action 'none'"])


def _sections(
    runs: Sequence[Run], baseline: str | None, analysis: Path | None, notes: list[str], say: Say
) -> Iterator[Section]:
    from stepjepa.pages.answers import answers_section
    from stepjepa.pages.attention import inspector_section
    from stepjepa.pages.scatter import scatter_section

    say("comparing")
    compared = compare_runs(runs, baseline)
    look = looks(runs, compared)
    makers: list[tuple[str, Callable[[], Section | None]]] = [
        # What a colleague asks first.
        ("arms", lambda: arms_section(compared)),
        ("overview", lambda: overview_section(runs)),
        ("accuracy", lambda: accuracy_section(runs)),
        ("losses", lambda: loss_section(runs, look)),
        ("similarity and ranks", lambda: representation_section(runs, look)),
        ("errors", lambda: error_section(runs)),
        ("answers", lambda: answers_section(runs)),
        ("embeddings", lambda: _first(runs, lambda run: scatter_section(run, analysis))),
        ("records", lambda: _first(runs, inspector_section)),
    ]
    for what, make in makers:
        say(what)
        try:
            section = make()
        except UserError as error:
            notes.append(f"Without {what}: {error}")
            continue
        if section is not None:
            yield section


def _first(runs: Sequence[Run], make: Callable[[Run], Section | None]) -> Section | None:
    """The section of the first run that has one, of those with views before the others."""
    for run in sorted(runs, key=lambda run: run.get("jepa", "mode") == "regular"):
        section = make(run)
        if section is not None:
            return section
    return None


def _template(name: str) -> str:
    return (files("stepjepa.pages") / "templates" / name).read_text(encoding="utf-8")
