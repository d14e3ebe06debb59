"""What processes that train together must agree on."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepjepa.base.errors import UserError
from stepjepa.running.process import check_agreement
from stepjepa.training.argument_checks import check_processes


@pytest.mark.parametrize("other", [{"sha256": "cd"}, {}, None])
def test_what_differs_is_named(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same, part = {"a": 2, "b": 3}, {"sha256": "ab"}
    check_agreement({"same": same, "part": part})

    def gather(found: list[Any], own: dict[str, Any]) -> None:
        found[:] = [own, {**own, "part": json.dumps(other)}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(UserError, match="the processes were started with different part"):
        check_agreement({"same": same, "part": part})


def test_processes_that_would_each_train_a_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = SimpleNamespace(n_gpu=1)
    for world, rank in ((None, None), ("8", None), ("2", "0")):
        for name, value in (("WORLD_SIZE", world), ("RANK", rank)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        # Planned for eight and started as one, it is no mistake.
        check_processes(args, 2 if rank else 1)
    with pytest.raises(ValueError, match=r"expected 2 processes that train one model, got 1; .* use_cpu=True"):
        check_processes(args, 1)
    with pytest.raises(ValueError, match="expected one device per process, got 2"):
        check_processes(SimpleNamespace(n_gpu=2), 2)  # type: ignore[arg-type]
