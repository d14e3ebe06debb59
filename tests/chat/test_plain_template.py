"""The form without a chat: texts and spans by hand, records against tokenising piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

import tiny
from stepjepa.base.errors import UserError
from stepjepa.batch.collate import Collator
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.chat.plain_template import PlainTemplate
from stepjepa.chat.special_tokens import END_OF_TURN, PERCEPTION, add_plain_tokens
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.record import Record
from stepjepa.views.sequences import SampledRecord, TokenSequence

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]
LONGER = [*CHAT, {"role": "user", "content": " And? "}, {"role": "assistant", "content": "Red\n"}]


@pytest.fixture
def plain(tiny_tokenizer: Any) -> Any:
    add_plain_tokens(tiny_tokenizer)
    return tiny_tokenizer


@pytest.fixture
def beginning(plain: Any) -> Any:
    """A tokenizer that begins every text with a token of its own, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    plain.add_special_tokens({"bos_token": "<|begin|>"})
    special = [("<|begin|>", plain.bos_token_id)]
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=special)
    return plain


def ids_of(tokenizer: Any, *texts: str) -> list[int]:
    """Each text tokenised by itself."""
    return [int(index) for text in texts for index in tokenizer(text, add_special_tokens=False)["input_ids"]]


def sequences(tokenizer: Any, records: list[Record], **options: Any) -> list[dict[str, TokenSequence]]:
    """The sequences of each record by what they are; each is read at its end."""
    config = JepaConfig(plain=True, **options)
    made = RecordTokenizer(tokenizer, config)
    collator = Collator.of(config, made.predictors.tolist())
    result = []
    for record in made.tokenize(records):
        main, *views = collator.sequences(SampledRecord(record))
        assert all(len(view.readouts) == 1 and view.readouts[0].end == len(view) for view in views)
        result.append({"main": main, **{view.readouts[0].kind: view for view in views}})
    return result


def test_question_and_answer_by_hand(plain: Any) -> None:
    rendered = PlainTemplate(plain).render(CHAT)
    assert rendered.text == "Why?<|perception|>So.<|eot_id|>"
    assert rendered.spans == ((0, 0), (0, 4), (18, 21))
    (turn,) = PlainTemplate(plain).turns(CHAT)
    assert (turn.text, turn.text[: turn.answer], turn.stop) == (rendered.text, "Why?<|perception|>", "<|eot_id|>")


@pytest.mark.parametrize("answers", [True, False])
def test_of_a_longer_chat_the_last_exchange_is_kept_as_it_is(answers: bool, plain: Any) -> None:
    rendered = PlainTemplate(plain, answers=answers).render(LONGER)
    assert rendered.text == (" And? <|perception|>Red\n<|eot_id|>" if answers else " And? <|eot_id|>")
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["", "", "", " And? ", "Red\n" if answers else ""]


def test_a_text_begins_as_the_tokenizer_begins_texts(beginning: Any) -> None:
    template = PlainTemplate(beginning)
    rendered = template.render(CHAT)
    assert rendered.text == "<|begin|>Why?<|perception|>So.<|eot_id|>"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["", "Why?", "So."]
    assert ids_of(beginning, template.prompt(CHAT[:-1])) == beginning("Why?<|perception|>")["input_ids"]
    alone = template.render_alone("assistant", "So.")
    assert (alone.text, alone.text[slice(*alone.spans[0])]) == ("<|begin|>So.", "So.")


# -- records as tokens -------------------------------------------------------------------------------------------------


def test_the_answer_and_its_end_are_taught_or_the_users_text(plain: Any) -> None:
    for labels in ("assistant", "all"):
        made = RecordTokenizer(plain, JepaConfig(mode="regular", plain=True, labels=labels))
        for record, result in zip(tiny.records(), made.tokenize(tiny.records()), strict=True):
            question = record.messages[1]["content"]
            taught = ids_of(plain, record.answer, END_OF_TURN)
            whole = (
                ids_of(plain, question, PERCEPTION) + taught
                if labels == "assistant"
                else ids_of(plain, question, END_OF_TURN)
            )
            assert result.ids.tolist() == whole
            assert result.ids[result.labels + 1].tolist() == (taught if labels == "assistant" else whole[1:])


@pytest.mark.parametrize("labels", ["assistant", "all"])
@pytest.mark.parametrize("count", [0, 2])
def test_views_are_bare_contents(labels: str, count: int, plain: Any) -> None:
    predictors = ["<|predictor_1|>", "<|predictor_2|>"][:count]
    every = sequences(plain, tiny.records(), labels=labels, predictors=count)
    for record, result in zip(tiny.records(), every, strict=True):
        question = record.messages[1]["content"]
        assert result["source"].ids.tolist() == ids_of(plain, question, *predictors)
        assert result["target"].ids.tolist() == ids_of(plain, record.answer)


def test_steps_of_the_answer(plain: Any) -> None:
    (result,) = sequences(plain, tiny.records()[1:2], mode="step-jepa", predictors=1)
    before = ids_of(plain, "And 1+1 then?", PERCEPTION, "It is two\n\n")
    assert result["source"].ids.tolist() == before + ids_of(plain, "<|predictor_1|>")
    assert result["target"].ids.tolist() == ids_of(plain, "2.")


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "cod"}}}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({1: {"reasoning_content": "Because."}}, "without reasoning_content"),
        ({1: {"content": "", "tool_calls": [CALL]}}, "without tool_calls"),
        ({0: {"role": "tool"}}, "without a message of role tool in front of the answer"),
    ],
)
def test_what_the_format_does_not_write_is_refused(plain: Any, changes: dict[int, Any], fault: str) -> None:
    """An answer that is a call was trained as an empty text."""
    messages = [*LONGER[:3], *({**message, **changes.get(number, {})} for number, message in enumerate(LONGER[3:]))]
    with pytest.raises(UserError, match=rf"the plain format writes only a question and an answer, {fault}; remove it"):
        RecordTokenizer(plain, JepaConfig(mode="regular", plain=True)).tokenize([Record(tuple(messages))])


def test_messages_that_the_format_leaves_out_are_named(plain: Any) -> None:
    made = RecordTokenizer(plain, JepaConfig(mode="regular", plain=True))
    made.tokenize([Record(tuple(CHAT[1:]))])
    assert "not used" not in made.describe()
    made.tokenize([Record(tuple(LONGER))])
    roles = ["system", "user", "assistant"]
    unused = [f"messages[].content of role {role}; the plain format has the last question only" for role in roles]
    assert made.describe()["not used"] == "; ".join(unused)
