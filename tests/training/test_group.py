"""What processes that train together must agree on, and what is said when one is gone."""

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepjepa.errors import UserError
from stepjepa.training import group
from stepjepa.training.group import is_lost, naming_lost_processes, open_group, refuse_disagreement

GLOO = "[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:37606: Connection reset by peer"


def gathering(monkeypatch: pytest.MonkeyPatch, *others: dict[str, str]) -> None:
    """A group of this process and others that tell something."""

    def gather(told: list[Any], mine: dict[str, str]) -> None:
        told[:] = [mine, *others]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


def test_one_process_agrees_with_itself() -> None:
    refuse_disagreement({"data": {"records": 3}})


def test_equal_parts_are_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch, {"data": '{"a": 2, "b": 3}'})
    refuse_disagreement({"data": {"b": 3, "a": 2}})


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        ({"train": {"sha256": "ab" * 32}}, '{"train": {"sha256": "' + "cd" * 32 + '"}}', "sha256 ab.* and cd"),
        ({"steps": 5}, '{"steps": 7}', "steps 5 and 7"),
        ({"steps": 5}, "{}", "steps 5 and None"),
        ("checkpoint-4", '"checkpoint-2"', "checkpoint-4 and checkpoint-2"),
        (None, '"checkpoint-2"', "None and checkpoint-2"),
    ],
)
def test_what_differs_is_named(mine: Any, other: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch, {"same": "1", "part": other})
    with pytest.raises(UserError, match=rf"^processes 0 and 1 were given different part \({words}"):
        refuse_disagreement({"same": 1, "part": mine})


def test_the_first_process_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering(monkeypatch, {"part": "3"}, {"part": "5"}, {"part": "7"})
    with pytest.raises(UserError, match=r"^processes 0 and 2 were given different part \(3 and 5\); start all with"):
        refuse_disagreement({"part": 3})


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("[gloo] Timed out waiting 10000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(GLOO), False),
    ],
)
def test_errors_of_a_lost_process_are_told_from_others(error: Exception, lost: bool) -> None:
    assert is_lost(error) is lost


def test_it_is_said_in_one_line(tmp_path: Path) -> None:
    words = (
        "^another process of this run has ended or does not answer; what it said itself tells why, and start the run "
    )
    with (
        pytest.raises(UserError, match=f"{words}again with --resume_from_checkpoint auto$"),
        naming_lost_processes(tmp_path),
    ):
        raise RuntimeError(GLOO)
    with pytest.raises(RuntimeError, match=r"^of our own$"), naming_lost_processes(tmp_path):
        raise RuntimeError("of our own")


@pytest.mark.parametrize(
    ("cpu", "environment", "opened"),
    [
        (True, {"WORLD_SIZE": "2", "RANK": "0"}, True),
        (False, {"WORLD_SIZE": "2", "RANK": "0"}, False),
        (True, {"WORLD_SIZE": "1", "RANK": "0"}, False),
        (True, {}, False),
    ],
)
def test_on_cpus_the_time_that_is_waited_is_ours(
    cpu: bool, environment: dict[str, str], opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, timeout: calls.append((backend, timeout))
    )
    open_group(cpu=cpu, seconds=17, environment=environment)
    assert calls == ([("gloo", datetime.timedelta(seconds=17))] if opened else [])


@pytest.mark.parametrize("error", [RuntimeError(GLOO), ValueError("ours")])
def test_a_process_that_fails_lets_threads_settle_before_its_model_goes(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(group, "settle", lambda: settled.append(True))
    with pytest.raises((UserError, ValueError)), naming_lost_processes(tmp_path):
        raise error
    assert settled == [True]


@pytest.mark.parametrize("how", [[], ["lost"]])
def test_no_process_waits_for_its_own_threads_when_it_leaves(how: list[str]) -> None:
    """Without the pause one of seven launches hangs that end well, so that fifteen find it but for one time in ten.

    Launches of which a process is lost did not hang without it either; that they end is tested here, too.
    """
    program = Path(__file__).resolve().parents[1] / "leaving.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), "15", *how],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
        check=True,
    )
    assert done.stdout.strip() == "0", done.stderr
