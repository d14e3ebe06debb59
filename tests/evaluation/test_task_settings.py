"""Tasks of the user's own."""

import sys

import pytest

from questions import question_records
from stepjepa.base.errors import UserError
from stepjepa.base.files import fingerprint
from stepjepa.tasks.generic import GenericTask
from stepjepa.tasks.reference import with_published_rules
from stepjepa.tasks.registry import choose_task, load_task, source_fingerprint


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def (", "invalid syntax"),
        ("import sys\nsys.exit('no licence')", "no licence"),
        ("from stepjepa.tasks.base import Task\nclass Mine(Task):\n    name = headline = lenient = 'x'", "'score'"),
        (
            "from stepjepa.tasks.base import Task\nclass Mine(Task):\n    truth = score = lambda *_: None",
            r"^task: 'mine_\d:Mine' lacks the attribute 'name'; see docs/tasks.md$",
        ),
        ("Mine = 3", "is no class derived from"),
        ("", "has no attribute 'Mine'"),
    ],
)
def test_a_class_that_is_no_task_is_one_line(source, words, tmp_path, monkeypatch, request):
    name = f"mine_{request.node.callspec.indices['source']}"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    # A module in the working folder is found.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        load_task(f"{name}:Mine")


def test_the_file_of_a_users_task_is_known_and_that_of_ours_does_not_count():
    users = choose_task("user_task:LastWord", question_records())
    assert source_fingerprint(users) == fingerprint(sys.modules["user_task"].__file__)
    assert source_fingerprint(GenericTask()) is None
    assert source_fingerprint(with_published_rules(GenericTask())) is None
