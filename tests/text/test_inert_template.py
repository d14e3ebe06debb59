"""Which templates are known to do nothing with contents but write them."""

import pytest

import chat_templates
from stepjepa.models.presets import CHAT_TEMPLATE
from stepjepa.text.inert_template import writes_contents_only

LOOP = "{% for message in messages %}BODY{% endfor %}"

INERT = {
    "written": "{{ message['role'] + message['content'] }}",
    "trimmed": "{{ message.content | trim }}{{ message.content.lstrip('\n') ~ '.' }}",
    "named": "{% set text = message.content | trim %}{% if message.role == 'user' %}{{ text }}{% endif %}",
    "asked what is known": "{% if message.content is string and message.content %}{{ message.content }}{% endif %}",
    "chosen by role": "{{ message.content if message.role == 'user' else '(' + message.content + ')' }}",
    "fields asked for": "{% if 'tool_calls' not in message and not message.tools %}{{ message.content }}{% endif %}",
    "neighbour's role": "{{ messages[loop.index0 - 1].role }}{{ messages[messages|length - 1].role }}",
}
LOOKING = {
    "words": "{% if 'x' in message.content %}!{% endif %}{{ message.content }}",
    "start": "{% if message.content.startswith('x') %}!{% endif %}",
    "length": "{% if message.content | length > 3 %}!{% endif %}",
    "equality": "{{ message.content == 'x' }}",
    "changed": "{{ message.content | upper }}{{ message.content.replace('a', 'b') }}",
    "cut": "{{ message.content.split('x')[-1] }}{{ message.content[:3] }}",
    "trimmed with the rest": "{{ (message.content + '\n') | trim }}",
    "trimmed of other characters": "{{ message.content.strip('x') }}",
    "named and looked into": "{% set text = message.content %}{% if 'x' in text %}!{% endif %}",
    "named twice": "{% set one = message.content %}{% set two = one %}{{ two | length }}",
    "whole message": "{{ message | tojson }}",
    "any field": "{% for key in message %}{{ message[key] | length }}{% endfor %}",
    "all fields": "{% for key, value in message.items() %}{{ value }}{% endfor %}",
    "values": "{{ message.values() | list }}",
    "neighbour": "{{ loop.previtem.content | length if not loop.first }}",
    "the loop itself": "{% set outer = loop %}{{ outer.previtem | length }}",
    "macro": "{% macro show(text) %}{{ text | length }}{% endmacro %}{{ show(message.content) }}",
    "written aside": "{% set text %}{{ message.content }}{% endset %}{{ text | length }}",
    "filtered": "{% filter upper %}{{ message.content }}{% endfilter %}",
    "kept": "{% set ns = namespace(x='') %}{% set ns.x = message.content %}{{ ns.x | length }}",
    "collected": "{{ [message.content] | join('x') }}",
    "index": "{{ {'a': 1}[message.content] }}",
    "picked": "{% for m in messages if 'x' in m.content %}{{ m.content }}{% endfor %}",
    "mapped": "{{ messages | map(attribute='content') | join('x') }}",
}


@pytest.mark.parametrize("body", INERT.values(), ids=INERT)
def test_inert(body):
    assert writes_contents_only(LOOP.replace("BODY", body))


@pytest.mark.parametrize("body", LOOKING.values(), ids=LOOKING)
def test_looking(body):
    assert not writes_contents_only(LOOP.replace("BODY", body))


def test_what_can_not_be_read_is_not_inert():
    assert not writes_contents_only("{% for %}")
    assert not writes_contents_only("{% include 'other' %}" + LOOP.replace("BODY", "{{ message.content }}"))


def test_known_forms():
    assert writes_contents_only(CHAT_TEMPLATE)
    assert writes_contents_only(chat_templates.LLAMA_LIKE)
    assert writes_contents_only(chat_templates.QWEN3_LIKE)
    assert not writes_contents_only(chat_templates.DEEPSEEK_LIKE)
