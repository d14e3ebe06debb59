"""Records of the suites ``answers`` and ``prefix``: several answers to a question; one long system prompt for all."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stepjepa import Record

Messages = list[dict[str, str]]

WORDINGS = (
    ("total", "sum", "amount"),
    ("altogether", "in all", "in total"),
    ("each", "every single"),
    ("needs", "requires"),
    ("earned", "made"),
    ("costs", "has a price of"),
    ("also", "as well"),
    ("more", "additional"),
)
"""Words that may stand for each other in a solution."""

OPENINGS = ("", "First, ", "Next, ", "We know that ", "So ", "Then ", "From this, ", "Here ", "It follows that ")
"""Words that may begin a step."""


def with_answers(records: Sequence[Record], count: int, answers: int, seed: int = 0) -> list[Messages]:
    """The first questions with several solutions each: ``count`` records in all, in random order.

    The solutions of a question have its steps in different orders and wordings, and no two are equal. They stand for
    those of rejection sampling: what matters here are their lengths, and that they share nothing but the question.
    """
    draw = random.Random(seed)
    rows = []
    for record in records[: -(-count // answers)]:
        *before, answer = ({"role": each["role"], "content": each["content"]} for each in record.messages)
        used: set[str] = set()
        for content in reworded(answer["content"], draw):
            if content not in used:
                used.add(content)
                rows.append([*before, {"role": "assistant", "content": content}])
            if len(used) == answers:
                break
    rows = rows[:count]
    draw.shuffle(rows)
    return rows


def reworded(solution: str, draw: random.Random) -> Iterator[str]:
    """Yield a GSM8K solution without end, its steps permuted and reworded; the last line stays."""
    *steps, last = solution.splitlines()
    while True:
        lines = draw.sample(steps, len(steps))
        yield "\n".join([*(draw.choice(OPENINGS) + _other_words(line, draw) for line in lines), last])


def _other_words(step: str, draw: random.Random) -> str:
    for words in WORDINGS:
        pattern = re.compile(rf"\b({'|'.join(words)})\b")
        step = pattern.sub(lambda match, words=words: draw.choice(words), step)  # type: ignore[misc]
    return step


def described_tables(path: Path) -> str:
    """All databases of a file in Spider's form: a line for each table with its columns and their types."""
    lines = []
    for database in json.loads(path.read_text(encoding="utf-8")):
        lines.append(f"Database {database['db_id']}:")
        columns = list(zip(database["column_names_original"], database["column_types"], strict=True))
        for number, table in enumerate(database["table_names_original"]):
            columns_of_table = ", ".join(f"{name} {kind}" for (owner, name), kind in columns if owner == number)
            lines.append(f"{table}({columns_of_table})")
    return "\n".join(lines)


def with_prefix(
    records: Sequence[Record], text: str, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> list[Messages]:
    """The records behind one system prompt that ends with so many ``tokens`` of a text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"text: expected at least {tokens} tokens, got {len(ids)}")
    prefix = f"Convert natural language to SQL.\n{tokenizer.decode(ids[:tokens])}"
    return [
        [
            {"role": "system", "content": prefix},
            *(
                {"role": each["role"], "content": each["content"]}
                for each in record.messages
                if each["role"] != "system"
            ),
        ]
        for record in records
    ]
