"""The table of docs/templates.md is what is derived from the forms of ``served_forms`` and from three real tokenizers.

``python tests/docs/test_templates_table.py`` writes it anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import served_forms
import tiny
from stepjepa.chat.template import ChatTemplate
from stepjepa.models.presets import train_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
REAL = {"Qwen2.5, its tokenizer": "qwen2.5", "OLMo-2, its tokenizer": "olmo2", "MiniMind, its tokenizer": "minimind"}
HEADER = "| form | system role | lone assistant turn | a turn ends in | thought | tools | saved template has |"


def row(name: str, template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> str:
    """A row of the table; ``variables`` are those of the run."""
    about = template.describe()
    thought = {True: "opened by the prompt", False: f"`{template.reasoning_key}`" if template.reasoning_key else "no"}
    saved = [f"date {about['date']}"] * (about["date"] != "none") + ["system text folded in"] * (
        not template.has_system_role
    )
    saved += [f"header `{template.header!r}`".replace("|", r"\|")] if template.header else []
    saved += [f"`{key}` {json.dumps(value)} unless a caller sets it" for key, value in (variables or {}).items()]
    ends = ", ".join(f"`{token}`" for token in template.stop_tokens) + " (appended)" * template.ends.appended
    cells = [
        name,
        "yes" if template.has_system_role else "no",
        "yes" if template.lone_assistant else "as a user turn",
        ends.replace("|", r"\|"),
        thought[template.opens_thought],
        "yes" if template.writes_tools else "no",
        ", ".join(saved) or "nothing new",
    ]
    return f"| {' | '.join(cells)} |"


def rows_of_forms(tokenizer: Any) -> list[str]:
    markers = served_forms.with_all_markers(tokenizer)
    return [
        row(name, ChatTemplate(served_forms.in_form(markers, name), form.variables), form.variables)
        for name, form in served_forms.FORMS.items()
    ]


@pytest.mark.slow
def test_forms(plain_tokenizer: Any) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert HEADER in lines
    assert not [line for line in rows_of_forms(plain_tokenizer) if line not in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str, real_tokenizer: Callable[..., Any]) -> None:
    assert row(name, ChatTemplate(real_tokenizer(REAL[name]))) in PAGE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    texts = [message["content"] for record in tiny.records() for message in record.messages]
    shared = PAGE.parents[2] / "shared" / "data" / "tokenizers"
    table = [
        HEADER,
        "|---" * HEADER.count(" | ") + "|---|",
        *(row(name, ChatTemplate(AutoTokenizer.from_pretrained(shared / file))) for name, file in REAL.items()),
        *rows_of_forms(train_tokenizer(texts, 290)),
    ]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index("## What is derived")
    first = next(number for number in range(begin, len(lines)) if lines[number].startswith("|"))
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    PAGE.write_text("\n".join([*lines[:first], *table, *lines[last:]]) + "\n", encoding="utf-8")
