"""Settings in messages get the names of the caller."""

import pytest

from stepjepa.base.errors import UserError
from stepjepa.base.settings_in_text import renaming_settings, respelled, respelled_error

NAMES = {"task": "eval_task", "test_file": "eval_file"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("name another `test_file` or `task`", "name another `eval_file` or `eval_task`"),
        ("pass `task generic`, or a task", "pass `eval_task generic`, or a task"),
        ("`task_options` and `tasks` are others", "`task_options` and `tasks` are others"),
        ("task: not the first word of an error here", "task: not the first word of an error here"),
    ],
)
def test_settings_in_backticks_are_renamed(text: str, wanted: str) -> None:
    assert respelled(text, NAMES.get) == wanted


def test_the_mark_takes_the_place_of_backticks() -> None:
    assert (
        respelled("pass `task generic` or `other`", {"task": "--task"}.get, mark="") == "pass --task generic or `other`"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("task: no task 'x'", "eval_task: no task 'x'"),
        ("a.jsonl:3: task: no task 'x'", "a.jsonl:3: eval_task: no task 'x'"),
        ("task 'x' is none: task: 2", "task 'x' is none: eval_task: 2"),
        ("other: task: 2", "other: task: 2"),
    ],
)
def test_a_setting_may_stand_before_the_first_colon_of_an_error(text: str, wanted: str) -> None:
    assert respelled_error(text, NAMES.get) == wanted


def test_errors_of_a_block_are_user_errors_with_other_names() -> None:
    with pytest.raises(UserError, match=r"^eval_task: pass `eval_file`$"), renaming_settings(NAMES):
        raise UserError("task: pass `test_file`")
    with pytest.raises(ZeroDivisionError), renaming_settings(NAMES):
        raise ZeroDivisionError("task: a fault of the program")
