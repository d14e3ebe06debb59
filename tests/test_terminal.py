"""Text that a terminal shows and does not obey, and streams that are there whoever starts the program."""

import io
import os
import subprocess
import sys

import pytest

from stepjepa.terminal import open_standard_streams, visible_lines


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
