"""Stop signals: the first asks, the second ends the process, one that is forwarded counts once."""

import os
import signal

import pytest

from stepjepa.base.signals import Interruptions, Stopped, raising


def test_the_second_request_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, killed = [7.0], list[int](), list[tuple[int, int]]()
    monkeypatch.setattr("stepjepa.base.signals.time.monotonic", lambda: clock[0])
    with Interruptions(asked.append) as request:
        os.kill(os.getpid(), signal.SIGTERM)
        # Forwarded by torchrun or SLURM.
        clock[0] += 1.9
        os.kill(os.getpid(), signal.SIGINT)
        assert (asked, request.count, request.first) == ([signal.SIGTERM], 1, signal.SIGTERM)
        clock[0] += 0.2
        monkeypatch.setattr("stepjepa.base.signals.os.kill", lambda pid, number: killed.append((pid, number)))
        signal.raise_signal(signal.SIGINT)
        assert killed == [(os.getpid(), signal.SIGINT)]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_request_raises_so_that_unfinished_work_is_cleaned_up() -> None:
    cleaned = []
    with pytest.raises(Stopped) as stop, raising():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert cleaned
    assert stop.value.number == signal.SIGTERM


def test_a_handler_that_python_did_not_install_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = list[int]()
    monkeypatch.setattr("stepjepa.base.signals.signal.getsignal", lambda number: None)
    monkeypatch.setattr("stepjepa.base.signals.signal.signal", lambda number, handler: installed.append(number))
    with Interruptions():
        pass
    assert not installed
