"""Standard streams that always work, and text that a terminal shows but never obeys."""

from __future__ import annotations

import io
import os
import sys

from stepjepa.errors import visible


def visible_lines(text: str) -> str:
    """A text of several lines in which only the line ends do anything to a terminal; see ``errors.visible``."""
    return "\n".join(map(visible, text.split("\n")))


def open_standard_streams() -> None:
    """Make standard input, output and error usable where a service was started without them, or with few characters."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken; left closed, the next file that is opened would become standard output.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            # A terminal of ASCII or Latin-1 shows \u2013 instead of ending the program.
            stream.reconfigure(errors="backslashreplace")
