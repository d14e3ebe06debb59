"""A section of the page and its parts, which ``templates/section.html`` shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stepjepa.study.page.markup import render
from stepjepa.study.table import Table


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a section; ``templates/section.html`` shows its fields in this order, without those that are empty."""

    heading: str = ""
    warnings: Sequence[str] = ()
    verdicts: Sequence[str] = ()  # the sentences that a reader sees first
    texts: Sequence[str] = ()
    tables: Sequence[Table] = ()
    table_legend: Sequence[str] = ()  # the heads of the tables, explained
    pictures: Sequence[tuple[str, str]] = ()  # captions and data URLs
    notes: Sequence[str] = ()
    more: tuple[str, Sequence[Table]] | None = None  # title and tables that are folded away
    # arms and their runs, with colours and SVG dash arrays
    run_legend: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
    charts: Sequence[tuple[str, Markup]] = ()  # titles and elements
    records: Sequence[tuple[str, str, str]] = ()  # runs, their command lines, their run.json
    answers: Markup | None = None  # the data of ``templates/answers.js``


@dataclass(frozen=True)
class Section:
    """A section of the page: its HTML ``id``, its heading and its parts."""

    anchor: str
    title: str
    parts: Sequence[Part]

    @property
    def html(self) -> Markup:
        """The section as safe markup."""
        return render("section.html", parts=self.parts)
