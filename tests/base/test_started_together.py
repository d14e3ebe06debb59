"""Of processes that torchrun started, one reports an error, and torchrun's summary has it, too."""

import json
from pathlib import Path

import pytest

from stepjepa.base.errors import ANOTHER_ENDED, unexpected
from stepjepa.base.processes import claim_report, started_together


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
