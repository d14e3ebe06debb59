"""A folder that another process works in is refused, and free again when that process is gone, however it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepjepa.errors import UserError
from stepjepa.locks import locked

HOLD = "import sys, time; from pathlib import Path; from stepjepa.locks import locked\n"
HOLD += "with locked(Path(sys.argv[1]), 'stepjepa train'): print('held', flush=True); time.sleep(60)"


def test_a_second_process_is_told_who_holds_the_lock_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        told = rf"is in use by stepjepa train, process {first.pid} on .* since 20\d\d-"
        with pytest.raises(UserError, match=told), locked(folder, "stepjepa train", patience=0):
            pass
        first.send_signal(signal.SIGKILL)
    with locked(folder, "stepjepa train", patience=5):
        pass
    assert not list(tmp_path.rglob(".*"))
    # Where nothing was written, nothing is left.
    with locked(tmp_path / "others" / "b", "stepjepa train"):
        pass
    assert not (tmp_path / "others").exists()
