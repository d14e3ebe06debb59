"""Custom tasks may use the attribute names of 0.2.0."""

from typing import Any

from stepjepa.tasks.base import Task
from stepjepa.tasks.generic import GenericTask


def test_a_custom_task_may_use_the_attribute_names_of_an_earlier_version() -> None:
    old: Any = type("Old", (GenericTask,), {"lenient": "contains", "takes": ("time_limit",), "asked": 7})
    new: Any = type(
        "New", (GenericTask,), {"secondary_score": "contains", "used_options": ("time_limit",), "detection_order": 7}
    )
    for task in (old, new):
        assert issubclass(task, Task)
        assert (task.secondary_score, task.used_options, task.detection_order) == ("contains", ("time_limit",), 7)
        assert (task.lenient, task.takes, task.asked) == ("contains", ("time_limit",), 7)
