"""How the command line ends where it is stopped: one line, the right exit code, never a traceback."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepjepa.cli import main
from stepjepa.files import write_jsonl

CHAT = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "One."}]


def run_with_output(file: int, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a process whose standard output is an open file."""
    command = [sys.executable, "-m", "stepjepa", *arguments]
    # Unbuffered, argparse would overlook that it can't print.
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    return done.returncode, done.stderr


def test_a_full_disk_and_a_closed_pipe_are_no_traceback() -> None:
    for arguments in (["--help"], ["score", "--help"]):
        with open("/dev/full", "w", encoding="utf-8") as full:
            code, error = run_with_output(full.fileno(), *arguments)
        assert (code, error.count("\n")) == (2, 1), error
        assert error.endswith("No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_with_output(writing, "--version") == (1, "")
    finally:
        os.close(writing)


def test_interrupted_while_a_command_is_loaded(capsys: Any, monkeypatch: Any) -> None:
    load = importlib.import_module

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "stepjepa.commands.evaluate":
            os.kill(os.getpid(), signal.SIGINT)
        return load(name, *rest)

    monkeypatch.setattr("stepjepa.commands.importlib.import_module", interrupted)
    assert main(["score", "--help"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stepjepa score: interrupted\n"


@pytest.mark.parametrize(
    ("given", "code", "told"), [("None", 0, ""), ("7", 7, ""), ("'no\\nlicence'", 1, "stepjepa score: no licence\n")]
)
def test_sys_exit_in_a_plug_in_ends_as_python_ends(
    given: str, code: int, told: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    source = "import sys\nfrom user_task import LastWord\n\nclass Mine(LastWord):\n"
    source += f"    def truth(self, record):\n        sys.exit({given})\n"
    (tmp_path / "ending_task.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ending_task", raising=False)
    write_jsonl(tmp_path / "test.jsonl", [{"messages": CHAT}])
    write_jsonl(tmp_path / "said.jsonl", [{"index": 0, "generated": "x"}])
    files = ["--test_file", str(tmp_path / "test.jsonl"), "--predictions", str(tmp_path / "said.jsonl")]
    files += ["--output_file", str(tmp_path / "out.jsonl")]
    assert main(["score", *files, "--task", "ending_task:Mine"]) == code
    assert capsys.readouterr().err == told
