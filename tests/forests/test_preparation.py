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
from slow_forests import SlowBuilder
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record, read_records
from stepjepa.errors import UserError
from stepjepa.forests import tokenisation
from stepjepa.forests.flat import FlatForests, FlatForestsBuilder
from stepjepa.forests.forest import Forest
from stepjepa.forests.preparation import prepare
from stepjepa.forests.sampler import ForestDataset
from stepjepa.forests.segments import ForestBuilder
from stepjepa.forests.tokenisation import Encoded, TextEncoder, cuts_at_added_tokens, describe

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

MORE: tuple[dict[str, Any], ...] = (
    {"mode": "llm-jepa", "layout": "branched", "last_token": -3},
    {"mode": "llm-jepa", "layout": "branched", "front_pred": True, "pooling": "mean", "predictors": 3},
    {"mode": "llm-jepa", "layout": "branched", "reverse_pred": True, "pairs": "all"},
    {"mode": "llm-jepa", "predictors": 0, "labels": "all"},
    {"mode": "step-jepa", "pairs": "all", "predictors": 0, "step_separator": "line"},
    {"mode": "step-jepa", "reverse_pred": True, "pooling": "mean", "step_separator": "line"},
    {"mode": "step-jepa", "layout": "inplace", "pairs": "all", "pooling": "mean", "step_separator": "line"},
    {"mode": "step-jepa", "layout": "inplace", "predictors": 0, "labels": "reference"},
)


def slowly(tokenizer: Any, records: list[Record], config: JepaConfig) -> list[Forest]:
    """One record at a time, by the template and the tokenizer themselves."""
    return SlowBuilder(tokenizer, config).build(records)


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


SETS = [
    *("gsm8k_test", "gsm8k_train", "hellaswag_test", "nq_open_test", "nq_open_train", "rotten_tomatoes_test"),
    *("rotten_tomatoes_train", "spider_test", "spider_train", "synth_test", "synth_train", "turk_train", "yelp_test"),
]
each_limit = pytest.mark.parametrize(
    "limit", [{"max_length": 10**6}, {"max_length": 61, "over_length": "truncate"}, {"over_length": "skip"}], ids=str
)


def assert_quick_is_slow(tokenizer: Any, records: list[Record], config: JepaConfig) -> None:
    quick, slow, flat_slow = ForestBuilder(tokenizer, config), SlowBuilder(tokenizer, config), FlatForestsBuilder()
    flat_slow.add(slow.build(records))
    found = quick.build_flat(records).arrays
    for name, wanted in flat_slow.build().arrays.items():
        np.testing.assert_array_equal(found[name], wanted, name, strict=True)
    assert quick.counts == slow.counts


