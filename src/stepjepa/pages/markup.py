"""Text and data in a page: nothing that a user, a model or a file said becomes markup."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stepjepa.terminal import finite

_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def json_block(name: str, value: Any) -> str:
    """Data for a script, as an element that browsers do not run.

    Args:
        name: the ``id`` of the element; a constant of this package.
        value: of JSON; numbers that are not finite become null, as JSON has none.

    Returns:
        ``<script type="application/json" id=NAME>``; no text in ``value`` can end the element.
    """
    return f'<script type="application/json" id="{escape(name)}">{json_text(value)}</script>'


def json_text(value: Any) -> str:
    """JSON in which no character means anything to HTML; numbers that are not finite are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPED)


def environment() -> Environment:
    """Jinja over ``pages/templates``; every value is escaped unless it is ``Markup``."""
    return Environment(
        loader=PackageLoader("stepjepa.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
