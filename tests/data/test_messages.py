"""Messages as other tools write them: each is kept in one form, refused with a remedy, or named as not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from stepjepa.base.errors import UserError
from stepjepa.data.reading_notes import describe_unused
from stepjepa.data.record import Record
from stepjepa.data.records import as_records, parse_record
from stepjepa.data.row_error import RowError
from stepjepa.data.sources import read_records

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
PARIS = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
BARE = TOOL["function"]
CALLS = {"content": "", "tool_calls": [PARIS]}


def read(*messages: Any, **fields: Any) -> Record:
    return parse_record({"messages": list(messages), **fields}, "data.jsonl", 3)


def read_with_settings(row: dict[str, Any]) -> Record:
    """Read a row as a command does that has the settings ``bad_records`` and ``columns``."""
    try:
        return parse_record(row)
    except RowError as error:
        raise error.for_reader(("bad_records", "columns")) from None


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        # Text parts are joined, an empty part of texts or thoughts is none.
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": None, "image": None}, {}]},
            {"content": "a"},
        ),
        ({"content": [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "a"}]}, {"content": "a"}),
        # A thought is one field under three names.
        ({"content": "a", "reasoning_content": " t\n"}, {"content": "a", "reasoning_content": " t\n"}),
        ({"content": "a", "thinking": "t"}, {"content": "a", "reasoning_content": "t"}),
        ({"content": "a", "reasoning": "t", "thinking": "t"}, {"content": "a", "reasoning_content": "t"}),
        ({"content": "a", "reasoning_content": ""}, {"content": "a"}),
        # Arguments as an object, whatever they were.
        ({"content": None, "tool_calls": [PARIS]}, {"content": "", "tool_calls": [PARIS]}),
        ({"tool_calls": [PARIS["function"]]}, {"content": "", "tool_calls": [PARIS]}),
        (
            {"content": "a", "tool_calls": [{"id": "7", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {
                "content": "a",
                "tool_calls": [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ),
        (
            {"content": None, "function_call": {"name": "f", "arguments": ""}},
            {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        ),
        # The arguments of a call under other programs' names.
        ({"tool_calls": [{"name": "weather", "parameters": PARIS["function"]["arguments"]}]}, CALLS),
        ({"tool_calls": [{"name": "weather", "args": '{"city": "Paris", "days": 2}', "input": {}}]}, CALLS),
        ({"tool_calls": [{"type": "tool_use", "name": "weather", "input": {"city": "Paris", "days": 2}}]}, CALLS),
        ({"tool_calls": [{"function": {"name": "weather", "parameters": {"city": "Paris", "days": 2}}}]}, CALLS),
        # 1 and true are what is done anyway.
        ({"content": "a", "weight": 1}, {"content": "a"}),
        ({"content": "a", "weight": 1.0, "train": True}, {"content": "a"}),
        ({"content": "a", "train": None, "weight": None, "name": None}, {"content": "a"}),
        ({"content": "a", "name": "ann"}, {"content": "a", "name": "ann"}),
    ],
)
def test_what_is_kept_of_an_answer(message: dict[str, Any], kept: dict[str, Any]) -> None:
    assert read(USER, {"role": "assistant", **message}).messages == (USER, {"role": "assistant", **kept})


@pytest.mark.parametrize(
    "untrained", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"train": 0}]
)
def test_a_turn_with_weight_0_is_context(untrained: dict[str, Any]) -> None:
    record = read(USER, {**ASSISTANT, **untrained}, {**USER, "weight": 0}, ASSISTANT)
    assert record.messages == (USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT)
    assert record.dropped == 0 and not describe_unused([record])


def test_what_stands_behind_the_last_trained_turn_is_dropped_and_counted() -> None:
    record = read(USER, ASSISTANT, USER, {**ASSISTANT, "weight": 0}, USER)
    assert (record.messages, record.dropped, record.answer) == ((USER, ASSISTANT), 3, "a")
    assert describe_unused([record, record]) == ["6 messages behind the last trained answer are left out"]
    assert describe_unused([read(USER, ASSISTANT, USER)]) == ["1 message behind the last trained answer is left out"]


def test_a_chat_with_tools() -> None:
    developer = {"role": "developer", "content": "s"}
    asks = {"role": "assistant", "content": None, "tool_calls": [PARIS], "thinking": "t"}
    replies = {"role": "tool", "content": "", "tool_call_id": "7", "name": "weather"}
    record = read(developer, USER, asks, replies, replies, ASSISTANT, USER, ASSISTANT, tools=[BARE])
    # The id of a call may be a number, and so that of its result.
    assert read(USER, asks, {**replies, "tool_call_id": 7}, ASSISTANT).messages[2] == replies
    remaining = {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [PARIS]}
    assert record.messages == (developer, USER, remaining, replies, replies, ASSISTANT, USER, ASSISTANT)
    assert record.tools == [TOOL] and not record.extra
    # OpenAI's responses have the type beside the name; a request has it outside.
    for text in (json.dumps([TOOL]), [TOOL], [json.dumps(BARE)], [{"type": "function", **BARE}], [{"function": BARE}]):
        assert read(USER, ASSISTANT, tools=text).tools == [TOOL]
    assert read(USER, ASSISTANT, functions=[BARE]).tools == [TOOL]
    for empty in (None, [], "[]", " ", float("nan")):
        assert read(USER, ASSISTANT, tools=empty, chat_template_kwargs=empty).tools is None
    assert read(USER, ASSISTANT, chat_template_kwargs='{"x": 1}').chat_template_kwargs == {"x": 1}


@pytest.mark.parametrize("names", [("function_call", "observation"), ("tool_call", "tool_response")])
def test_sharegpt_with_tools(names: tuple[str, str]) -> None:
    """LLaMA-Factory's and ms-swift's form: the call is JSON text, what it returned has a role of its own."""
    turns = [("human", "q"), (names[0], json.dumps(PARIS["function"])), (names[1], "rain"), ("gpt", "a")]
    row = {"conversations": [{"from": name, "value": value} for name, value in turns], "system": "s"}
    record = parse_record(row | {"tools": json.dumps([BARE])})
    call = {"role": "assistant", "content": "", "tool_calls": [PARIS]}
    system, tool = {"role": "system", "content": "s"}, {"role": "tool", "content": "rain"}
    assert record.messages == (system, USER, call, tool, ASSISTANT)
    assert record.tools == [TOOL] and not describe_unused([record])


@pytest.mark.parametrize("names", [("function_call", "observation"), ("tool_call", "tool_response")])
def test_calls_in_a_row_are_one_turn(names: tuple[str, str]) -> None:
    """Parallel calls, and a text in front of a call, are messages of their own there; they were refused."""
    second = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
    calls = [(names[0], json.dumps(call["function"])) for call in (PARIS, second)]
    results = [(names[1], "rain"), (names[1], "sun")]
    turns = [("human", "q"), *calls, *results, ("gpt", "so"), *calls[:1], *results[:1], ("gpt", "a")]
    row = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    rain, sun = ({"role": "tool", "content": text} for text in ("rain", "sun"))
    both = {"role": "assistant", "content": "", "tool_calls": [PARIS, second]}
    beside = {"role": "assistant", "content": "so", "tool_calls": [PARIS]}
    assert parse_record(row).messages == (USER, both, rain, sun, beside, rain, ASSISTANT)
    # The same in ms-swift's form, with a weight for each message.
    chat = [{"role": name, "content": value} for name, value in turns]
    for place in (1, 2):
        chat[place]["loss"] = False
    assert parse_record({"messages": chat}).messages[1] == both | {"weight": 0}
    chat[2]["loss"] = True
    with pytest.raises(
        UserError, match=r"messages\[2\] and the message before it are one turn, and only one of them is trained"
    ):
        parse_record({"messages": chat})
    chat[2]["loss"] = False
    chat[2]["reasoning_content"] = "t"
    with pytest.raises(UserError, match=r"messages\[2\].reasoning_content: .*; move the thought there"):
        parse_record({"messages": chat})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"weight": 0.5}, r"messages\[1\].weight is '0.5'; expected 0 \(context\) or 1"),
        ({"weight": "0"}, r"messages\[1\].weight is '0'; expected 0"),
        ({"weight": 1, "train": False}, "has weight and train, which say different things"),
        ({"loss": 0.25}, r"messages\[1\].loss is '0.25'; expected true or false"),
        ({"train_detail": [{"begin_offset": 0}]}, "a message can't be trained in parts"),
        (
            {"content": [{"type": "image_url", "image_url": "x"}]},
            r"content\[0\] is a part of type 'image_url'; expected",
        ),
        # A table of pictures has them in a column of their own; the place of each in the chat stays.
        (
            {"content": [{"type": "image"}, {"type": "text", "text": "a"}]},
            r"content\[0\] is a part of type 'image'; exp",
        ),
        ({"content": [{"type": "audio", "audio": None, "text": None}, "a"]}, r"content\[0\] is a part of type 'audio'"),
        ({"content": [{"type": "tool_use"}, "a"]}, r"content\[0\] is a part of type 'tool_use'"),
        (
            {"content": [{"type": "text", "text": "a", "image": "x"}]},
            r"'messages\[1\].content\[0\].image' holds images",
        ),
        ({"content": [{"type": "text", "text": None, "content": "a"}]}, r"content\[0\] is a part of type 'text'; exp"),
        (
            {"content": None, "contnt": "a"},
            r"messages\[1\] \(assistant\) has no content, but the unknown key 'contnt'; did you mean content\?",
        ),
        ({"content": None, "stamp": 3}, r"has no content \(unknown keys: 'stamp'\); fill it in, or remove the record"),
        ({"content": None}, r"messages\[1\] \(assistant\) has no content; fill it in, or remove the record"),
        ({"content": []}, r"content \(assistant\) is empty"),
        ({"content": {"text": "a"}}, r"content \(assistant\) is .*; expected a text, or parts of type text"),
        ({"content": [{"type": "thinking", "thinking": "t"}]}, r"content\[0\] is a thought; write it as 'reasoning_co"),
        ({"content": [{"type": "text", "text": {"value": "a"}}]}, r"content\[0\].text is .*; expected a text"),
        ({"content": [{"type": ["text"], "text": "a"}]}, r"content\[0\] is .*; expected parts"),
        (
            {"role": "Assistant"},
            r"the role of messages\[1\] is 'Assistant'; expected .*; did you mean assistant",
        ),
        ({"role": "bing"}, r"the role of messages\[1\] is 'bing'; expected one of system, .*, tool; rename it"),
        ({"role": 3}, r"messages\[1\] is .*; expected 'role', one of system"),
        ({"images": ["x.png"]}, r"'messages\[1\].images' holds images, videos or sounds"),
        ({"reasoning_content": "s", "thinking": "t"}, "both reasoning_content and thinking, which are one field"),
        ({"thinking": 3}, r"messages\[1\].thinking is '3'; expected a text"),
        ({"tool_calls": [{"name": ""}]}, r"messages\[1\].tool_calls\[0\] is .*; expected \{'type': 'function'"),
        ({"tool_calls": [{"name": "f", "arguments": "{x"}]}, "arguments' is '{x'; expected an object, or .* JSON"),
        (
            {"tool_calls": [{"name": "f", "arguments": '{"x": 1, "y": {"z": 1, "z": 2}}'}]},
            r"'messages\[1\].tool_calls\[0\].function.arguments' has the key 'z' twice in one object; keep one",
        ),
        ({"tool_calls": [{"name": "f", "arguments": '{"x": "\\ud83d"}'}]}, r"arguments' holds half of a character"),
        ({"tool_calls": [{"name": "f", "arguments": [1]}]}, r"arguments' is '\[1\]'; expected an object"),
        ({"tool_calls": [{"name": "f", "arguments": "[2]"}]}, r"arguments' is '\[2\]'; expected an object"),
        ({"tool_calls": [{"name": "f", "arguments": {"x": 1}, "args": {"y": 1}}]}, "has arguments and args, which are"),
        ({"tool_calls": [PARIS], "function_call": BARE}, "has both 'function_call' and 'tool_calls'"),
        ({"trainable": False}, r"messages\[1\].trainable is 'False'; whether .* 'weight', 0 or 1: write that instead"),
        ({"loss_mask": 0}, r"messages\[1\].loss_mask is '0'; whether a message is trained is 'weight'"),
        ({"masked": "False"}, r"messages\[1\].masked is 'False'; whether a message is trained is 'weight'"),
        ({"mask": True}, r"messages\[1\].mask is 'True'; whether a message is trained is 'weight'"),
        ({"name": 3}, r"messages\[1\].name is '3'; expected a text"),
    ],
)
def test_errors_of_an_answer(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(USER, {**ASSISTANT, **answer})
    assert str(caught.value).startswith("data.jsonl:3: ")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{**USER, "weight": 1}, ASSISTANT]}, "only assistant messages are trained, and this is a user"),
        ({"messages": [{**USER, "tool_calls": [PARIS]}, ASSISTANT]}, "tool_calls: a user message has none"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, "no assistant message is trained: all have weight 0"),
        ({"messages": [USER, ASSISTANT], "tools": "hammer"}, "'tools' is 'hammer'; expected a list of functions"),
        ({"messages": [USER, ASSISTANT], "tools": [{"type": "x"}]}, r"tools\[0\] is .*; expected"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": [1]}, "expected an object, the variables"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"tools": []}}, "can't set 'tools'"),
        ({"messages": [USER, ASSISTANT], "images": ["x"]}, "'images' holds images, videos or sounds"),
        ({"messages": [USER, ASSISTANT], "label": False}, "'label' is 'False': it marks answers as wanted or not"),
        ({"prompt": "q", "completion": "a", "label": "True"}, "'label' is 'True': it marks"),
        ({"prompt": "q", "completion": "a", "kto_tag": True}, "'kto_tag' is 'True': it marks"),
        ({"prompt": "q", "completion": "a", "kto_tag": 0}, "'kto_tag' is '0': it marks"),
        ({"messages": [USER, ASSISTANT], "rejected_response": "b"}, "'rejected_response': preferences, "),
        ({"prompt": "q", "completion": "a", "rejected_messages": "b"}, "preferences, .*; remove the column, or"),
        ({"input": {"messages": [USER]}, "preferred_output": [ASSISTANT]}, "preferences.*; write the question and the"),
        (USER, "got a message where a record is expected; write a chat as one object, {'messages'"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "'chosen' and 'rejected': preferences, .*`columns prompt chosen`",
        ),
        (
            {"messages": [USER], "rejected": "b"},
            "'rejected': preferences, .* at the end of 'messages', and remove them",
        ),
        (
            {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]},
            "preferences, .*; rename the wanted one to 'mess",
        ),
        ({"question": "q", "answer": "a", "history": [["q"]]}, r"history\[0\] is .*; expected a pair"),
        ({"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT], "system": "t"}, "'system' and the system"),
        ({"messages": []}, r"'messages' is '\[\]'; fill it in, or leave such rows out with `bad_records skip`"),
        ({"id": 3, "conversations": None}, "'conversations' is 'None'; fill it in, or leave such rows out"),
        ({"answer": "a"}, "there is answer.; a record needs 'messages', or two such columns"),
        ({"question": "q", "answer": True}, "write true and false as texts, such as yes and no"),
    ],
)
def test_errors_of_a_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_with_settings(row)
    # Records in memory have no settings that a remedy could name.
    with pytest.raises(UserError, match=r"^[^`]*$"):
        list(as_records([row]))


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"Frage": "a", "Antwort": "b"}, "rename the two to prompt and completion"),
        ({"prompt": "a", "completion": {"x": 1}}, "write one text there, or name the column with the text as this one"),
        ({"prompt": "a", "completion": None}, "fill it in, or leave such rows out"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "rename 'chosen' to completion and remove what is not want"),
    ],
)
def test_the_remedy_for_rows_in_memory_names_no_setting(row: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError, match=f"<memory>:1: .*; {remedy}[^`]*$"):
        list(as_records([row]))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]},
        {"prompt": "q", "chosen": [ASSISTANT], "rejected": [ASSISTANT]},
    ],
)
def test_the_remedy_for_preferences_works(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="`columns prompt chosen`"):
        read_with_settings(row)
    record = parse_record(row, columns=("prompt", "chosen"))
    assert record.messages == (USER, ASSISTANT) and describe_unused([record]) == ["not used: rejected"]


def test_a_column_of_thoughts() -> None:
    for name in ("reasoning_content", "thinking"):
        record = parse_record({"prompt": "q", name: "t", "completion": "a"})
        assert record.messages == (USER, {**ASSISTANT, "reasoning_content": "t"}) and not describe_unused([record])
    for row in ({"thinking": True}, {"thinking": " ", "n": 1}, {"completion": [ASSISTANT], "thinking": "t"}):
        record = parse_record({"prompt": "q", "completion": "a", **row})
        assert record.messages == (USER, ASSISTANT) and len(describe_unused([record])) == 1


def test_answers_of_a_prompt_are_context() -> None:
    """As in TRL, which trains the completion alone."""
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT, USER, ASSISTANT]}
    assert [message.get("weight", 1) for message in parse_record(row).messages] == [1, 0, 1, 1, 1, 1]
    row["prompt"] = [USER, {**ASSISTANT, "weight": 1}, USER]
    assert all("weight" not in message for message in parse_record(row).messages)


def test_a_label_that_is_no_truth_value_is_no_preference() -> None:
    record = parse_record({"question": "q", "answer": "a", "label": 1})
    assert describe_unused([record]) == ["not used: label"]


def test_what_nothing_reads_is_named() -> None:
    first = read({**USER, "id": 5}, ASSISTANT, source="web", ground_truth="7", empty=None, images=[])
    second = read(USER, {**ASSISTANT, "score": 0.5}, text="both", gap=float("nan"))
    assert describe_unused([read(USER, {**ASSISTANT, "train_set": "web"})]) == ["not used: messages[].train_set"]
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": []}
    record = read(USER, {"role": "assistant", "content": [part, part]})
    assert describe_unused([record]) == ["not used: messages[].content[].cache_control"]
    assert describe_unused([first, second]) == ["not used: messages[].id, source, messages[].score, text"]
    # Two keys of one meaning: the second one is named if it says something else.
    other = read({**USER, "value": "r", "from": "gpt"}, {**ASSISTANT, "value": "a"}, tools=[BARE], functions=[TOOL])
    assert describe_unused([other]) == ["not used: messages[].value, messages[].from, functions"]
    strict = {**PARIS, "index": 0, "cost": 3, "function": {**PARIS["function"], "strict": True, "gap": None}}
    called = read(USER, {"role": "assistant", "tool_calls": [strict]})
    expected = "messages[].tool_calls[].cost, messages[].tool_calls[].strict"
    assert called.messages[1]["tool_calls"] == [PARIS] and describe_unused([called]) == [f"not used: {expected}"]
    prepared = parse_record(
        {"messages": [USER, ASSISTANT], "question": "q", "answer": "a", "total_steps": 3, "mine": 1}
    )
    assert describe_unused([prepared]) == ["not used: mine"]
    own = parse_record({"messages": [USER, ASSISTANT], "question": "q", "answer": "a"})
    assert describe_unused([own]) == ["not used: question, answer"]
    assert describe_unused([first, second], extra=False) == ["not used: messages[].id, messages[].score"]
    many = read(USER, ASSISTANT, **{"": "x"}, **{f"c{number}": 1 for number in range(13)})
    (line,) = describe_unused([many])
    assert line.startswith("not used: a column without a name, c0, c1") and line.endswith("c10 and 2 more")


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (
            {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["q1", "a1"]]},
            ["s", "q1", "a1", "q", "a"],
        ),
        ({"instruction": "q", "output": "a", "history": '[["q1", "a1"]]'}, ["q1", "a1", "q", "a"]),
        ({"instruction": "q", "output": "a", "history": None, "system": ""}, ["q", "a"]),
        ({"instruction": "q", "context": "c", "response": "a"}, ["q\n\nc", "a"]),
        ({"instruction": "q", "context": "", "response": "a"}, ["q", "a"]),
        ({"system_prompt": "s", "question": "q", "response": "a"}, ["s", "q", "a"]),
        ({"messages": json.dumps([USER, ASSISTANT]), "system": "s"}, ["s", "q", "a"]),
        ({"conversation": [USER, ASSISTANT]}, ["q", "a"]),
        ({"query": "q", "response": "a", "history": [["q1", "a1"]], "system": "s"}, ["s", "q1", "a1", "q", "a"]),
    ],
)
def test_columns_of_other_tools(row: dict[str, Any], turns: list[str]) -> None:
    record = parse_record(row)
    assert [message["content"] for message in record.messages] == turns
    assert not describe_unused([record]) and set(record.columns) == set(row)


def test_parts_of_openais_responses_are_texts() -> None:
    parts = [
        [{"type": "input_text", "text": "q"}, {"type": "text", "text": "r"}],
        [{"type": "output_text", "text": "a"}],
    ]
    record = read(*({"role": role, "content": part} for role, part in zip(("user", "assistant"), parts, strict=True)))
    assert [message["content"] for message in record.messages] == ["qr", "a"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "text.jsonl"])
def test_numbers_become_texts_as_they_are_written(name: str, tmp_path: Path) -> None:
    chat = '[{"role": "user", "content": 1E5}, {"role": "assistant", "content": 1.10}]'
    rows = ['{"question": 12345678901234567890123, "answer": -0.50, "id": 1.0}', f'{{"messages": {chat}}}']
    if name == "text.jsonl":
        rows[1] = json.dumps({"messages": chat})
    text = f"[{', '.join(rows)}]" if name == "a.json" else "\n".join(rows)
    (tmp_path / name).write_text(text, encoding="utf-8")
    contents = [[each["content"] for each in record.messages] for record in read_records(tmp_path / name)]
    assert contents == [["12345678901234567890123", "-0.50"], ["1E5", "1.10"]]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "true", "null", "{}"])
def test_what_is_no_text_is_no_answer(value: str, tmp_path: Path) -> None:
    chat = f'[{{"role": "user", "content": "q"}}, {{"role": "assistant", "content": {value}}}]'
    for row in (f'{{"question": "q", "answer": {value}}}', f'{{"messages": {chat}}}'):
        (tmp_path / "a.jsonl").write_text(row, encoding="utf-8")
        with pytest.raises(UserError, match=r"a\.jsonl:1: .*(column 'answer'|content \(assistant\)|has no content)"):
            read_records(tmp_path / "a.jsonl")


def test_frames_and_arrays() -> None:
    """What pandas, NumPy, pyarrow and datasets make of a list of messages are messages."""
    pd = pytest.importorskip("pandas")
    calls = {"role": "assistant", "content": "", "tool_calls": [PARIS]}
    rows = [
        {"messages": [USER, calls, {"role": "tool", "content": "x"}, ASSISTANT], "n": 1},
        {"messages": [USER, ASSISTANT]},
    ]
    expected = [parse_record(row).messages for row in rows]
    frame = pd.DataFrame([{**row, "messages": np.array(row["messages"], object)} for row in rows])
    for table in (frame, pa.Table.from_pylist(rows), datasets.Dataset.from_list(rows)):
        assert [record.messages for record in as_records(table)] == expected
    missing = pd.DataFrame({"messages": [[USER, {**ASSISTANT, "weight": pd.NA, "name": pd.NaT}]]})
    assert next(iter(as_records(missing))).messages == (USER, ASSISTANT)
    gaps = pd.DataFrame({"question": ["q"], "answer": [np.int64(7)], "system": [pd.NA]})
    assert [message["content"] for message in next(iter(as_records(gaps))).messages] == ["q", "7"]
    twice = pd.DataFrame([["q", "a", "b"]], columns=["question", "answer", "answer"])
    for table in (twice, pa.table([["q"], ["a"], ["b"]], ["question", "answer", "answer"])):
        with pytest.raises(UserError, match="the table has the column 'answer' twice; rename or drop one of the two"):
            list(as_records(table))
    for half in ({"content": "a\ud83d"}, {"content": "", "tool_calls": [{"name": "f", "arguments": {"x": "\ud83d"}}]}):
        with pytest.raises(UserError, match="<memory>:1: holds half of a character"):
            list(as_records([{"messages": [USER, {**ASSISTANT, **half}]}]))
    with pytest.raises(UserError, match="<memory>:1: expected an object with the fields of a record, got 'x'"):
        list(as_records(["x"]))


def test_frames_and_series_of_the_users_own_objects() -> None:
    pd = pytest.importorskip("pandas")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}
    rows = [{"messages": [USER, ASSISTANT], "tools": [tool]}, {"messages": [USER, ASSISTANT], "tools": None}]
    for values in (rows, pd.DataFrame(rows), pd.Series(rows)):
        with_tools, without = as_records(values)
        assert (with_tools.tools, without.tools) == ([tool], None)
    for half in ({"tools": [{**tool, "function": {"name": "\ud83d"}}]}, {"chat_template_kwargs": {"x": "\ud83d"}}):
        with pytest.raises(UserError, match="<memory>:1: holds half of a character"):
            list(as_records([{**rows[0], **half}]))


def test_an_arrow_table_fills_no_argument_with_null(tmp_path: Any) -> None:
    """Rows of one table have all fields; those of other rows' arguments are no arguments of this one."""
    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    rows = [{"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]} for call in (PARIS, other)]
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pd = pytest.importorskip("pandas")
    frames = (
        table,
        datasets.Dataset.from_list(rows),
        pd.read_parquet(tmp_path / "a.parquet"),
    )
    for records in (read_records(tmp_path / "a.parquet"), *map(as_records, frames)):
        assert [record.messages[1]["tool_calls"] for record in records] == [[PARIS], [other]]
    # In dicts a null is the user's own, and in a frame of their lists.
    nothing = {**PARIS, "function": {"name": "weather", "arguments": {"city": None}}}
    own = [{"messages": [USER, {**CALLS, "role": "assistant", "tool_calls": [nothing]}]}]
    (framed,) = as_records(pd.DataFrame(own))
    assert framed.messages[1]["tool_calls"] == [nothing]
    (record,) = as_records(own)
    assert record.messages[1]["tool_calls"] == [nothing]
