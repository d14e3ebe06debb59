"""Damaged tables, made from a seed: CSV, TSV, JSON and Parquet as exports leave them; and ``prepare`` on them."""

from __future__ import annotations

import csv
import importlib
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bad_inputs import ODD_VALUES, attempt, damaged_text
from stepjepa.data.sources import read_records

KINDS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "gsm8k": lambda chance: {"question": _words(chance), "answer": f"2+3=5.\n{_words(chance)}\n#### 5"},
    "nq-open": lambda chance: {"question": _words(chance), "answer": ["one", _words(chance)]},
    "rotten-tomatoes": lambda chance: {"text": _words(chance), "label": chance.randrange(2)},
}
"""A sound row of some kinds of ``stepjepa prepare``."""

FORMATS = ("csv", "tsv", "json", "jsonl", "parquet")


def _words(chance: random.Random) -> str:
    return " ".join(chance.choice(["one", "two", "déjà", "four", "five"]) for _ in range(chance.randrange(2, 7)))


def _table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode(errors="surrogatepass")


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    stream = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), stream, row_group_size=2)
    return stream.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "csv": lambda rows: _table(rows, ","),
    "tsv": lambda rows: _table(rows, "\t"),
    "json": lambda rows: json.dumps(rows).encode(),
    "jsonl": lambda rows: b"".join(json.dumps(row).encode() + b"\n" for row in rows),
    "parquet": _parquet,
}


def _odd_rows(chance: random.Random, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In one row a value is another, or a column is missing or has another name."""
    row, name = chance.choice(rows), chance.choice(list(rows[0]))
    value = row.pop(name)
    change = chance.randrange(3)
    if change == 0:
        row[name] = chance.choice([*ODD_VALUES, float("nan"), "x" * 200_000, '"', "a\tb", "a\nb,c"])
    elif change == 1:
        row[chance.choice(["", "\x1b[31m", "messages", name.upper()])] = value
    return rows


def _ragged(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    extra = chance.choice([b",more", b"\tmore", b'"', b'"x"y', b"\x00", b"\r", b"\xff", b"\xef\xbb\xbf", b",,,,"])
    lines[place] = extra + lines[place] if chance.random() < 0.5 else lines[place].rstrip(b"\r\n") + extra + b"\r\n"
    return b"".join(lines)


TEXTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _ragged,
    damaged_text,
    lambda chance, text: text.decode(errors="replace").encode(chance.choice(["utf-16", "utf-8-sig", "cp037"])),
)
BINARY: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    lambda chance, data: data[: chance.randrange(len(data))],
    lambda chance, data: data[:4] + chance.randbytes(chance.randrange(100)) + data[-4:],
    # The description of the columns stands at the end; behind it are its length and four letters.
    lambda chance, data: data[:-8] + bytes([data[-8] ^ (1 << chance.randrange(8))]) + data[-7:],
)


def try_table(capsys: pytest.CaptureFixture[str], folder: Path, number: int, seed: int) -> str:
    """What ``prepare`` makes of a damaged table; what it writes can be trained on."""
    chance = random.Random(f"table {seed} {number}")
    kind, form = list(KINDS)[number % len(KINDS)], FORMATS[number % len(FORMATS)]
    rows = [KINDS[kind](chance) for _ in range(5)]
    damaged_rows = chance.random() < 0.4
    path, target = folder / f"table.{form}", folder / "prepared.jsonl"
    try:
        data = WRITERS[form](_odd_rows(chance, rows) if damaged_rows else rows)
    except Exception:
        # Rows that this format can't hold.
        data = b""
    if not damaged_rows and data:
        data = chance.choice(BINARY if form == "parquet" else TEXTS)(chance, data)
    path.write_bytes(data)
    target.unlink(missing_ok=True)
    what = f"seed {seed}, table {number}: {kind} from {form}"
    skip = ["--bad_records", "skip"] if number % 2 else []
    ending = attempt(capsys, what, "prepare", kind, "--input_file", path, "--output_file", target, *skip)
    if ending.outcome == "error":
        assert str(path) in ending.err, f"{what}: {ending.err}"
        assert not target.exists(), what
    else:
        assert read_records(target), what
    return ending.outcome
