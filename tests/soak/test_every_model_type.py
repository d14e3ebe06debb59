"""The whole sweep over model types, minutes of it: the table of docs/design.md is what it finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers

sys.path.append(str(Path(__file__).parents[1] / "models"))

from model_types import DIFFERS, MARK, MODEL_TYPES, compare, table
from test_model_types import names_by_kind

import page_tables

pytestmark = pytest.mark.slow


def test_every_model_type_is_as_the_page_says() -> None:
    compared = [compare(model_type) for model_type in MODEL_TYPES]
    assert [each for each in compared if each.kind == DIFFERS] == []
    page = page_tables.read(MARK)
    if f"transformers {transformers.__version__}:" in page:
        assert names_by_kind(page) == names_by_kind(table(compared))
