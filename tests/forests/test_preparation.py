"""Preparation, the quick way against the slow: records one at a time, templates run, texts tokenised whole."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import normalizers, pre_tokenizers

import chat_templates
import tiny
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, read_records
from stepjepa.errors import UserError
from stepjepa.forests.flat import FlatForests, FlatForestsBuilder
from stepjepa.forests.forest import Forest
from stepjepa.forests.preparation import prepare
from stepjepa.forests.sampler import ForestDataset
from stepjepa.forests.segments import ForestBuilder
from stepjepa.forests.tokenisation import TextEncoder, cuts_at_added_tokens

ODD = [
    tiny.make_record("  lead", "trail \n\n", "\n x\n\n y \n", line=11),
    tiny.make_record("", "ünïcode 你好 🙂🙂", "a<|im_end|>b\n\nc <|predictor_1|> d", line=12),
    tiny.make_record(" ", "u", "a", "once more", "<|pad|><|pad|> \n\nand\u00a0", line=13),
]
CONFIGS: dict[str, dict[str, Any]] = {
    "separate": {"mode": "llm-jepa", "pairs": "all"},
    "front": {"mode": "llm-jepa", "front_pred": True, "predictors": 2, "pooling": "mean"},
    "reverse": {"mode": "llm-jepa", "reverse_pred": True, "last_token": -2},
    "steps": {"mode": "step-jepa", "pairs": "all"},
    "inplace": {"mode": "step-jepa", "layout": "inplace"},
    "reference": {"mode": "regular", "labels": "reference"},
}


def slowly(tokenizer: Any, records: list[Record], config: JepaConfig) -> list[Forest]:
    """One record at a time, by the template and the tokenizer themselves."""
    builder = ForestBuilder(tokenizer, config)
    builder.template._inert = False
    builder._encoder._pattern = None
    return [forest for record in records for forest in builder.build([record])]


def assert_same(found: Any, wanted: list[Forest]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        tiny.assert_same_forest(one, other)
        assert one.pooled.dtype == other.pooled.dtype
        assert one.pooled.tolist() == other.pooled.tolist()


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", [None, *chat_templates.FORMS])
def test_quick_forests_are_the_slow_ones(trained_tokenizer: Any, form: str | None, options: dict[str, Any]) -> None:
    tokenizer = trained_tokenizer
    if form is not None:
        tokenizer = chat_templates.in_form(trained_tokenizer, chat_templates.FORMS[form])
    config = JepaConfig(**options)
    records = [*tiny.records(), *ODD]
    data = prepare(records, tokenizer, config)
    wanted = slowly(tokenizer, records, config)
    assert_same(data.dataset.forests, wanted)
    assert data.tokens["all"] == sum(len(forest) for forest in wanted)
    assert data.tokens["main"] == sum(len(forest.without_views()) for forest in wanted)


@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind"])
def test_quick_forests_of_real_tokenizers_are_the_slow_ones(
    real_tokenizer: Callable[[str], Any], shared_data: Path, name: str
) -> None:
    tokenizer = real_tokenizer(name)
    records = [*read_records(shared_data / "llm_jepa" / "gsm8k_train.jsonl")[:41], *ODD]
    for options in (CONFIGS["separate"], {**CONFIGS["steps"], "step_separator": "line"}):
        config = JepaConfig(**options, max_length=1024)
        assert_same(prepare(records, tokenizer, config).dataset.forests, slowly(tokenizer, records, config))


def test_blocks_share_nothing_but_what_is_known(trained_tokenizer: Any) -> None:
    builder = ForestBuilder(trained_tokenizer, JepaConfig())
    records = [*tiny.records(), *ODD]
    found = [forest for start in range(0, len(records), 2) for forest in builder.build(records[start : start + 2])]
    assert_same(found, slowly(trained_tokenizer, records, JepaConfig()))


def test_pieces_are_tokenised_once(trained_tokenizer: Any) -> None:
    encoder = TextEncoder(trained_tokenizer)
    asked: list[str] = []
    encode = encoder._encode_pieces
    encoder._encode_pieces = lambda pieces: asked.extend(pieces) or encode(pieces)  # type: ignore[method-assign]
    text = "<|im_start|>user\nWhat?<|im_end|>\n"
    for _ in range(3):
        found = encoder.encode([text, text + text, "", "<|im_end|>"])
    assert asked == ["user\nWhat?", "\n"]
    wanted = encoder.encode_whole([text, text + text, "", "<|im_end|>"])
    for one, other in zip(found, wanted, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.offsets.tolist() == other.offsets.tolist()


def test_offsets_by_hand(trained_tokenizer: Any) -> None:
    ((ids, offsets),) = TextEncoder(trained_tokenizer).encode(["<|im_start|>é3<|im_end|>"])
    # Two bytes of one character share its place; special tokens are 12 and 10 characters long.
    assert offsets.tolist() == [[0, 12, 12, 13, 14], [12, 13, 13, 14, 24]]
    assert [ids[0], ids[-1]] == trained_tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


def described(tokenizer: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return value


def test_only_tokenizers_that_look_at_pieces_alone_are_cut(trained_tokenizer: Any, tiny_tokenizer: Any) -> None:
    assert cuts_at_added_tokens(described(trained_tokenizer))
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("x")])
    for name, part in (
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
        ("normalizer", normalizer),
    ):
        changed = copy.deepcopy(tiny_tokenizer)
        setattr(changed.backend_tokenizer, name, part)
        assert not cuts_at_added_tokens(described(changed))
    for limit in ("enable_truncation", "enable_padding"):
        changed = copy.deepcopy(tiny_tokenizer)
        getattr(changed.backend_tokenizer, limit)(*([7] if limit == "enable_truncation" else []))
        assert not cuts_at_added_tokens(described(changed))
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        value = described(trained_tokenizer)
        value["added_tokens"][1][flag] = True
        assert not cuts_at_added_tokens(value)


def test_a_tokenizer_that_is_not_cut_gives_its_own_tokens(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    encoder = TextEncoder(tiny_tokenizer)
    assert encoder._pattern is None
    config = JepaConfig()
    found = prepare(ODD, tiny_tokenizer, config).dataset.forests
    assert_same(found, slowly(tiny_tokenizer, ODD, config))


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(trained_tokenizer: Any, was_on: bool) -> None:
    try:
        (gc.enable if was_on else gc.disable)()
        prepare(tiny.records(), trained_tokenizer, JepaConfig())
        assert gc.isenabled() == was_on
        with pytest.raises(UserError, match="max_length 3"):
            prepare(tiny.records(), trained_tokenizer, JepaConfig(max_length=3))
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


@pytest.fixture
def forests(trained_tokenizer: Any) -> list[Forest]:
    config = JepaConfig(mode="step-jepa", pairs="all", layout="branched")
    return ForestBuilder(trained_tokenizer, config).build([*tiny.records(), *ODD])


def flat(forests: list[Forest], block: int = 2) -> FlatForests:
    builder = FlatForestsBuilder()
    for start in range(0, len(forests), block):
        builder.add(forests[start : start + block])
    return builder.build()


def test_flat_forests_are_the_same_forests(forests: list[Forest]) -> None:
    found = flat(forests)
    assert_same(found, forests)
    assert_same(found[1:-1], forests[1:-1])
    tiny.assert_same_forest(found[-1], forests[-1])
    for index in (len(forests), -len(forests) - 1):
        with pytest.raises(IndexError, match=f"below {len(forests)}"):
            found[index]


def test_lengths_are_counted_without_making_forests(trained_tokenizer: Any, forests: list[Forest]) -> None:
    inplace = JepaConfig(mode="step-jepa", layout="inplace")
    for some in (forests, ForestBuilder(trained_tokenizer, inplace).build(tiny.records())):
        quick, slow = ForestDataset(flat(some)), ForestDataset(some)
        assert quick.lengths == slow.lengths
        assert quick.text_lengths == slow.text_lengths


def test_no_forests_are_none() -> None:
    found = FlatForestsBuilder().build()
    assert len(found) == 0
    assert found.lengths == found.text_lengths == []


def test_flat_forests_can_not_be_changed_by_chance(forests: list[Forest]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        flat(forests)[0].input_ids[0] = 3


def test_other_forests_and_other_arrays_are_refused(forests: list[Forest]) -> None:
    with pytest.raises(ValueError, match="pooled"):
        FlatForestsBuilder().add([forests[0].without_views()])
    arrays = flat(forests).arrays
    for change in (
        {"input_ids": arrays["input_ids"][:-1]},
        {"pairs": arrays["pairs"].astype(np.int64)},
        {"segments": arrays["segments"][:, :5]},
        {"token_bounds": arrays["token_bounds"][::-1]},
        {"lines": arrays["lines"][1:]},
    ):
        with pytest.raises(ValueError, match="expected"):
            FlatForests({**arrays, **change})
    with pytest.raises(ValueError, match="expected the arrays"):
        FlatForests({"lines": arrays["lines"]})


def test_a_template_is_run_once_for_chats_of_like_roles(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    builder = ForestBuilder(tiny_tokenizer, JepaConfig())
    builder.build(tiny.records())
    monkeypatch.setattr(builder.template, "_apply", lambda messages: pytest.fail("the template was run"))
    builder.build(tiny.records())


def test_a_template_that_looks_into_contents_is_run(trained_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(trained_tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}{% if 'Red' in message.content %}!{% endif %}"
        "\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    config = JepaConfig()
    assert_same(prepare(tiny.records(), tokenizer, config).dataset.forests, slowly(tokenizer, tiny.records(), config))