@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind", "trained"])
def test_quick_forests_of_real_data_are_the_slow_ones(
    real_tokenizer: Callable[[str], Any], trained_tokenizer: Any, shared_data: Path, name: str
) -> None:
    tokenizer = trained_tokenizer if name == "trained" else real_tokenizer(name)
    records = [record for each in SETS for record in read_records(shared_data / "llm_jepa" / f"{each}.jsonl")[:7]]
    for options in (*CONFIGS.values(), *MORE):
        assert_quick_is_slow(tokenizer, [*records, *ODD], JepaConfig(**options, max_length=512, over_length="truncate"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind", "trained"])
@pytest.mark.parametrize("file", SETS)
def test_quick_forests_of_whole_sets_are_the_slow_ones(
    real_tokenizer: Callable[[str], Any], trained_tokenizer: Any, shared_data: Path, name: str, file: str
) -> None:
    tokenizer = trained_tokenizer if name == "trained" else real_tokenizer(name)
    records = read_records(shared_data / "llm_jepa" / f"{file}.jsonl")
    for options in (CONFIGS["separate"], {**CONFIGS["steps"], "step_separator": "line"}):
        assert_quick_is_slow(tokenizer, records, JepaConfig(**options, max_length=10**6))


@each_limit
def test_every_layout_with_every_limit(trained_tokenizer: Any, limit: dict[str, Any]) -> None:
    for options in (*CONFIGS.values(), *MORE):
        config = JepaConfig(**{"max_length": 61, **limit, **options})
        assert_quick_is_slow(trained_tokenizer, [*tiny.records(), *ODD], config)


@pytest.mark.parametrize(
    ("options", "record"),
    [
        ({"max_length": 29}, 1),
        ({"require_pairs": True, "mode": "step-jepa"}, 3),
        # The record without a pair comes before the one that is too long.
        ({"require_pairs": True, "mode": "step-jepa", "max_length": 61}, 3),
        ({"last_token": -61, "pairs": "all"}, None),
    ],
)
def test_the_first_wrong_record_is_the_slow_ones(
    trained_tokenizer: Any, options: dict[str, Any], record: int | None
) -> None:
    records = [*tiny.records(), tiny.make_record("S", "long " * 97, "a\n\nb", line=4), *ODD]
    with pytest.raises(UserError) as slow:
        SlowBuilder(trained_tokenizer, JepaConfig(**options)).build(records)
    with pytest.raises(UserError) as quick:
        ForestBuilder(trained_tokenizer, JepaConfig(**options)).build(records)
    assert str(quick.value) == str(slow.value)
    assert record is None or f"memory.jsonl:{record}:" in str(quick.value)


def test_blocks_share_nothing_but_what_is_known(trained_tokenizer: Any) -> None:
    builder = ForestBuilder(trained_tokenizer, JepaConfig())
    records = [*tiny.records(), *ODD]
    found = [forest for start in range(0, len(records), 2) for forest in builder.build(records[start : start + 2])]
    assert_same(found, slowly(trained_tokenizer, records, JepaConfig()))


def test_words_are_tokenised_once(trained_tokenizer: Any) -> None:
    encoder = TextEncoder(trained_tokenizer)
    asked: list[str] = []
    encode = encoder._words._encode
    encoder._words._encode = lambda words: asked.extend(words) or encode(words)
    text = "<|im_start|>user\nWhat 77 What?<|im_end|>\n"
    texts = [text, text + text, "", "<|im_end|>", "a What"]
    for _ in range(3):
        found = encoder.encode(texts)
    assert asked == ["user", "\n", "What", " ", "7", " What", "?", "a"]
    assert_same_tokens(found, encoder.encode_whole(texts))


def assert_same_tokens(found: Encoded, wanted: Encoded) -> None:
    for name in Encoded._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name, strict=True)


def test_words_are_forgotten_when_there_are_too_many(trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenisation, "_MOST_WORDS", 5)
    encoder = TextEncoder(trained_tokenizer)
    for number in range(3):
        texts = [f"<|im_start|>some words and the number {number}<|im_end|>", "And more – of them"]
        assert_same_tokens(encoder.encode(texts), encoder.encode_whole(texts))
        assert len(encoder._words) < 20


def test_places_of_many_characters_are_those_of_each(trained_tokenizer: Any) -> None:
    texts = ["<|im_start|>é3 ünï🙂c<|im_end|>", "", "abc  d"]
    found = TextEncoder(trained_tokenizer).encode(texts)
    asked = [(index, place) for index, text in enumerate(texts) for place in range(len(text) + 2)]
    numbers, places = np.array(asked, np.int64).T
    alone = [found.text(index) for index in range(3)]
    assert found.first_overlapping(numbers, places).tolist() == [alone[n].first_overlapping(c) for n, c in asked]
    assert found.first_from(numbers, places).tolist() == [alone[n].first_from(c) for n, c in asked]


def test_offsets_by_hand(trained_tokenizer: Any) -> None:
    ids, starts, ends, bounds = TextEncoder(trained_tokenizer).encode(["<|im_start|>é3<|im_end|>"])
    # Two bytes of one character share its place; special tokens are 12 and 10 characters long.
    assert starts.tolist() == [0, 12, 12, 13, 14]
    assert ends.tolist() == [12, 13, 13, 14, 24]
    assert bounds.tolist() == [0, 5]
    assert [ids[0], ids[-1]] == trained_tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize("name", ["qwen2.5", "olmo2", "minimind"])
def test_the_description_is_that_of_the_file(real_tokenizer: Callable[[str], Any], name: str) -> None:
    tokenizer = real_tokenizer(name)
    written, found = json.loads(tokenizer.backend_tokenizer.to_str()), describe(tokenizer)
    assert found["model"] == {"type": "BPE", "dropout": written["model"]["dropout"]}
    for token, wanted in zip(found["added_tokens"], written["added_tokens"], strict=True):
        assert token.items() <= wanted.items()
    for part in ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"):
        assert found[part] == written[part]


def test_only_tokenizers_that_look_at_pieces_alone_are_cut(trained_tokenizer: Any, tiny_tokenizer: Any) -> None:
    assert cuts_at_added_tokens(describe(trained_tokenizer))
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("x")])
    for name, part in (
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
        ("normalizer", normalizer),
    ):
        changed = copy.deepcopy(tiny_tokenizer)
        setattr(changed.backend_tokenizer, name, part)
        assert not cuts_at_added_tokens(describe(changed))
    for limit in ("enable_truncation", "enable_padding"):
        changed = copy.deepcopy(tiny_tokenizer)
        getattr(changed.backend_tokenizer, limit)(*([7] if limit == "enable_truncation" else []))
        assert not cuts_at_added_tokens(describe(changed))
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        value = describe(trained_tokenizer)
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
