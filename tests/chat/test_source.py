"""What a run fixes, written into the template that it saves."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from stepjepa.chat import source

DAY = "{{ strftime_now('%d %b %Y, day %-d of %B (%H:%M)') }}"


def rendered(text: str, **variables: Any) -> str:
    return str(_compile_jinja_template(text).render(**{"messages": [], "add_generation_prompt": False, **variables}))


def test_a_date_is_the_same_on_every_day() -> None:
    pinned = source.with_pinned_date(DAY)
    assert rendered(pinned) == "26 Jul 2024, day 26 of July (00:00)"
    assert rendered(DAY) != rendered(pinned)
    assert source.with_pinned_date(pinned) == pinned


def test_a_date_that_a_caller_passes_wins() -> None:
    pinned = source.with_pinned_date("{{ date_string }}")
    assert rendered(pinned) == "26 Jul 2024"
    assert rendered(pinned, date_string="today") == "today"
    assert source.with_pinned_date(pinned) == pinned
    # One that a run sets replaces the fixed one, however often it is saved.
    once = source.with_defaults(pinned, {"date_string": "1 May 2025"})
    again = source.with_defaults(source.with_pinned_date(once), {"date_string": "1 May 2025"})
    assert rendered(once) == "1 May 2025"
    assert again == once


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        None,
        3,
        -1.5,
        "a 'b' \"c\" \\n \n %} {{ x }} 中",
        [1, "a", None],
        {"a": {"b": [True, "c d"]}},
        [],
        {},
    ],
)
def test_any_value_of_json(value: object) -> None:
    text = source.with_defaults("{{ [x] | tojson }}", {"x": value})
    assert _compile_jinja_template(text).render() == _compile_jinja_template("{{ [x] | tojson }}").render(x=value)
    assert rendered(text, x="other") == '["other"]'


def test_a_file_with_a_byte_order_mark_is_read_as_without(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_bytes(codecs.BOM_UTF8 + "{{ 'é' }}\r\n{{ messages }}\n".encode())
    # The mark would be the first token of every prompt. Line ends are those of Jinja.
    assert source.read_template(str(file)) == "{{ 'é' }}\n{{ messages }}\n"


def test_values_of_an_earlier_run_are_replaced() -> None:
    first = source.with_defaults("{{ x }} {{ y }}", {"x": 1, "y": 2})
    second = source.with_defaults(first, {"x": 3})
    assert rendered(second) == "3 2"
    assert rendered(source.with_defaults(second, {"x": 1})) == "1 2"
    assert source.with_defaults(first, {"x": 1, "y": 2}) == first
    assert source.with_defaults(first, {}) == first


def test_a_value_may_hold_any_line_end() -> None:
    note = "a\u2028b\x85c\x0cd"
    assert rendered(source.with_defaults(source.with_defaults("{{ x }}", {"x": note}), {"y": note})) == note


def test_lines_of_the_own_template_stay() -> None:
    own = "{%- if x is not defined %}{%- set x = 1 %}{%- endif %}\n{{ x }} {%- if y is not defined %}y{% endif %}"
    assert rendered(source.with_defaults(own, {"y": 2})) == "1"
    assert rendered(source.with_defaults(own, {"x": 2})) == "2y"


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([("system", " S "), ("user", " q "), ("assistant", "a")], "user:S\n\nq|assistant:a|"),
        ([("user", " q ")], "user: q |"),
        ([("system", " "), ("user", " q ")], "user: q |"),
        ([("system", "S")], ""),
    ],
)
def test_a_system_text_is_folded_into_the_first_question(messages: Any, wanted: str) -> None:
    own = "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '|' }}{% endfor %}"
    chat = [{"role": role, "content": content} for role, content in messages]
    assert rendered(source.with_folded_system(own), messages=chat) == wanted


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_header_is_written_where_it_is_asked_for(end: str) -> None:
    text = source.with_header(f"{{{{ 'q' }}}}{end}", "\n'A': ")
    assert rendered(text) == "q"
    assert rendered(text, add_generation_prompt=True) == "q\n'A': "
