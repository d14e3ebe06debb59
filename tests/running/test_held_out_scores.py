"""Errors of code that a run shares with an evaluation name the settings of the run."""

from typing import Any

import pytest

from stepjepa.base.errors import UserError
from stepjepa.config.run import RunConfig
from stepjepa.data.records import parse_record
from stepjepa.running.held_out_scores import held_out_scores

CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


@pytest.mark.parametrize(("data", "named"), [({"eval_file": "e"}, "eval_file"), ({"data_file": "d"}, "data_file")])
def test_held_out_records_that_no_task_can_score(data: dict[str, Any], named: str) -> None:
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    record = parse_record({"messages": messages})
    config = RunConfig(eval_generate=2, eval_task="generic", **data)
    unused: Any = None
    with pytest.raises(UserError, match=f"name another `{named}` or `eval_task`$"):
        held_out_scores(config, [record], [record], unused, unused)
