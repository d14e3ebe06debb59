"""Chat templates come with models, from anybody: what is wrong with one is told on one line, within limits."""

from __future__ import annotations

from typing import Any

import pytest

from stepjepa.chat import limits
from stepjepa.chat.template import ChatTemplate
from stepjepa.errors import UserError

LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

REFUSED = {
    # It can't be read.
    "{% if %}": "line 1: Expected an expression",
    "\n\n{% for %}": "line 3: ",
    "{{ messages": "line 1: ",
    "{% endfor %}": "line 1: Encountered unknown tag 'endfor'",
    "{% unknown %}": "line 1: Encountered unknown tag 'unknown'",
    "{{ 'a }}": "line 1: ",
    "{% for m in messages %}{{ m.content }}": "Unexpected end of template",
    "{{ x | no_such_filter }}": "No filter named 'no_such_filter'",
    "{{ x is no_such_test }}": "No test named 'no_such_test'",
    "{% macro %}": "line 1: ",
    # It raises.
    "a\n{{ 1/0 }}": "line 2: division by zero",
    "{{ 1 % 0 }}": "line 1: ",
    "{{ x.y.z }}": "'x' is undefined",
    "{{ messages[99].content }}": "list object has no element 99",
    "{{ messages + 1 }}": "can only concatenate list",
    "{{ 'a' + 1 }}": "can only concatenate str",
    "{{ messages.nothing() }}": "has no attribute 'nothing'",
    "{{ none.x.y }}": "line 1: ",
    "{{ messages | sum }}": "line 1: ",
    "{{ [1, 2] | join(1, 2, 3) }}": "line 1: ",
    "{{ raise_exception('no') }}": "line 1: no",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "maximum recursion depth",
    "{{ range(10**9) | list }}": "Range too big",
    "{% include 'other' %}": "line 1: ",
    "{% extends 'other' %}": "line 1: ",
    "{% import 'other' as o %}": "line 1: ",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__'",
    "{{ messages.__class__.__base__.__subclasses__() }}": "line 1: ",
    "{{ cycler.__init__.__globals__ }}": "line 1: ",
    "{{ messages.append(1) }}": "line 1: ",
    # It writes no message, or not what was said.
    "": "a content is not in its text",
    "hello": "a content is not in its text",
    "{{ messages[0].content }}": "a content is not in its text",
    "{{ messages[-1].content }}": "a content is not in its text",
    "{% for m in messages %}{{ m.role }}{% endfor %}": "a content is not in its text",
    "{% for m in messages %}{{ m.content | length }}{% endfor %}": "a content is not in its text",
    "{% for m in messages | reverse %}{{ m.content }}{% endfor %}": "a content is not in its text",
    # It takes too long, or too much.
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 1 seconds",
    "{{ 'x' * 10**10 }}": "takes more than 1 GiB",
    "{{ 'x' | center(10**10) }}": "takes more than 1 GiB",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "takes more than 1",
}


@pytest.mark.parametrize("source", REFUSED)
def test_what_is_wrong_is_told(source: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 1)
    monkeypatch.setattr(tiny_tokenizer, "chat_template", source or " ")
    with pytest.raises(UserError) as found:
        ChatTemplate(tiny_tokenizer)
    assert REFUSED[source] in str(found.value)


def test_a_content_that_is_changed_is_an_error_of_its_record(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", LOOP.replace("m.content", "m.content | replace('a', 'b')"))
    template = ChatTemplate(tiny_tokenizer)
    with pytest.raises(UserError, match="rewrites the content of message 0"):
        template.render([{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}])


def test_a_template_may_refuse_some_records(tiny_tokenizer: Any, monkeypatch: Any) -> None:
    source = "{% if messages[0].content == 'cat' %}{{ 1/0 }}{% endif %}" + LOOP
    monkeypatch.setattr(tiny_tokenizer, "chat_template", source)
    template = ChatTemplate(tiny_tokenizer)
    with pytest.raises(UserError, match=r"refuses these messages \(line 1: division by zero\)"):
        template.render([{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}])
