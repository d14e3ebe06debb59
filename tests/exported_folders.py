"""Folders for sentence-transformers: write and load them, and some texts to embed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import pytest

from stepjepa import Jepa
from stepjepa.evaluation.sentence_transformer import write_sentence_transformer
from stepjepa.objectives.inputs import EmbedOptions

TEXTS = [
    "What is 3+4+5?",
    "Name a colour",
    " padded with blanks ",
    "two\n\nlines\n",
    "日本",
    "So it is, and here is a longer text than the others, with a full stop.",
    "x",
]


def sentence_transformer(folder: Path) -> Any:
    library = pytest.importorskip("sentence_transformers", reason="needs the extra 'embeddings'")
    return library.SentenceTransformer(str(folder), device="cpu")


def export(jepa: Jepa, folder: Path, **options: Unpack[EmbedOptions]) -> Path:
    folder.mkdir()
    write_sentence_transformer(jepa, folder, "m", **options)
    return folder
