"""Records of very many steps: found as one by one, with work that grows as the record does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepjepa
import tiny
from counting_text import CountingText
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.forests.forest import Forest, key_ranges, seen_lengths
from stepjepa.forests.segments import characters, token_spans
from stepjepa.forests.tokenisation import Tokens
from stepjepa.forests.views import SpanView
from stepjepa.inspection.record import inspect_record
from stepjepa.text.frames import Rendered

TEXTS = st.text(alphabet=" \n\tabé", max_size=12)


def one_by_one(view: SpanView, record: Record, whole: Rendered) -> tuple[int, int]:
    """Where a part stands, its message looked for anew."""
    start, end = whole.spans[view.message]
    trimmed = max(record.messages[view.message]["content"].find(whole.text[start:end]), 0)
    return min(max(start + view.start - trimmed, start), end), min(max(start + view.end - trimmed, start), end)


def written(contents: list[str], trims: list[bool], between: str) -> Rendered:
    """Contents as a template writes them that trims some of them."""
    text, spans = between, []
    for content, trim in zip(contents, trims, strict=True):
        part = content.strip() if trim else content
        spans.append((len(text), len(text) + len(part)))
        text += part + between
    return Rendered(text, tuple(spans), tuple(end for _, end in spans))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_parts_are_found_as_one_by_one(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([2, 3, 5]))
    contents = [data.draw(TEXTS) for _ in range(count)]
    trims = [data.draw(st.booleans()) for _ in range(count)]
    whole = written(contents, trims, data.draw(st.text(alphabet=" \na", max_size=3)))
    record = Record(tuple({"role": "user", "content": content} for content in contents))
    views = []
    for _ in range(data.draw(st.integers(0, 7))):
        message = data.draw(st.integers(0, count - 1))
        ends = sorted(data.draw(st.integers(0, len(contents[message]))) for _ in range(2))
        views.append(SpanView(message, *ends))
    assert characters(views, record, whole) == [one_by_one(view, record, whole) for view in views]
    # Tokens of one character to three, some of which share characters, as parts of one character do.
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=40))
    ends = np.minimum(np.cumsum(sizes), len(whole.text)).astype(np.int32)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int32)
    tokens = Tokens(np.arange(len(ends), dtype=np.int32), starts, ends)
    slowly = []
    for view in views:
        first, last = one_by_one(view, record, whole)
        begin = tokens.first_overlapping(first) if view.start == 0 else tokens.first_from(first)
        slowly.append((begin, tokens.first_from(last)))
    assert token_spans(views, record, whole, tokens) == slowly


def by_table(forest: Forest) -> list[list[tuple[int, int]]]:
    """Who sees whom, from the table of all segments by all segments."""
    seen = seen_lengths(forest.segments)
    result = []
    for index, segment in enumerate(forest.segments):
        for token in range(segment.start, segment.end):
            keys = set(range(segment.start, token + 1))
            for other, size in zip(forest.segments, seen[index].tolist(), strict=True):
                keys |= set(range(other.start, other.start + size))
            edges = sorted(key for key in keys if key - 1 not in keys), sorted(k + 1 for k in keys if k + 1 not in keys)
            result.append(list(zip(*edges, strict=True)))
    return result


@pytest.mark.parametrize("seed", range(101))
def test_key_ranges_equal_those_of_the_table(seed: int) -> None:
    forest = tiny.random_forest(seed)
    assert key_ranges(forest) == by_table(forest)


def test_a_message_is_looked_for_once() -> None:
    content = "  " + "x\n\n" * 1009
    trimmed = written([content], [True], "<|>")
    whole = trimmed._replace(text=CountingText(trimmed.text))
    views = [SpanView(0, 2 + 3 * step, 5 + 3 * step) for step in range(1009)]
    record = Record(({"role": "user", "content": content},))
    assert characters(views, record, whole)[:2] == [(3, 6), (6, 9)]
    assert isinstance(whole.text, CountingText)
    assert whole.text.copied == len(content.strip())


def lines_run(record: Record, tokenizer: Any, config: JepaConfig) -> int:
    """How many lines of the package are run to inspect a record."""
    ours, count = str(Path(stepjepa.__file__).parent), 0
    known: dict[CodeType, bool] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if code not in known:
            known[code] = code.co_filename.startswith(ours)
        if not known[code]:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        inspect_record([record], 0, tokenizer, config)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("layout", ["branched", "inplace"])
@pytest.mark.parametrize("max_length", [101, 100_003])
def test_inspection_of_all_pairs_does_work_that_grows_with_the_record(
    layout: Any, max_length: int, trained_tokenizer: Any
) -> None:
    """Each step more costs as many lines as the one before it, truncated or not."""
    config = JepaConfig(
        mode="step-jepa", pairs="all", layout=layout, max_length=max_length, over_length="truncate", predictors=2
    )
    sizes = [tiny.make_record("S", "q", "a\n\n" * count) for count in (150, 300, 600)]
    lines_run(sizes[0], trained_tokenizer, config)  # what is done once
    small, middle, large = (lines_run(record, trained_tokenizer, config) for record in sizes)
    assert (large - middle) / (middle - small) == pytest.approx(2, abs=0.1)
