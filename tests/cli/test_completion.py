"""Completion scripts are understood by their shells."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepjepa.cli.commands import COMMANDS
from stepjepa.cli.main import main

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script for each shell."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        with (folder / shell).open("w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
            assert main(["completion", shell]) == 0
    for name in ("data.jsonl", "other.txt"):
        (folder / name).touch()
    (folder / "datasets").mkdir()
    return folder


# Asks as an interactive bash does: the words, which one, and the function that 'complete' names.
ASK = """
source ./bash
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
found=$(complete -p stepjepa)
function=${found#*-F }; function=${function%% *}
"$function" stepjepa "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], set(COMMANDS)),
        (["train", "--pooling", ""], {"last", "mean"}),
        (["train", "--step_jepa", "--logging_st"], {"--logging_steps", "--logging_strategy"}),
        (["train", "--train_file", "d"], {"data.jsonl", "datasets"}),
        (["train", "--output_dir", "d"], {"datasets"}),
        (["prepare", "nl-rx", "--siz"], {"--size"}),
    ],
)
def test_bash_completes(scripts: Path, words: list[str], expected: set[str]) -> None:
    asked = ["bash", "--norc", "-c", ASK, "bash", "stepjepa", *words]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=scripts, timeout=60, check=True)
    assert (set(done.stdout.split()), done.stderr) == (expected, "")


def test_without_the_library_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
