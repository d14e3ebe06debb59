"""Chats with tool calls: what the assistant writes is trained, calls too, and nothing that a tool answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepjepa.batch.tokenize import RecordTokenizer
from stepjepa.config import JepaConfig
from stepjepa.data.records import parse_record
from stepjepa.errors import UserError

TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
CALL = {"function": {"name": "warmth", "arguments": {"place": "Oslo"}}}
SCHEMA = {"type": "function", "function": {"name": "warmth", "parameters": {"type": "object", "properties": {}}}}


def chat(**first: Any) -> dict[str, Any]:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]} | first
    user, answer = {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": "It is 7."}
    return {"messages": [user, call, {"role": "tool", "content": "7"}, answer], "tools": json.dumps([SCHEMA])}


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Any:
    """The one whose name is given, or the tiny one with the template that is given."""
    if request.param == "qwen2.5":
        return request.getfixturevalue("real_tokenizer")(request.param)
    tiny_tokenizer.chat_template = request.param
    return tiny_tokenizer


@pytest.mark.parametrize("tokenizer", [TEMPLATE, "qwen2.5"], ids=["small", "qwen2.5"], indirect=True)
@pytest.mark.parametrize("arguments", [{"place": "Oslo", "unset": None}, '{"place": "Oslo"}'], ids=["object", "text"])
def test_calls_and_answers_are_trained(tokenizer: Any, arguments: Any) -> None:
    record = parse_record(chat(tool_calls=[{"name": "warmth", "arguments": arguments}]))
    made = RecordTokenizer(tokenizer, JepaConfig(predictors=0))
    (found,) = made.tokenize([record])
    written = '{"name": "warmth", "arguments": {"place": "Oslo"}}'
    call = f"<tool_call>\n{written}\n</tool_call>" if tokenizer.chat_template != TEMPLATE else f"<call>{written}</call>"
    assert made.tokenizer.decode(found.ids[found.labels + 1]) == f"{call}<|im_end|>It is 7.<|im_end|>"
    # The whole is what the tokenizer's own method writes.
    whole = made.tokenizer.apply_chat_template(
        list(record.messages), tools=list(record.tools), tokenize=False, add_generation_prompt=False
    )
    assert whole.startswith(made.tokenizer.decode(found.ids))
    # Views are texts: the question and what was said of it in the end.
    ((source, target),) = found.pairs
    assert "How warm?" in made.tokenizer.decode(source.ids[source.start : source.end])
    assert "It is 7." in made.tokenizer.decode(target.ids[target.start : target.end])


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (TEMPLATE.replace("c in m.tool_calls", "c in []"), "leaves out or rewrites message 1"),
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}"), "leaves out or rewrites message 0"),
        (TEMPLATE.replace("<|tools|>", "{{ raise_exception('no tools') }}"), "no tools"),
    ],
    indirect=["tokenizer"],
)
def test_a_template_that_leaves_calls_out(tokenizer: Any, words: str) -> None:
    # The small chats that a template is tried with have no tools.
    with pytest.raises(UserError, match=words):
        RecordTokenizer(tokenizer, JepaConfig(mode="regular")).tokenize([parse_record(chat())])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (chat(tool_calls=[{"name": "warmth", "arguments": "no JSON"}]), "'arguments', an object"),
        (chat(tool_calls={"name": "warmth"}), "tool_calls is dict, expected a list"),
        (chat(role="user"), "only an assistant message"),
        (chat(tool_calls=None, content="Wait."), r"messages\[2\] is a tool's, and no call stands before it"),
        ({"messages": chat()["messages"][:-1]}, "the last message is a tool's"),
        (chat() | {"tools": 7}, "'tools' must be a list"),
    ],
)
def test_wrong_calls(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_record(wrong, "a.jsonl", 3)
