"""Special tokens that a user only spells are text, in training and in evaluation, on real tokenizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tiny
from slow_tokens import slow_tokens
from stepjepa.batch.collate import Collator, Item
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.plain_template import add_plain_tokens
from stepjepa.chat.predictors import add_predictor_tokens
from stepjepa.chat.special import SpecialTokens
from stepjepa.chat.template import Rendered
from stepjepa.config import JepaConfig
from stepjepa.data.records import Record
from stepjepa.evaluation.prompts import ShownTexts, make_example, make_template
from stepjepa.tasks.base import Continuation

SPELT = "<|predictor_1|><|eot_id|> <|im_start|>x<|im_end|>\n<|endoftext|>"
NAMES = ("qwen2.5", "olmo2", "minimind")
each_tokenizer = pytest.mark.parametrize("name", NAMES)
MODES: dict[str, dict[str, Any]] = {
    "separate": {"mode": "llm-jepa"},
    "front": {"mode": "llm-jepa", "front_pred": True},
    "branched": {"mode": "llm-jepa", "layout": "branched"},
    "steps": {"mode": "step-jepa"},
    "inplace": {"mode": "step-jepa", "layout": "inplace"},
    "plain": {"mode": "llm-jepa", "plain": True},
}


def spelling(text: str) -> Record:
    return tiny.make_record(f"Be {text}", f"What is {text}?", f"It is {text}.\n\nSo {text}\n\nend {text}")


def special_ids(tokenizer: Any) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen2.5", "separate"), ("olmo2", "plain"), *(("minimind", mode) for mode in MODES)]
)
def test_no_special_token_comes_from_a_record(real_tokenizer: Callable[[str], Any], name: str, mode: str) -> None:
    tokenizer = copy.deepcopy(real_tokenizer(name))
    add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, 2)
    config = JepaConfig(**MODES[mode], max_length=997)
    made = RecordTokenizer(tokenizer, config)
    collator, special = Collator.of(config, made.predictors.tolist()), special_ids(tokenizer)
    (harmless,), (record,) = made.tokenize([spelling("nothing")]), made.tokenize([spelling(SPELT)])
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in special
    # As many as the template and the layout write, and the same ones.
    kept = [
        [each.ids[np.isin(each.ids, list(special))].tolist() for each in collator.sequences(Item(one))]
        for one in (harmless, record)
    ]
    assert kept[0] == kept[1]
    assert any(kept[0])
    # All of the text is there.
    assert "<|predictor_1|><|eot_id|> <|im_start|>x<|im_end|>" in tokenizer.decode(record.ids)
    assert len(record.pairs) == len(harmless.pairs) > 0
    # What is taught ends the turn once, at its end.
    assert np.isin(record.ids[record.labels + 1], list(special)).sum() == 1


@pytest.mark.parametrize(
    ("name", "plain"), [("qwen2.5", True), ("olmo2", False), ("minimind", True), ("minimind", False)]
)
def test_an_evaluation_asks_with_the_tokens_of_training(
    real_tokenizer: Callable[[str], Any], name: str, plain: bool
) -> None:
    tokenizer = copy.deepcopy(real_tokenizer(name))
    if plain:
        add_plain_tokens(tokenizer)
    add_predictor_tokens(tokenizer, 1)
    record = spelling(SPELT)
    template = make_template(tokenizer, plain=plain)
    told = [Continuation("a", f"so {SPELT}"), Continuation("b", f"so {SPELT}", f"context {SPELT} ")]
    example = make_example(0, record, ShownTexts(tokenizer), template, told)
    config = JepaConfig(mode="regular", plain=plain, max_length=997)
    (trained,) = RecordTokenizer(tokenizer, config).tokenize([record])
    assert example.gold.ids == trained.ids.tolist()[: len(example.gold.ids)]
    assert example.prompt_ids == example.gold.ids[: len(example.prompt_ids)]
    predictor = tokenizer.convert_tokens_to_ids("<|predictor_1|>")
    assert predictor not in example.gold.ids
    for span in example.continuations.values():
        assert predictor not in span.ids
        assert "<|predictor_1|><|eot_id|>" in tokenizer.decode(span.ids[span.start :])


@each_tokenizer
def test_stand_ins_give_the_tokens_of_every_stretch_by_itself(real_tokenizer: Callable[[str], Any], name: str) -> None:
    tokenizer = copy.deepcopy(real_tokenizer(name))
    add_predictor_tokens(tokenizer, 1)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    made, generator = RecordTokenizer(tokenizer, JepaConfig(mode="regular")), np.random.default_rng(11)
    words = ["a", " b", "\n", "ünï", "7", "  ", "<|", "|>", "<think>", "🙂", *special]
    texts, contents = [], []
    for turn in range(31):
        text, spans = "", []
        inside = words if turn % 3 else words[:10]
        for number in range(int(generator.integers(1, 5))):
            text += "".join(generator.choice(words, int(generator.integers(0, 4)))) + special[number % len(special)]
            content = "".join(generator.choice(inside, int(generator.integers(1, 7))))
            spans.append((len(text), len(text) + len(content)))
            text += content
        texts.append(text + special[0])
        contents.append(spans)
    spelt, known = 0, SpecialTokens(tokenizer)
    for text, spans in zip(texts, contents, strict=True):
        spelt += known.spelt(text, spans)
        found = made.tokens(Rendered(text, tuple(spans), ()))
        for one, other in zip(found, slow_tokens(tokenizer, text, spans), strict=True):
            assert one.tolist() == other.tolist(), text
    assert 0 < spelt < len(texts)
    assert tokenizer(special[0])["input_ids"] == [tokenizer.convert_tokens_to_ids(special[0])], "left as it was"


def test_a_token_that_reaches_over_an_end_of_a_content_is_none(trained_tokenizer: Any) -> None:
    special = SpecialTokens(trained_tokenizer)
    text = "a<|im_end|>"
    assert [special.spelt(text, [span]) for span in ((0, 1), (0, 2), (1, 11), (10, 11), (3, 4))] == [
        *(False, True, True, True),
        # The part in the middle of a token that the template writes around it can't be told by its ends.
        False,
    ]
