"""Read the source of a chat template, and write the values that a run fixes into it.

The source is saved with the model, so that plain transformers, vLLM and llama.cpp render the prompts of training on any
day.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from stepjepa.base.errors import UserError
from stepjepa.base.files import existing_file
from stepjepa.base.similar_names import did_you_mean
from stepjepa.chat.compiling import compile_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Some templates write today's date into the system turn; a run must not depend on the day it starts.
PINNED_DATE = datetime.date(2024, 7, 26)

# Transformers' names of the template for all chats and of the one for chats with tools.
_DEFAULT_NAME, _TOOL_USE = "default", "tool_use"

_DIRECTIVES = "aAbBcdeFHIjmMpSuUwWxXyY"
_MACRO = "macro strftime_now("

_DEFAULT = r"\{%- if (\w+) is not defined %\}\{%- set \1 = .* %\}\{%- endif %\}"
_DEFAULTS = rf"\A(?:{_DEFAULT}\n)*"


def read_template(path: str) -> str:
    """Return the source of a chat template file, without a byte order mark, which would begin every prompt.

    Raises:
        UserError: the file is missing, is not UTF-8 text, or is not valid Jinja.
    """
    file = existing_file(path, "chat template")
    try:
        source = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError("the chat template is not UTF-8 text; save it as UTF-8", path=file) from None
    try:
        compile_template(source)
    except UserError as error:
        raise error.at(file) from None
    return source


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template of a tokenizer; of several, the one for all chats, joined with the one for tools.

    Raises:
        UserError: the tokenizer has no template, or several and none is the default.
    """
    templates = tokenizer.chat_template
    if not templates:
        remedy = "use an instruction-tuned model, pass `chat_template FILE`, or train without one (`plain`)"
        raise UserError(f"the tokenizer has no chat template; {remedy}")
    if not isinstance(templates, dict):
        return str(templates)
    if _DEFAULT_NAME not in templates:
        fault = f"the tokenizer has several chat templates ({', '.join(sorted(templates))}) and none is the default"
        in_python = "in Python assign it to tokenizer.chat_template"
        raise UserError(f"{fault}; write one of them to a file and pass it as `chat_template FILE`, or {in_python}")
    default = str(templates[_DEFAULT_NAME])
    return with_tool_use(default, templates[_TOOL_USE]) if _TOOL_USE in templates else default


def with_served(templates: Mapping[str, str], change: Callable[[str], str]) -> dict[str, str]:
    """Return the templates of a tokenizer by name, with ``change`` applied to those that transformers uses by default.

    The others, which a caller has to name, are not used in training.
    """
    return {
        name: change(source) if name in (_DEFAULT_NAME, _TOOL_USE) else source for name, source in templates.items()
    }


def with_values(source: str, variables: Mapping[str, object], *, folds_system: bool, header: str) -> str:
    """Return a template with all values that a run fixes: date, variables, system role, header of an answer.

    Args:
        source: the template.
        variables: its ``chat_template_kwargs``, which become defaults.
        folds_system: put a system message into the first user message.
        header: the beginning of an answer, to be written for a generation prompt; empty if the template writes it.
    """
    source = with_pinned_date(source)
    source = with_defaults(with_folded_system(source) if folds_system else source, variables)
    return with_header(source, header) if header else source


def with_pinned_date(source: str) -> str:
    """Return a template that renders :data:`PINNED_DATE` instead of today's date."""
    if "strftime_now" in source and _MACRO not in source:
        # Some systems know a form of directives without leading zeros, such as %-d.
        day = datetime.datetime.combine(PINNED_DATE, datetime.time())
        values = [(f"%-{letter}", str(int(day.strftime(f"%{letter}")))) for letter in "dmHIMSjy"]
        values += [(f"%{letter}", day.strftime(f"%{letter}")) for letter in _DIRECTIVES]
        replaced = "".join(f" | replace('{directive}', '{value}')" for directive, value in values)
        source = _before(source, f"{{%- {_MACRO}format) -%}}{{{{- format{replaced} -}}}}{{%- endmacro %}}")
    pinned = _default("date_string", PINNED_DATE.strftime("%d %b %Y"))
    if "date_string" in source and pinned not in source:
        source = _before(source, pinned)
    return source


def with_tool_use(source: str, tool_use: str) -> str:
    """Join two templates to one, as transformers chooses between them.

    Args:
        source: renders chats without tools.
        tool_use: renders chats with tools.
    """
    # Jinja drops the line end behind a block, and the last one of a template.
    first, second = (text.removesuffix("\n") for text in (tool_use, source))
    return f"{{%- if tools %}}\n{first}{{% else %}}\n{second}{{% endif %}}"


def with_defaults(source: str, variables: Mapping[str, object]) -> str:
    """Return a template with defaults of variables, which replace those of an earlier run."""
    lines = {name: _default(name, value) for name, value in variables.items()}
    # The first default of a variable wins, so those of an earlier run for the same variables are dropped.
    before, behind = re.match(_DEFAULTS, source)[0], re.sub(_DEFAULTS, "", source, count=1)  # type: ignore[index]  # matches always
    others = [line for line in before.split("\n")[:-1] if re.match(_DEFAULT, line)[1] not in lines]  # type: ignore[index]  # as above
    return "".join(f"{line}\n" for line in [*lines.values(), *others]) + behind


def with_folded_system(source: str) -> str:
    """Return a template that accepts a system message: it puts the text in front of the first user message."""
    return _before(
        source,
        "{%- if messages[0]['role'] == 'system' %}"
        "{%- if messages[0]['content'] | trim and messages | length > 1 %}"
        "{%- set messages = [{'role': messages[1]['role'], 'content': messages[0]['content'] | trim + '\\n\\n' + "
        "messages[1]['content'] | trim}] + messages[2:] %}"
        "{%- else %}{%- set messages = messages[1:] %}{%- endif %}"
        "{%- endif %}",
    )


def with_header(source: str, header: str) -> str:
    """Return the template ``source`` with the ``header`` of the assistant's turn at its end.

    The header is written only if ``add_generation_prompt`` is true.
    """
    # Jinja drops one line end at the end of a template.
    return source.removesuffix("\n") + f"{{{{ {_literal(header)} if add_generation_prompt else '' }}}}"


def _default(name: str, value: object) -> str:
    """Return a line of Jinja that sets a variable unless the caller has set it."""
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}"


def _before(source: str, prologue: str) -> str:
    # Jinja drops a line end behind a block, so that the template itself begins on a line of its own.
    return f"{prologue}\n{source}"


def _literal(value: object) -> str:
    """Return a JSON value in Jinja's syntax."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def check_variables(variables: Iterable[str], names: Collection[str]) -> None:
    """Raise ``UserError`` if one of the ``variables`` that a run sets is not among the ``names`` that can be set."""
    if unread := [name for name in variables if name not in names]:
        fault = f"chat_template_kwargs: the chat template has no variable '{unread[0]}' that can be set"
        raise UserError(f"{fault}{did_you_mean(unread[0], sorted(names)) or '; leave it out'}")
