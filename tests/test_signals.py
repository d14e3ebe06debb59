"""Signals: the first asks, the second ends at once, one that is passed on counts once."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from stepjepa.signals import OneRequest, Stopped, end_with_launcher, raising

# Says "up", then waits for as many signals as end it, saying what came.
PROGRAM = """
import signal, sys
from stepjepa.signals import OneRequest
with OneRequest(lambda number: print("asked", number, flush=True)) as request:
    print("up", flush=True)
    while True:
        # Without Python in between, as a long computation: only the system can end this.
        signal.sigtimedwait([signal.SIGUSR1], 60)
"""


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("SLURM_JOB_ID",)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(first)
        assert process.stdout.readline() == f"asked {first.value}\n"
        process.send_signal(second)
        assert process.wait(60) == -second.value


def test_one_that_is_passed_on_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    clock = [7.0]
    monkeypatch.setattr("stepjepa.signals.time.monotonic", lambda: clock[0])
    killed: list[tuple[int, int]] = []
    with OneRequest(asked.append, {"TORCHELASTIC_RUN_ID": "a"}) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        clock[0] += 1.9
        os.kill(os.getpid(), signal.SIGTERM)
        assert (asked, request.count, request.first) == ([signal.SIGTERM], 1, signal.SIGTERM)
        monkeypatch.setattr("stepjepa.signals.os.kill", lambda pid, number: killed.append((pid, number)))
        clock[0] += 0.2
        request._note(signal.SIGINT, None)
        assert killed == [(os.getpid(), signal.SIGINT)]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_torchrun_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 7, 1])
    sent: list[int] = []
    over = threading.Event()

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        sent.append(number)
        if len(sent) == 2:
            over.set()

    monkeypatch.setattr("stepjepa.signals.os.getppid", lambda: next(parents))
    monkeypatch.setattr("stepjepa.signals.os.kill", kill)
    monkeypatch.setattr("stepjepa.signals._LOOK", 0.0)
    monkeypatch.setattr("stepjepa.signals._PATIENCE", 0.0)
    end_with_launcher({"TORCHELASTIC_RUN_ID": "a"})
    assert over.wait(60)
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_what_a_shell_started_does_not() -> None:
    before = threading.active_count()
    end_with_launcher({})
    assert threading.active_count() == before


def test_what_is_half_done_is_cleared_away() -> None:
    cleared = []
    with pytest.raises(Stopped) as stop, raising():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleared.append(True)
    assert cleared
    assert stop.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
