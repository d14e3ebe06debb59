"""How the command line ends where it is stopped: one line, the right exit code, never a traceback."""

import importlib
import os
import signal
import subprocess
import sys
import types
from typing import Any

import pytest

from stepjepa.base.signals import Stopped
from stepjepa.cli.main import main

CHAT = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "One."}]


def run_with_output(file: int, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a process whose standard output is an open file."""
    command = [sys.executable, "-m", "stepjepa", *arguments]
    # Unbuffered, argparse would overlook that it can't print.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_full_disk_and_a_closed_pipe_are_no_traceback() -> None:
    for arguments in (["--help"], ["score", "--help"]):
        with open("/dev/full", "w", encoding="utf-8") as full:
            code, error = run_with_output(full.fileno(), *arguments)
        assert (code, error.count("\n")) == (2, 1), error
        assert "No space left on device; free some space or name a place on another disk" in error
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_with_output(writing, "--version") == (1, "")
    finally:
        os.close(writing)


def test_interrupted_while_a_command_is_loaded(capsys: Any, monkeypatch: Any) -> None:
    load = importlib.import_module

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "stepjepa.cli.evaluate":
            os.kill(os.getpid(), signal.SIGINT)
        return load(name, *rest)

    monkeypatch.setattr("stepjepa.cli.commands.importlib.import_module", interrupted)
    assert main(["score", "--help"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stepjepa score: interrupted\n"


def test_interrupted_while_transformers_is_loaded(capsys: Any, monkeypatch: Any) -> None:
    """A module whose import was interrupted must not be imported again for the message."""

    def broken() -> list[str]:
        raise SystemError("bad call flags")

    def interrupted(args: Any) -> int:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr("stepjepa.cli.main.trainer_flags", broken)
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    monkeypatch.setattr("stepjepa.cli.main.parse", lambda name, words: interrupted(words))
    assert main(["train"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stepjepa train: interrupted\n"
