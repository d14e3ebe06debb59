"""Where the texts of messages stand in what a template makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.chat.marks import Kind, Message, locate


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def lines(*parts: str) -> Callable[[Sequence[Message]], str]:
    """A template that writes the named fields of each message, each in brackets."""

    def render(messages: Sequence[Message]) -> str:
        return "".join(f"[{message[part]}]" for message in messages for part in parts if message.get(part))

    return render


def texts(render: Any, messages: Sequence[Message], wanted: Sequence[int], **options: Any) -> list[tuple[Kind, Any]]:
    text = render(messages)
    places = locate(render, messages, text, wanted, **options)
    return [(part.kind, span and (span[0], text[slice(*span)])) for part, span, _ in places]


def test_equal_texts_are_told_by_their_marks() -> None:
    chat = [user("a"), answer("a"), user("[a]")]
    assert texts(lines("content"), chat, range(3)) == [
        ("content", (1, "a")),
        ("content", (4, "a")),
        ("content", (7, "[a]")),
    ]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (str, (1, "\n a \n\n")),
        (str.strip, (1, "a")),
        (str.lstrip, (1, "a \n\n")),
        (str.rstrip, (1, "\n a")),
        (lambda text: text.strip("\n"), (1, " a ")),
    ],
    ids=["kept", "both", "left", "right", "line ends"],
)
def test_white_space_belongs_to_a_content_as_far_as_it_is_kept(change: Any, wanted: Any) -> None:
    def render(messages: Sequence[Message]) -> str:
        return "".join(f"[{change(message['content'])}]" for message in messages)

    assert texts(render, [user("\n a \n\n")], [0]) == [("content", wanted)]
    # The same text in front of it and behind it is another one.
    (_, first), (_, second) = texts(render, [user("a"), user("\n a \n\n")], [0, 1])
    assert first == (1, "a")
    assert second == (wanted[0] + 3, wanted[1])


def test_a_text_that_is_left_out_has_no_place() -> None:
    assert texts(lines("content"), [answer("a", reasoning_content="b")], [0]) == [
        ("thought", None),
        ("content", (1, "a")),
    ]
    # Of nothing but white space there is no part.
    assert texts(lines("content"), [answer(" \n")], [0]) == []


def test_a_thought_in_tags_is_a_part_of_its_own() -> None:
    chat = [answer("<think>\nb\n</think>\n\na")]
    assert texts(lines("content"), chat, [0]) == [("thought", (8, "\nb\n")), ("content", (19, "\n\na"))]
    # Only where the prompt has opened it may a content begin inside a thought.
    assert texts(lines("content"), [answer("b</think>a")], [0]) == [("content", (1, "b</think>a"))]
    opened = texts(lines("content"), [answer("b</think>a")], [0], opened="<think>")
    assert opened == [("thought", (1, "b")), ("content", (10, "a"))]
    # A user's tags are text.
    assert texts(lines("content"), [user("<think>b</think>a")], [0]) == [("content", (1, "<think>b</think>a"))]


def test_a_thought_that_is_rewritten_is_where_it_is_then() -> None:
    def render(messages: Sequence[Message]) -> str:
        thought, _, rest = messages[0]["content"].removeprefix("<think>").partition("</think>")
        return f"(thought: {thought.strip()}) {rest.strip()}."

    assert texts(render, [answer("<think>\nb\n</think>\n\na")], [0]) == [("thought", (10, "b")), ("content", (13, "a"))]


def test_all_texts_of_a_call_are_marked() -> None:
    call = {"function": {"name": "look_up", "arguments": {"word": "cod", "n": 3, "more": [{"x": "eel"}, "ray"]}}}

    def render(messages: Sequence[Message]) -> str:
        return str(messages[0]["tool_calls"][0]["function"])

    result = texts(render, [answer("", tool_calls=[call])], [0])
    assert [kind for kind, _ in result] == ["call"] * 4
    assert [place[1] for _, place in result] == ["look_up", "cod", "eel", "ray"]
    # In the form of other programs, without an inner object.
    flat = [{"name": "look_up", "arguments": '{"word": "cod"}'}]
    result = texts(lambda messages: str(messages[0]["tool_calls"]), [answer("", tool_calls=flat)], [0])
    assert [place[1] for _, place in result] == ["look_up", '{"word": "cod"}']


def test_the_last_place_of_a_text_that_is_written_twice() -> None:
    assert texts(lines("content", "content"), [user("a")], [0]) == [("content", (4, "a"))]


def test_a_template_that_looks_into_a_text_is_asked_message_by_message() -> None:
    """Here one that answers a question by its words; the other texts are still found by their marks."""

    def render(messages: Sequence[Message]) -> str:
        return "".join(f"[{message['content']}]" for message in messages) + f"({messages[0]['content'] == 'a'})"

    chat = [user("a"), answer("b"), user("b")]
    assert texts(render, chat, range(3)) == [("content", (1, "a")), ("content", (4, "b")), ("content", (7, "b"))]
    # The one that can't be marked is searched for, and must stand once; one of an earlier message in front of `begin`.
    twice = [user("a"), answer("a")]
    assert texts(render, twice, range(2)) == [("content", None), ("content", (4, "a"))]
    assert texts(render, twice, range(2), begin=3) == [("content", (1, "a")), ("content", (4, "a"))]


def test_a_template_that_refuses_marks() -> None:
    def render(messages: Sequence[Message]) -> str:
        if not all(char.isascii() for message in messages for char in message["content"]):
            raise UserError("only ASCII")
        return "".join(f"[{message['content']}]" for message in messages)

    assert texts(render, [user("a"), user("b")], range(2)) == [("content", (1, "a")), ("content", (4, "b"))]


def test_characters_of_the_marks_in_a_text() -> None:
    first, second = "\U000f0000", "\U00100000"
    assert texts(lines("content"), [user(f"a{first}b")], [0]) == [("content", (1, f"a{first}b"))]
    assert texts(lines("content"), [user(f"a{second}b")], [0]) == [("content", (1, f"a{second}b"))]
    with pytest.raises(UserError, match=r"characters of both private-use planes \(U\+F0000 and above\); remove them"):
        texts(lines("content"), [user(first + second)], [0])
