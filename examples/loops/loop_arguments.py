"""The command line of the loops in this folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepjepa import UserError, read_records


@dataclass
class LoopArguments:
    """Records, model and length of a run."""

    records: Any
    model_name: str
    steps: int
    output_dir: Path
    shuffle: bool = True


def read_arguments(text: str | None) -> LoopArguments:
    """Read the command line; ``text`` is the docstring of the example."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--train_file", required=True, help="JSON lines with 'messages'")
    parser.add_argument("--model_name", default="preset:tiny", help="folder, hub id or preset (preset:tiny)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (100)")
    parser.add_argument("--output_dir", type=Path, required=True, help="gets the model; must not be there yet")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {args.steps}")
    if args.output_dir.exists():
        parser.error(f"{args.output_dir} already exists; name another --output_dir, or remove it")
    return LoopArguments(read_records(args.train_file), args.model_name, args.steps, args.output_dir)


def train_texts(args: LoopArguments) -> list[str]:
    """Return the texts of the records, from which a preset learns its tokenizer."""
    return [message["content"] for record in args.records for message in record.messages]


def run(train: Callable[[LoopArguments], object], text: str | None) -> None:
    """Run a loop with the command line; what a user can correct ends it with one line instead of a traceback."""
    try:
        train(read_arguments(text))
    except UserError as error:
        sys.exit(f"error: {error}")
