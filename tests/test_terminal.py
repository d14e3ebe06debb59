"""Text that a terminal shows and does not obey, and streams that are there whoever starts the program."""

import io
import json
import math
import os
import subprocess
import sys

import pytest

from stepjepa.terminal import (
    duration,
    lines_to_stderr,
    open_standard_streams,
    print_json,
    print_rows,
    visible_lines,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext", "plain\\ttext"),
        ("two\nlines", "two\nlines"),
        ("red \x1b[31m, title \x1b]0;x\x07", "red \\x1b[31m, title \\x1b]0;x\\x07"),
        ("C1 \x9b31m", "C1 \\x9b31m"),
        ("back\rwards \u202e", "back\\rwards \\u202e"),
        ("<script>naïve – 中</script>", "<script>naïve – 中</script>"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_nothing_but_line_ends_is_obeyed(text: str, shown: str) -> None:
    assert visible_lines(text) == shown


def test_a_stream_of_few_characters_writes_the_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    open_standard_streams()
    print("1 – 2")
    stream.flush()
    assert stream.buffer.getvalue() == b"1 \\u2013 2\n"  # type: ignore[attr-defined]
    print("nobody", file=sys.stderr)
    sys.stderr.close()


@pytest.mark.skipif(os.name != "posix", reason="closes file descriptors by a shell")
def test_closed_streams_are_no_place_for_files() -> None:
    code = (
        "from stepjepa.terminal import open_standard_streams as o; o(); print('said'); "
        "import os, sys; f = os.open(os.devnull, os.O_RDONLY); sys.exit(f > 2)"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code], check=False)
    assert done.returncode == 1


ROWS = [("model", "m, 5 parameters"), ("a long name", "red \x1b[31m " + "word " * 20)]


def test_rows_are_plain_lines_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(ROWS)
    assert capsys.readouterr().out == f"model: m, 5 parameters\na long name: red \\x1b[31m {'word ' * 20}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_rows_are_aligned_on_a_terminal(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    for name, value in {"COLUMNS": "43", **environment}.items():
        monkeypatch.setenv(name, value)
    print_rows(ROWS)
    lines = terminal.getvalue().splitlines()
    assert lines[0].rstrip() == "  model        m, 5 parameters"
    assert lines[1].startswith("  a long name  red \\x1b[31m word")
    assert {line[:15] for line in lines[2:]} == {" " * 15}
    assert max(map(len, lines)) <= 43


def test_json_is_json_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, math.nan, {"b": -math.inf}], "c": (2.5, None), "d": "\u2013"})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None, {"b": None}], "c": [2.5, None], "d": "\u2013"}


def test_lines_for_people_leave_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with lines_to_stderr(False):
        print("people")
    with lines_to_stderr(True):
        print("aside")
    print_json({})
    assert capsys.readouterr() == ("people\n{}\n", "aside\n")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3599.9, "1 h 00 min"),
        (7530, "2 h 05 min"),
        (86399.9, "1 d 00 h"),
        (273600, "3 d 04 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
