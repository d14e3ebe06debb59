"""The table of docs/templates.md, derived by the code. To write it anew: ``python tests/template_table.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import chat_templates
from stepjepa.chat.template import ChatTemplate
from stepjepa.models.presets import train_tokenizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "templates.md"
BEGIN, END = "<!-- table: python tests/template_table.py -->\n", "<!-- end of table -->\n"

# Tokenizers at hand, by the family that they are of.
REAL = {"Qwen2.5": "qwen2.5", "OLMo-2": "olmo2", "MiniMind": "minimind"}
ORDER = (
    "Llama-3.2",
    "Qwen2.5",
    "Qwen3",
    "Gemma-2",
    "Gemma-3",
    "OLMo-2",
    "OpenELM",
    "Phi-3",
    "Phi-4",
    "DeepSeek-R1-Distill",
    "MiniMind",
)


def cells(family: str, load: Callable[[str], Any]) -> dict[str, str]:
    """What is derived for a family, by column.

    Args:
        family: one of ``ORDER``.
        load: gives a real tokenizer by the name of its folder.
    """
    if family in REAL:
        tokenizer, source = load(REAL[family]), "its tokenizer"
    else:
        tokenizer = chat_templates.in_form(train_tokenizer(["why", "so"], 259), chat_templates.FORMS[family])
        source = "a template of the same form"
    return {"model": family, "derived from": source, **ChatTemplate(tokenizer).describe()}


def line(values: Iterable[str]) -> str:
    """One line of a Markdown table; special tokens, which hold the very character that parts cells, as code."""
    return "| " + " | ".join(value.replace("|", "\\|").replace("'", "`") for value in values) + " |\n"


def table(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a Markdown table."""
    return line(rows[0]) + "|" + "---|" * len(rows[0]) + "\n" + "".join(line(row.values()) for row in rows)


def main() -> None:
    """Write the table into the page."""
    from transformers import AutoTokenizer

    from conftest import SHARED

    def load(name: str) -> Any:
        return AutoTokenizer.from_pretrained(str(SHARED / "tokenizers" / name))

    rows = [cells(family, load) for family in ORDER]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
