"""Render templates and data as safe markup: text of users, models and files never becomes HTML."""

import re
from importlib.resources import files

from jinja2 import Environment, PackageLoader
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from stepjepa.base import terminal

_CODE = re.compile(r"`([\w .=-]{1,40})`|(?<![\w-])--[a-z][\w-]*")


def read_template(name: str) -> str:
    """Return the text of a file in ``templates``."""
    return (files("stepjepa.study.page") / "templates" / name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> Markup:
    """Fill in a template; escape every value that is not ``Markup``, including control characters."""
    loader = PackageLoader("stepjepa.study.page")
    environment = Environment(loader=loader, autoescape=True, finalize=_visible, trim_blocks=True, lstrip_blocks=True)
    environment.filters["code"] = with_code
    return Markup(environment.get_template(template).render(values))


def with_code(text: str) -> Markup:
    """Escape a text and mark its flags, and settings in backticks, as code, which no line breaks after its hyphens."""
    escaped = escape(terminal.visible_lines(text))
    return Markup(_CODE.sub(lambda found: f"<code>{found[1] or found[0]}</code>", escaped))


def _visible(value: object) -> object:
    """Return the value as the page shows it: control characters are made visible unless it is ``Markup``."""
    return terminal.visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def json_block(name: str, value: object) -> Markup:
    """Return an element ``<script type="application/json" id=NAME>`` with data; NaN and infinity become null."""
    text = htmlsafe_json_dumps(terminal.finite(value), allow_nan=False, separators=(",", ":"))
    return Markup('<script type="application/json" id="{}">{}</script>').format(name, text)
