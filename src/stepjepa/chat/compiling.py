"""Compile the source of a chat template, as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from stepjepa.base.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

# Variables that every template has, and that no setting names.
_ARGUMENTS = {"messages", "tools", "documents", "add_generation_prompt"}


class Compiled(NamedTuple):
    """A compiled chat template."""

    template: Template
    marked: Template | None  # writes a mark around the text of each message; None unless the template only adds text
    variables: frozenset[str]  # the names that it reads and that a caller may set
    source: str

    def __reduce__(self) -> tuple[Callable[[str], Compiled], tuple[str]]:
        """Pickle and copy the source alone: what Jinja compiles can't be pickled."""
        return compile_template, (self.source,)


# Compiling a template takes longer than rendering many chats. A run uses one, and a few with values written into it.
@lru_cache(maxsize=16)
def compile_template(source: str) -> Compiled:
    """Compile the source of a chat template; ``UserError`` if it is not valid Jinja."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from stepjepa.chat.growth import marked_template

    with _naming_line():
        environment = _compile_jinja_template(source).environment
        template, marked = environment.from_string(source), marked_template(environment, source)
        variables = meta.find_undeclared_variables(environment.parse(source)) - {*environment.globals, *_ARGUMENTS}
    for form in filter(None, (template, marked)):
        # Jinja copies the globals for every chat; for a chain of dicts that takes as long as the rendering.
        form.globals = dict(form.globals)
    return Compiled(template, marked, frozenset(variables), source)


@contextmanager
def _naming_line() -> Iterator[None]:
    """Raise any error of the block, which compiles a template, as a ``UserError`` that names the template's line."""
    try:
        yield
    except Exception as error:  # from Jinja's parser, or from constants evaluated while compiling
        raise UserError(f"the chat template can't be read: {jinja_message(error)}") from None


def jinja_message(error: Exception) -> str:
    """Return the message of an error of Jinja, with the line of the template if it is known."""
    message, line = str(error).strip() or type(error).__name__, getattr(error, "lineno", None)
    return message if line is None else f"line {line}: {message}"
