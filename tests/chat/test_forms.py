"""Turns that are made by the form of a chat's text are those that are made by marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_beginnings import CHATS, ODD

import served_forms
from served_forms import FORMS, chat
from stepjepa.base.errors import UserError
from stepjepa.chat.growth import MARK
from stepjepa.chat.served import trained_turns
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.turn_text import Turn

PLAIN = ["2+3?", "5", "Is it so, and why?", "Yes. No.", "b", "b", "user", "assistant\nb", "Café \U0001f41f", "{{ x }}"]


@pytest.fixture(scope="module")
def marked(plain_tokenizer: Any) -> Any:
    return served_forms.with_all_markers(plain_tokenizer)


def by_marks(template: ChatTemplate, messages: Any) -> list[Turn] | str:
    try:
        return template._turns(template.normalise(messages), trained_turns(messages), None, None)
    except UserError as error:
        return str(error)


def usual(template: ChatTemplate, messages: Any) -> list[Turn] | str:
    try:
        return template.turns(messages)
    except UserError as error:
        return str(error)


def drawn_chats(count: int) -> list[Any]:
    """Chats of which most are plain, some with a system text, with context, or with odd contents."""
    generator, chats = np.random.default_rng(17), []
    for _ in range(count):
        contents = (
            PLAIN if generator.random() < 0.7 else [*PLAIN, *ODD, MARK, "\U000f0001", "<think>\nu\n</think>\n\nv"]
        )
        turns = int(generator.integers(1, 4))
        messages = chat(*generator.choice(contents, 2 * turns).tolist())
        if generator.random() < 0.5:
            messages = [{"role": "system", "content": str(generator.choice(contents))}, *messages]
        if turns > 1 and generator.random() < 0.3:
            messages[-3] = {**messages[-3], "weight": 0}
        if generator.random() < 0.2:
            messages = [*messages, {"role": "user", "content": "And now?"}]
        chats.append(messages)
    return chats


@pytest.mark.sample(5)
@pytest.mark.parametrize("form", FORMS)
def test_turns_by_forms_are_those_by_marks(form: str, marked: Any) -> None:
    template = ChatTemplate(served_forms.in_form(marked, form), FORMS[form].variables)
    chats = [*drawn_chats(101), *(messages for messages, tools in CHATS.values() if tools is None)]
    for messages in chats:
        assert usual(template, messages) == by_marks(template, messages), messages


def count_renders(template: ChatTemplate, messages: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    calls, forms = [], template._forms
    render = forms._render
    with monkeypatch.context() as patch:
        patch.setattr(forms, "_render", lambda *args, **options: calls.append(1) or render(*args, **options))
        patch.setattr(forms, "_slow_turns", None)
        template.turns(messages)
    return len(calls)


@pytest.mark.parametrize(("form", "number", "renders"), [("ChatML", 3, 2), ("Llama-3", 5, 2), ("Qwen3", 3, 6)])
def test_a_further_chat_is_rendered_to_be_compared(
    form: str, number: int, renders: int, marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat and the prompt of its last turn; both for each turn where the template rewrites earlier ones."""
    template = ChatTemplate(served_forms.in_form(marked, form), FORMS[form].variables)
    chats = [chat(*[f"{name}{index}" for index in range(2 * number)]) for name in "abc"]
    for messages in chats[:2]:
        template.turns(messages)
    assert count_renders(template, chats[2], monkeypatch) == renders
    # A content with white space at its ends, which a template may strip, is made by marks, and so are tools.
    monkeypatch.setattr(template, "_turns", lambda *_: "by marks")
    assert template.turns([*chats[2][:-1], {"role": "assistant", "content": " d"}]) == "by marks"
    assert template.turns(chats[2], served_forms.TOOLS) == "by marks"


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LOOKS = {
    "a text behind some answers": CHATML.replace("'<|im_end|>", "('!' if 'z' in m.content else '') + '<|im_end|>"),
    "a text that is replaced": CHATML.replace("m.content", "(m.content | replace('z', 'y'))"),
    "a length": CHATML.replace("'\n'", "'\n' ~ ('long ' if m.content | length > 31 else '')"),
    "another prompt": "{% set z = messages[0].content == 'z' %}" + CHATML,
}
ENDS = {"another prompt": PROMPT.replace("assistant\n'", "assistant\n' + ('z' if z else '')")}


@pytest.mark.parametrize("name", LOOKS)
def test_a_template_that_looks_into_contents(name: str, marked: Any) -> None:
    tokenizer = served_forms.in_form(marked, "ChatML")
    tokenizer.chat_template = LOOKS[name] + ENDS.get(name, PROMPT)
    template, differ = ChatTemplate(tokenizer), 0
    for contents in (
        ("a", "b"),
        ("c", "d"),
        ("e", "f"),
        ("z", "z"),
        ("g", "a text that is longer than thirty letters, z"),
        ("z", "h"),
        ("a", "b"),
    ):
        for messages in (chat(*contents), chat(*contents, "c", *contents[1:])):
            wanted = by_marks(template, messages)
            assert usual(template, messages) == wanted
            differ += template._forms.turns(template.normalise(messages), trained_turns(messages)) is None
    assert 0 < differ < 14


def test_a_chat_that_the_template_refuses(marked: Any) -> None:
    tokenizer = served_forms.in_form(marked, "ChatML")
    tokenizer.chat_template = "{% if messages[-1].content == 'z' %}{{ raise_exception('no z') }}{% endif %}" + CHATML
    tokenizer.chat_template += PROMPT
    template = ChatTemplate(tokenizer)
    for content in "abcd":
        template.turns(chat("q", content))
    with pytest.raises(UserError, match="no z"):
        template.turns(chat("q", "z"))
