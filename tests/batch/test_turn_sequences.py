"""Records of which each turn is a sequence of its own: lengths, labels, views and steps of each."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import served_forms
import tiny
from served_forms import TOOLS, chat, with_call, with_thoughts
from stepjepa.base.errors import UserError
from stepjepa.batch.flat_record import flattened, unflattened
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.special_tokens import add_predictor_tokens
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.data.records import parse_record
from stepjepa.views.sequences import TokenizedRecord, View

REGULAR = JepaConfig(mode="regular", max_length=4096)
LLM = JepaConfig(layout="branched", predictors=2, pairs="all", max_length=4096)
THOUGHTS = with_thoughts(
    "2+3?", "Two and three.\n\nFive.", "5", "And 1?", "Five and one.", "6", "And 2?", "Eight?", "8"
)


@pytest.fixture(scope="module")
def qwen3(plain_tokenizer: Any) -> Any:
    tokenizer = served_forms.in_form(served_forms.with_all_markers(plain_tokenizer), "Qwen3")
    add_predictor_tokens(tokenizer, 4)
    return tokenizer


def record(messages: list[dict[str, Any]], **fields: Any) -> Record:
    return parse_record({"messages": messages, **fields}, "data.jsonl", 3)


def made(tokenizer: Any, config: JepaConfig, messages: Any = THOUGHTS, **fields: Any) -> TokenizedRecord:
    (result,) = RecordTokenizer(tokenizer, config).tokenize([record(messages, **fields)])
    return result


def text(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode([*ids], clean_up_tokenization_spaces=False))


def content(tokenizer: Any, view: View) -> str:
    return text(tokenizer, view.ids[view.start : view.end - view.predictors])


def test_each_turn_is_a_text_with_its_labels_and_the_question_since_the_turn_before(qwen3: Any) -> None:
    result = made(qwen3, REGULAR)
    assert len(result.texts) == 3
    answers = ["<think>\nTwo and three.\n\nFive.\n</think>\n\n5", "<think>\nFive and one.\n</think>\n\n6"]
    answers += ["<think>\nEight?\n</think>\n\n8"]
    for each, question, answer in zip(result.texts, ["2+3?", "And 1?", "And 2?"], answers, strict=True):
        assert text(qwen3, each.ids[each.labels + 1]) == f"{answer}<|im_end|>"
        assert text(qwen3, each.ids[each.prompt + 1]) == question
    # The thoughts of earlier turns are in none of the later ones.
    assert "Five and" not in text(qwen3, result.texts[2].ids)


def test_equal_turns_of_a_chat_that_is_not_rewritten_are_one_text(trained_tokenizer: Any) -> None:
    result = made(trained_tokenizer, REGULAR, chat("a?", "b", "c?", "d"))
    assert len(result.texts) == 1
    assert text(trained_tokenizer, result.ids[result.labels + 1]) == "b<|im_end|>d<|im_end|>"
    assert text(trained_tokenizer, result.ids[result.prompt + 1]) == "a?c?"


def test_they_are_stored_and_read_back(qwen3: Any) -> None:
    for config in (REGULAR, LLM):
        result = made(qwen3, config)
        again = unflattened(flattened(result))
        for first, second in zip(result.texts, again.texts, strict=True):
            for part in ("ids", "labels", "prompt"):
                assert np.array_equal(getattr(first, part), getattr(second, part))
            assert len(first.pairs) == len(second.pairs)
            for one, other in zip(first.pairs, second.pairs, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert np.array_equal(a.ids, b.ids)
                    assert a[1:] == b[1:]


@pytest.mark.parametrize("over_length", ["error", "skip", "truncate"])
def test_the_limit_is_one_of_each_turn(over_length: Any, qwen3: Any) -> None:
    lengths = [len(each.ids) for each in made(qwen3, REGULAR).texts]
    assert lengths == sorted(lengths)
    config = JepaConfig(mode="regular", max_length=lengths[1], over_length=over_length)
    tokenizer = RecordTokenizer(qwen3, config)
    if over_length == "error":
        with pytest.raises(UserError, match=rf"data.jsonl:3: the record has {lengths[2]} tokens, more than max_length"):
            tokenizer.tokenize([record(THOUGHTS)])
        return
    (result,) = tokenizer.tokenize([record(THOUGHTS)])
    cut = over_length == "truncate"
    assert [len(each.ids) for each in result.texts] == [*lengths[:2], lengths[1]][: 2 + cut]
    expected = {"turns": 2 + cut, "turns skipped": 1 - cut, "over length": 1, "truncated": int(cut), "skipped": 0}
    assert {name: tokenizer.counts[name] for name in expected} == expected


def test_a_source_view_branches_from_the_prompt_of_its_turn(qwen3: Any) -> None:
    result = made(qwen3, LLM)
    assert [len(each.pairs) for each in result.texts] == [1, 1, 1]
    for each, question, answer in zip(result.texts, ["2+3?", "And 1?", "And 2?"], "568", strict=True):
        ((source, target),) = each.pairs
        assert source.in_main
        assert np.array_equal(source.ids, each.ids)
        assert content(qwen3, source) == question
        # The target is the content, without its thought.
        assert content(qwen3, target) == answer
        assert "think" not in text(qwen3, target.ids[: target.end])


def test_a_pair_of_a_turn_that_is_skipped_goes_with_it(qwen3: Any) -> None:
    lengths = [len(each.ids) for each in made(qwen3, REGULAR).texts]
    config = JepaConfig(layout="branched", predictors=2, pairs="all", max_length=lengths[1], over_length="skip")
    tokenizer = RecordTokenizer(qwen3, config)
    (result,) = tokenizer.tokenize([record(THOUGHTS)])
    assert [len(each.pairs) for each in result.texts] == [1, 1]
    assert tokenizer.counts["pairs"] == 2
    assert tokenizer.counts["pairs cut by truncation"] == 1


def test_context_has_no_pair(qwen3: Any) -> None:
    messages = chat("a?", "b", "c?", "d")
    messages[1]["weight"] = 0
    result = made(qwen3, LLM, messages)
    ((source, target),) = result.all_pairs
    assert (content(qwen3, source), content(qwen3, target)) == ("c?", "d")


def test_a_call_has_a_pair_where_both_sides_have_text(qwen3: Any) -> None:
    messages = [*with_call("Is cod a fish?", "cod", "cod: a fish", "It is."), *chat("And elm?", "No.")]
    result = made(qwen3, LLM, messages, tools=TOOLS)
    # The call says nothing, and its result is no question: the answer is what follows them.
    views = [content(qwen3, view) for pair in result.all_pairs for view in pair]
    assert views == ["Is cod a fish?", "It is.", "And elm?", "No."]


def test_steps_of_the_last_thought(qwen3: Any) -> None:
    config = JepaConfig(mode="step-jepa", steps_from="reasoning", predictors=1, pairs="all", max_length=4096)
    result = made(qwen3, config, with_thoughts("a?", "x\n\ny", "b", "2+3?", "Two.\n\nThree.\n\nFive.", "5"))
    views = [[content(qwen3, view) for view in pair] for pair in result.all_pairs]
    assert views == [["Two.\n\n", "Three.\n\n"], ["Three.\n\n", "Five."]]
    assert not result.texts[0].pairs
    with pytest.raises(UserError, match="usable pair"):
        made(qwen3, JepaConfig(mode="step-jepa", require_pairs=True), with_thoughts("a?", "x\n\ny", "b"))


def test_views_of_all_texts_are_run(qwen3: Any) -> None:
    """The collator places the sequences of every text, and each label once."""
    tokenized = made(qwen3, LLM)
    batch = tiny.batch_of(qwen3, LLM, [record(THOUGHTS)], row_length=4096)
    assert batch.source_index.shape[0] == batch.target_index.shape[0] == 3
    assert len(batch.label_ids) == sum(len(each.labels) for each in tokenized.texts)


def test_answers_that_would_fuse_with_their_prompt_are_counted(trained_tokenizer: Any) -> None:
    """Two line ends are one token: the template's own and that with which an answer begins."""
    tokenizer = copy.deepcopy(trained_tokenizer)
    tokenizer.add_tokens(["\n\n"])
    made = RecordTokenizer(tokenizer, REGULAR)
    whole, fused = made.tokenize([record(chat("a?", "Two.")), record(chat("a?", "\nTwo."))])
    assert made.counts["answers tokenised apart"] == 1
    prompts = [each.ids[: each.labels[0] + 1].tolist() for each in (whole, fused)]
    assert prompts[0] == prompts[1]
    assert text(tokenizer, fused.ids[fused.labels + 1]) == "\nTwo.<|im_end|>"
