"""What is said of records with different system prompts."""

from __future__ import annotations

from stepjepa.chat.system_prompts import count_system_prompts, describe_system_prompts
from stepjepa.data.records import parse_record


def records(*prompts: str | None) -> list:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return [
        parse_record({"messages": [*([] if prompt is None else [{"role": "system", "content": prompt}]), *turns]})
        for prompt in prompts
    ]


def test_one_prompt_is_not_worth_a_line() -> None:
    for prompts in (("Add.", "Add."), (None, None), ()):
        assert describe_system_prompts(records(*prompts)) is None


def test_files_put_together_without_a_look_at_their_prompts() -> None:
    mixed = records("Add.", None, None)
    assert count_system_prompts(mixed) == {"Add.": 1, None: 2}
    assert describe_system_prompts(mixed) == "2 different ones among 3 records: none (2), 'Add.' (1)"
    # Each of its own: these are parts of the records.
    assert describe_system_prompts(records(*map(str, range(11)))) is None
    # An empty prompt is not the same as none: it switches a template's own off.
    many = records("a", "a", "a", "", "", "b", "c")
    assert describe_system_prompts(many) == "4 different ones among 7 records: 'a' (3), '' (2) and 2 more"
