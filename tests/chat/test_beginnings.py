"""Turns of a chat that is rendered once are those of a chat of which every beginning is rendered."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

import served_forms
from served_forms import FORMS, TOOLS, chat, with_call, with_thoughts
from stepjepa.base.errors import UserError
from stepjepa.chat import template as templates
from stepjepa.chat.beginnings import Beginnings
from stepjepa.chat.growth import MARK, marked_template
from stepjepa.chat.renderer import Renderer
from stepjepa.chat.template import ChatTemplate
from stepjepa.chat.turn_text import Turn

ODD = [
    "\n A?  \n",
    "  b\n",
    "c\t",
    "\n\nd",
    "<|im_end|>?",
    "x </think> y",
    "Cafe\u0301 \U0001f41f",
    " e ",
    "b",
    "b",
    "user",
    "b",
]
CHATS: dict[str, tuple[list[Any], Any]] = {
    "two": (chat("a?", "b", "c?", "d"), None),
    "system": (chat("a?", "b", "c?", "d", "e?", "f", system="S. "), None),
    "odd": (chat(*ODD), None),
    "odd, system": (chat(*ODD[:4], system="\nb\n"), None),
    "mark": (chat("a?", "b", f"{MARK}?", f"d{MARK}"), None),
    "both planes": (chat("a?", "b", "\U000f0001?", "\U00100001"), None),
    "context": ([*chat("a?", "b"), {"role": "user", "content": "c?"}], None),
    "answer first": ([{"role": "assistant", "content": "Hello."}, *chat("a?", "b", "c?", "d")], None),
    "thoughts": (with_thoughts("2+3?", " Two. ", "5", "And 1?", "One.\n\n", "6", "And?", "x", "7"), None),
    "thoughts in contents": (chat("a?", "<think>\nt\n</think>\n\nb", "c?", "<think>u</think>d"), None),
    "calls": ([*with_call("Is cod a fish?", "cod", "cod: a fish", "It is."), *chat("And elm?", "No.")], TOOLS),
}


def turns_or_error(template: ChatTemplate, messages: Any, tools: Any) -> list[Turn] | str:
    try:
        return template.turns(messages, tools)
    except UserError as error:
        return str(error)


@pytest.fixture(scope="module")
def marked(plain_tokenizer: Any) -> Any:
    return served_forms.with_all_markers(plain_tokenizer)


@pytest.mark.sample(11)
@pytest.mark.parametrize("form", FORMS)
def test_turns_are_those_of_every_beginning_by_itself(form: str, marked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = served_forms.in_form(marked, form)
    template = ChatTemplate(tokenizer, FORMS[form].variables)
    fast = {name: turns_or_error(template, *each) for name, each in CHATS.items()}
    monkeypatch.setattr(
        templates, "Beginnings", lambda chat, render, *_, **__: Beginnings(chat, render, 1, only_adds_text=False)
    )
    slow = {name: turns_or_error(template, *each) for name, each in CHATS.items()}
    assert fast == slow
    assert isinstance(fast["two"], list)


BEFORE_A_PROMPT = {
    "loop": ("{% if message.role == 'assistant' and not add_generation_prompt %}T{% endif %}", ""),
    "front": ("", "{% if add_generation_prompt %}F{% endif %}"),
}


@pytest.mark.parametrize("part", BEFORE_A_PROMPT)
def test_a_text_that_is_there_in_prompts_alone(part: str, plain_tokenizer: Any) -> None:
    """A server renders every prompt with ``add_generation_prompt``: what that decides is trained as it is asked."""
    tokenizer = served_forms.in_form(served_forms.with_all_markers(plain_tokenizer), "ChatML")
    in_loop, front = BEFORE_A_PROMPT[part]
    tokenizer.chat_template = (
        f"{front}{{% for message in messages %}}{{{{ '<|im_start|>' + message.role + '\\n' }}}}{in_loop}"
        "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    template, messages = ChatTemplate(tokenizer, None), chat("a?", "b", "c?", "d")
    for _ in range(3):
        first, second = turns_or_error(template, messages, None)
        for turn, before in ((first, 1), (second, 3)):
            prompt = tokenizer.apply_chat_template(messages[:before], tokenize=False, add_generation_prompt=True)
            assert turn.text[: turn.answer] == prompt


def counted(template: ChatTemplate, messages: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    calls = []
    render = Renderer.render
    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "render", lambda *args, **named: calls.append(1) or render(*args, **named))
        template.turns(messages)
    return len(calls)


@pytest.mark.parametrize("number", [2, 7, 31])
def test_a_template_that_only_adds_text_renders_a_chat_of_any_length_five_times(
    number: int, marked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, cut, its prompt, and twice with marks for the places of texts that have white space at their ends."""
    messages = chat(*[text for index in range(number) for text in (f"{index}? ", f"{index}.")])
    assert counted(ChatTemplate(served_forms.in_form(marked, "ChatML")), messages, monkeypatch) == 5
    # Another one: prompt and chat of each turn, and the marks once.
    opened = ChatTemplate(served_forms.in_form(marked, "harmony"))
    assert counted(opened, chat("0? ", "0."), monkeypatch) == 4
    assert 2 * number < counted(opened, messages, monkeypatch) <= 4 * number


