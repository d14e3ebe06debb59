"""Of processes that torchrun started, one reports an error, and torchrun's summary has it, too."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from stepjepa.base.errors import ANOTHER_ENDED, UserError, unexpected
from stepjepa.base.processes import as_single_process, check_launch, claim_report, is_main_process, started_together


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of torchrun for the processes of this machine."""
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    return tmp_path


def become(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = folder / str(rank) / "error.json"
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def test_the_same_error_is_reported_by_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = become(1, folder, monkeypatch)
    assert claim_report("error: a")
    message = json.loads(file.read_text())["message"]
    # As torchrun reads it.
    assert message["message"] == message["extraInfo"]["py_callstack"] == "error: a"
    assert int(message["extraInfo"]["timestamp"]) > 0
    become(0, folder, monkeypatch)
    assert not claim_report("error: a")
    become(2, folder, monkeypatch)
    assert claim_report("error: b")


def test_what_follows_from_an_error_is_reported_only_without_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become(1, folder, monkeypatch)
    # The other process was killed, and has said nothing.
    assert claim_report("interrupted", follows=True)
    (folder / "1" / "error.json").unlink()
    (folder / "2" / "error.json").write_text("{}")
    assert not claim_report("interrupted", follows=True)
    assert not (folder / "1" / "error.json").exists()


@pytest.mark.parametrize("file", [None, "", "error.json", "elsewhere/error.json", "missing/1/error.json"])
def test_without_torchrun_every_process_reports(
    file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if file is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    assert claim_report("error: a")
    assert claim_report("error: a")
    assert [path.name for path in tmp_path.rglob("*")] == ["elsewhere"]


def test_a_process_that_is_gone_is_told_in_plain_words() -> None:
    gone = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:19865. GLHF!")
    assert unexpected(gone) == f"{ANOTHER_ENDED}; what it printed says why, unless it was killed"
    assert unexpected(RuntimeError("Connection closed by peer")) == "Connection closed by peer"


def test_a_cluster_without_local_ranks_starts_one_process_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert started_together() == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert started_together() == 2


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}, None),
        ({"LOCAL_RANK": "-1"}, None),
        ({"RANK": ""}, "variable RANK is '', expected a whole number; unset it, or start with torchrun"),
        ({"WORLD_SIZE": "x"}, "variable WORLD_SIZE is 'x', expected a whole number"),
        ({"LOCAL_RANK": "$SLURM_LOCALID"}, "variable LOCAL_RANK is '[$]SLURM_LOCALID', expected a whole number"),
        ({"MASTER_PORT": "a"}, "variable MASTER_PORT is 'a', expected a whole number"),
        (
            {"RANK": "1"},
            "variable RANK is 1, and WORLD_SIZE is not set, so that there is no such process; unset",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "variable RANK is 2, and WORLD_SIZE is 2, so that there is no such process"),
    ],
)
def test_variables_of_torchrun_that_are_half_set_are_refused(
    variables: dict[str, str], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with nullcontext() if told is None else pytest.raises(UserError, match=told):
        check_launch()


def test_a_command_of_one_process_writes_its_files_whatever_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may give each machine a rank; only training runs on all of them."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_main_process()
    with as_single_process():
        assert is_main_process()
    assert not is_main_process()
