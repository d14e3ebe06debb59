"""What processes that train together must agree on, and what is said when one is gone."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from stepjepa.errors import UserError
from stepjepa.training import processes
from stepjepa.training.processes import (
    naming_lost_processes,
    open_group,
    refuse_disagreement,
    refuse_separate_runs,
)

GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:37606: Connection reset by peer"


@pytest.mark.parametrize(
    ("mine", "other", "told"),
    [
        ({"train": {"sha256": "ab" * 32}}, {"train": {"sha256": "cd" * 32}}, "sha256 ab.* and cd"),
        ({"steps": 5}, {}, "steps 5 and None"),
        (None, "checkpoint-2", "None and checkpoint-2"),
    ],
)
def test_what_differs_is_named(mine: Any, other: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"same": {"a": 2, "b": 3}, "part": mine}
    refuse_disagreement(given)

    def gather(found: list[Any], own: dict[str, Any]) -> None:
        found[:] = [own, {"same": {"b": 3, "a": 2}, "part": mine}, {**own, "part": other}]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(UserError, match=rf"^processes 0 and 2 were given different part \({told}"):
        refuse_disagreement(given)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
    ],
)
def test_a_lost_process_is_told_from_other_errors(
    error: Exception, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(processes, "settle", lambda: settled.append(True))
    with pytest.raises(type(error) if not lost else UserError) as caught, naming_lost_processes(tmp_path):
        raise error
    assert ("another process of this run has ended or does not answer" in str(caught.value)) is lost
    # Before the model goes, gloo's threads let go of their tensors.
    assert settled == [True]


@pytest.mark.parametrize(("cpu", "world", "opened"), [(True, "2", True), (False, "2", False), (True, "1", False)])
def test_on_cpus_ddp_timeout_counts(cpu: bool, world: str, opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, timeout: calls.append((backend, timeout))
    )
    open_group(cpu=cpu, seconds=17, environment={"WORLD_SIZE": world, "RANK": "0"})
    assert calls == ([("gloo", datetime.timedelta(seconds=17))] if opened else [])


def test_processes_that_would_each_train_a_model_are_refused() -> None:
    refuse_separate_runs(1, {})
    # Planned for eight, started as one.
    refuse_separate_runs(1, {"WORLD_SIZE": "8"})
    refuse_separate_runs(2, {"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(ValueError, match=r"expected 2 processes that train one model, got 1; .* use_cpu=True"):
        refuse_separate_runs(1, {"WORLD_SIZE": "2", "RANK": "0"})
