"""A part of a page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """What stands under one heading.

    The page runs only scripts that came in ``script`` (its Content-Security-Policy names their hashes): a ``<script>``
    that got into ``html``, or an ``onclick=``, does nothing. Data for scripts goes into ``html`` as
    ``<script type="application/json">``, written by :func:`stepjepa.pages.markup.json_block`.

    Attributes:
        anchor: the ``id`` of the section, letters, digits and hyphens; the navigation links to it.
        title: the heading, plain text (escaped by the page).
        html: markup that is safe already: everything that a user, a model or a file said is escaped.
        script: JavaScript of the section, a constant of this package; run once, when the document is parsed.
        style: CSS of the section, a constant of this package.
    """

    anchor: str
    title: str
    html: str
    script: str = ""
    style: str = ""
