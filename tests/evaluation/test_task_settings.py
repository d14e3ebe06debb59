"""What the user says of tasks: numbers out of range, and classes of their own that are none."""

import math
import sys

import pytest

from questions import question_records
from stepjepa.errors import UserError
from stepjepa.files import fingerprint
from stepjepa.tasks.base import TaskOptions
from stepjepa.tasks.generic import GenericTask
from stepjepa.tasks.registry import ReferenceTask, choose_task, load_task, users_source


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit", 0.0),
        ("time_limit", math.nan),
        ("memory_limit", 0),
        ("workers", 0),
        ("missing_databases", "ignore"),
    ],
)
def test_limits_out_of_range_are_refused_before_anything_is_run(name, value):
    with pytest.raises(UserError, match=f"--{name}: expected .*, got '?{value}"):
        TaskOptions(**{name: value})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def (", r"can't load 'mine_\d:Mine' \(invalid syntax"),
        ("print(nowhere)", r"can't load 'mine_\d:Mine' \(NameError: name 'nowhere' is not defined\); expected"),
        ("import sys\nsys.exit('no licence')", r"\(SystemExit: no licence\)"),
        ("from stepjepa.tasks.base import Task\nclass Mine(Task):\n    name = headline = lenient = 'x'", "'score'"),
        ("Mine = 3", "is no class derived from"),
        ("", "has no attribute 'Mine'"),
    ],
)
def test_a_class_that_is_no_task_is_one_line(source, words, tmp_path, monkeypatch, request):
    name = f"mine_{request.node.callspec.indices['source']}"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=words):
        load_task(f"{name}:Mine")


def test_a_module_in_the_working_folder_is_found_and_hides_nothing(tmp_path, monkeypatch):
    """An installed command does not look there by itself."""
    source = "from stepjepa.tasks.generic import GenericTask\nclass Mine(GenericTask):\n    name = 'mine'\n"
    (tmp_path / "lying_here.py").write_text(source, encoding="utf-8")
    (tmp_path / "user_task.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert load_task("lying_here:Mine").name == "mine"
    assert load_task("user_task:LastWord").name == "last-word"


def test_the_file_of_a_users_task_is_known_and_that_of_ours_does_not_count():
    records = question_records()
    users = choose_task("user_task:LastWord", records)
    assert users_source(users) == fingerprint(sys.modules["user_task"].__file__)
    assert users_source(GenericTask()) is None
    assert users_source(ReferenceTask(GenericTask())) is None
