"""Parts of a chat that a template leaves out of the prompts are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import served_forms
from served_forms import Message, chat, with_call
from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config.jepa import JepaConfig
from stepjepa.data.records import parse_record

# As Phi-3's template: a role that it does not name is left out.
FOUR_ROLES = (
    "{% for message in messages %}{% if message['role'] in ('system', 'user', 'assistant') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OBSERVED = [*chat("q", "look_up(cod)"), {"role": "tool", "content": "a fish"}, {"role": "assistant", "content": "A."}]
UNTRAINED_CALL = with_call("q", "cod", "a fish", "A.")
UNTRAINED_CALL[1]["weight"] = 0

RESULT = "messages[].content of role tool; the template leaves it out or rewrites it"
CALLS = "messages[].tool_calls; the template writes none"


@pytest.fixture
def tokenizer(plain_tokenizer: Any) -> Any:
    return served_forms.with_all_markers(plain_tokenizer)


def unused(tokenizer: Any, messages: list[Message], source: str | None = None, form: str = "ChatML") -> str | None:
    made = served_forms.in_form(tokenizer, form)
    made.chat_template = source or made.chat_template
    records = RecordTokenizer(made, JepaConfig(mode="regular"))
    for _ in range(3):  # the first by marks, the others by the form of the chat
        records.tokenize([parse_record({"messages": copy.deepcopy(messages)})])
    return records.describe().get("not used")


def test_a_message_that_is_in_no_prompt(tokenizer: Any) -> None:
    assert unused(tokenizer, OBSERVED, FOUR_ROLES) == RESULT
    assert unused(tokenizer, OBSERVED) is None
    # Its text is written as JSON.
    as_json = FOUR_ROLES.replace(
        "{% endif %}{% endfor %}", "{% else %}{{ message.content | tojson }}{% endif %}{% endfor %}"
    )
    odd = [*OBSERVED[:2], {"role": "tool", "content": 'a "fish"'}, OBSERVED[3]]
    assert unused(tokenizer, odd, as_json) is None


def test_a_result_that_only_happens_to_stand_elsewhere(tokenizer: Any) -> None:
    messages = [
        *chat("is it 5 or 6?", "look"),
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "A."},
    ]
    assert unused(tokenizer, messages, FOUR_ROLES) == RESULT


def test_a_speaker(tokenizer: Any) -> None:
    named: list[Message] = [
        {"role": "user", "name": "alice", "content": "hi"},
        {"role": "assistant", "name": "bob", "content": "Yes."},
    ]
    lost = "messages[].name; the template leaves it out or rewrites it"
    assert unused(tokenizer, named) == unused(tokenizer, [named[0], chat("q", "b")[1]]) == lost
    assert unused(tokenizer, [chat("q", "b")[0], named[1]]) == lost
    with_names = FOUR_ROLES.replace(
        "message['role'] +", "message['role'] + (' ' + message.name if message.name else '') +"
    )
    assert unused(tokenizer, [named[0], chat("q", "b")[1]], with_names) is None
    # That of a tool is also in the call.
    assert unused(tokenizer, [*OBSERVED[:2], {**OBSERVED[2], "name": "look_up"}, OBSERVED[3]]) is None


def test_calls_that_are_not_trained(tokenizer: Any) -> None:
    assert unused(tokenizer, UNTRAINED_CALL) == CALLS
    assert unused(tokenizer, UNTRAINED_CALL, FOUR_ROLES) == f"{CALLS}; {RESULT}"
    assert unused(tokenizer, UNTRAINED_CALL, form="Qwen3") is None


def test_a_part_of_an_untrained_call(tokenizer: Any) -> None:
    """As gpt-oss's template, which writes one call a message."""
    messages = copy.deepcopy(UNTRAINED_CALL)
    second = copy.deepcopy(messages[1]["tool_calls"][0])
    second["function"]["arguments"]["word"] = 'eel "\n'
    messages[1]["tool_calls"].append(second)
    rest = "; the template leaves it out or rewrites it"
    assert unused(tokenizer, messages, form="harmony") == f"messages[].tool_calls{rest}"
    assert unused(tokenizer, messages, form="Qwen3") is None


def test_a_thought_that_is_not_trained(tokenizer: Any) -> None:
    messages = served_forms.with_thoughts("2+3?", "Two and three.", "5", "And 1?", "", "6")
    del messages[3]["thinking"]
    messages[1]["weight"] = 0
    thought = "messages[].reasoning_content; the template leaves it out or rewrites it"
    for form in ("ChatML", "Qwen3"):  # the one writes none, the other those of the last answer
        assert unused(tokenizer, messages, form=form) == thought
    assert unused(tokenizer, messages, form="Kimi-K3") is None


def test_a_content_that_is_rewritten(tokenizer: Any) -> None:
    """As Nemotron's template, which deletes a switch from questions, also where they only spell it."""
    source = FOUR_ROLES.replace("message['content']", "message['content'].replace('/think', '')")
    told = "messages[].content of role user; the template leaves it out or rewrites it"
    assert unused(tokenizer, chat("What is </think>?", "A tag."), source) == told
    assert unused(tokenizer, chat("What is it? ", "A tag."), source.replace(", '')", ", '').strip()")) is None


def test_thoughts_of_earlier_turns_are_left_out_by_design(tokenizer: Any) -> None:
    thoughts = served_forms.with_thoughts("2+3?", "Two and three.", "5", "And 1?", "Five and one.", "6")
    assert unused(tokenizer, thoughts, form="Qwen3") is None
    in_content = chat("q", "<think>t</think>a", "r", "b")
    assert unused(tokenizer, in_content, form="DeepSeek-R1") is None
