"""What data files and models wrote is text: in the terminal it moves no cursor, in files it is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main

EVIL = "<script>alert(1)</script> \x1b[2J\x1b]0;owned\x07 \x9b31m [red]x[/red] [link=http://x]y[/link] \u202etxt"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    chat = [
        {"role": "system", "content": f"Be kind. {EVIL}"},
        {"role": "user", "content": f"Say {EVIL}"},
        {"role": "assistant", "content": f"One {EVIL}.\n\nTwo {EVIL}."},
    ]
    write_jsonl(tmp_path / "data.jsonl", [{"messages": chat}] * 3)
    return tmp_path / "data.jsonl"


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """All that was printed, which must obey the terminal's owner alone."""
    captured = capsys.readouterr()
    for stream in captured:
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(stream), repr(stream)
    return captured.out + captured.err


@pytest.mark.slow
def test_inspect_shows_what_is_there_and_obeys_nothing(data: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = ["--train_file", str(data), "--model_name", "preset:tiny", "--step_jepa", "--max_length", "4096"]
    assert main(["inspect", *flags, "--png", str(data.with_suffix(".png"))]) == 0
    out = printed(capsys)
    assert "\\x1b" in out
    # Markup of the library that draws the tables is text as well.
    assert "]x[" in out.replace("│", "")
    template = data.with_suffix(".jinja")
    template.write_text("{% for m in messages %}\x1b[2J[red]{{ m.role }}: {{ m.content }}\x07\n{% endfor %}", "utf-8")
    main(["inspect", *flags, "--chat_template", str(template)])
    printed(capsys)


def test_scores_of_generated_text(data: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "said.jsonl"
    write_jsonl(output, [{"index": index, "generated": f"{EVIL} {index}"} for index in range(3)])
    scored = tmp_path / "scored.jsonl"
    flags = ["--test_file", str(data), "--predictions", str(output), "--output_file", str(scored), "--overwrite"]
    assert main(["score", *flags]) == 0
    assert "<script>" not in printed(capsys)
    # In the file every character is kept.
    lines = [json.loads(line) for line in scored.read_text(encoding="utf-8").splitlines()]
    assert [line["generated"] for line in lines] == [f"{EVIL} {index}" for index in range(3)]


def test_errors_quote_and_do_not_obey(data: Path, tmp_path: Path, capsys: Any) -> None:
    for line in (
        {"messages": [{"role": EVIL, "content": "x"}]},
        {EVIL: 1},
        {"messages": [{"role": "user", EVIL: "x"}]},
    ):
        write_jsonl(tmp_path / "bad.jsonl", [line])
        assert main(["inspect", "--train_file", str(tmp_path / "bad.jsonl"), "--model_name", "preset:tiny"]) == 2
        assert len(printed(capsys).splitlines()) == 1
    assert main(["inspect", "--train_file", f"{tmp_path}/{EVIL[:9]}\x1b[2J", "--model_name", "preset:tiny"]) == 2
    assert "no such" in printed(capsys)