GROWS = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
ADDED = {
    "header": GROWS + "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}",
    "first": "{{ messages[0].content if messages[0]['role'] == 'system' }}" + GROWS,
    "rest": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
    "{% endif %}"
    "{% for m in rest %}{{ '*' if loop.first else loop.index0 }}{{ m.content }}{% endfor %}",
    "state": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ m.content }}"
    "{% endfor %}",
    "inner loop": "{% for m in messages %}{% for c in m.calls %}{{ c }}{{ ',' if not loop.last }}{% endfor %}"
    "{% endfor %}",
    "skip": "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "variable": "{% if x is not defined %}{% set x = 1 %}{% endif %}" + GROWS + "{{ x }}",
}
NOT_ADDED = {
    "last": "{% for m in messages %}{{ m.content }}{{ '.' if loop.last }}{% endfor %}",
    "length": "{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}",
    "loop as argument": "{% macro f(x) %}{{ x.last }}{% endmacro %}{% for m in messages %}{{ f(loop) }}{% endfor %}",
    "next": "{% for m in messages %}{{ messages[loop.index0 + 1].role }}{% endfor %}",
    "from the end": "{{ messages[-1].content }}" + GROWS,
    "second": "{{ messages[1].content }}" + GROWS,
    "count": "{{ messages | length }}" + GROWS,
    "end cut off": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
    "backwards": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "two loops": GROWS + GROWS,
    "loop in a condition": "{% if x %}" + GROWS + "{% endif %}",
    "filtered": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "ends early": "{% for m in messages %}{{ m.content }}{% if m.role == 'x' %}{% break %}{% endif %}{% endfor %}",
    "state behind": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
    "messages behind": GROWS + "{{ messages[0].content }}",
    "whole list": GROWS.replace("m.role", "(messages | tojson)"),
    "list under another name": "{% set all = messages %}{{ all[-1].content }}" + GROWS,
    "attribute": "{% set ns = namespace(all=messages) %}{{ ns.all[-1].content }}" + GROWS,
    "attribute that is set": "{% set ns = namespace() %}{% set ns.all = messages %}{{ ns.all | length }}" + GROWS,
    "taken apart": "{% set first, second = messages %}{{ second.content }}" + GROWS,
    "macro behind": "{% macro f() %}{{ x }}{% endmacro %}" + GROWS + "{{ f() }}",
    "made anew": "{% set messages = messages + messages %}" + GROWS,
    "no loop": "{{ messages[0].content }}",
}


@pytest.mark.parametrize(
    ("grows", "source"), [*((True, each) for each in ADDED.values()), *((False, each) for each in NOT_ADDED.values())]
)
def test_what_only_adds_text_is_read_off_the_template(grows: bool, source: str) -> None:
    compiled = _compile_jinja_template(source)
    made = marked_template(compiled.environment, source)
    assert (made is not None) == grows
    if made is None:
        return
    messages = [{"role": role, "content": f"{n}", "calls": ["p", "q"]} for n, role in enumerate(["system", *"uauxa"])]
    texts = [compiled.render(messages=messages[:n], add_generation_prompt=False) for n in range(1, 7)]
    *pieces, end = made.render(messages=messages, add_generation_prompt=False).split(MARK)
    skipped = len(messages) - len(pieces) + 1
    for n, text in enumerate(texts, start=1):
        assert text == "".join(pieces[: n + 1 - skipped]) + end


@pytest.mark.slow
def test_the_forms_are_told_apart(marked: Any) -> None:
    grow = {form for form in FORMS if ChatTemplate(served_forms.in_form(marked, form)).renderer.only_adds_text}
    assert {"ChatML", "Llama-3", "Llama-2", "Phi-3", "GLM", "DeepSeek-R1"} <= grow
    assert not {"Qwen3", "QwQ", "harmony", "Mistral-Nemo"} & grow
