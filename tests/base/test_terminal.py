"""Output on a terminal, in a pipe and as JSON."""

import io
import json
import math
import sys

import pytest

from stepjepa.base.terminal import (
    duration,
    escape_unencodable_output,
    print_json,
    print_rows,
    visible_lines,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\ttab", "two\nlines\\ttab"),
        ("red \x1b[31m, title \x1b]0;x\x07", "red \\x1b[31m, title \\x1b]0;x\\x07"),
        ("C1 \x9b31m, backwards \u202e, half \ud800", "C1 \\x9b31m, backwards \\u202e, half \\ud800"),
        ("<script>naïve – 中</script>", "<script>naïve – 中</script>"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert visible_lines(text) == shown


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "7.2% +- 1.5 - d hits x 2: \\u4e2d \\xe4"), ("latin-1", "7.2% ± 1.5 - d hits × 2: \\u4e2d ä")],
)
def test_a_stream_of_few_characters_spells_signs_and_escapes_the_others(
    encoding: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    escape_unencodable_output()
    print("7.2% ± 1.5 – Δ hits × 2: 中 ä")
    value = {"ä ±": ["中 \U0001f600", "\x9b"]}
    print_json(value)
    stream.flush()
    first, _, rest = stream.buffer.getvalue().decode(encoding).partition("\n")  # type: ignore[attr-defined]
    assert first == shown
    assert json.loads(rest) == value


ROWS = [("model", "m, 5 parameters"), ("a long name", "red \x1b[31m " + "word " * 20)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_are_aligned_on_a_terminal_and_plain_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_rows(ROWS)
    assert capsys.readouterr().out == f"model: m, 5 parameters\na long name: red \\x1b[31m {'word ' * 20}\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "43")
    print_rows(ROWS)
    lines = terminal.getvalue().splitlines()
    assert lines[0] == "  model        m, 5 parameters"
    assert lines[1].startswith("  a long name  red \\x1b[31m word")
    assert {line[:15] for line in lines[2:]} == {" " * 15}
    assert max(map(len, lines)) <= 43


def test_standard_output_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, math.nan, {"b": -math.inf}], "c": (2.5, None), "d": "\u2013 \x9b31m \u202e"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"a": [1, None, {"b": None}], "c": [2.5, None], "d": "\u2013 \x9b31m \u202e"}
    assert out == visible_lines(out)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (187, "3 min 07 s"),
        (7530, "2 h 05 min"),
        (86399.9, "1 d 00 h"),
        (273600, "3 d 04 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_marked_parts_are_green_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("example", "who? ⟦me⟧")]
    print_rows(rows)
    assert capsys.readouterr().out == "example: who? ⟦me⟧\n"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print_rows(rows)
    assert terminal.getvalue() == "  example  who? \x1b[32mme\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    print_rows(rows)
    assert terminal.getvalue() == "  example  who? ⟦me⟧\n"
