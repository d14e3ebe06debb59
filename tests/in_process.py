"""A sweep's trials in this process, which has all libraries loaded: seconds instead of minutes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import IO

from stepjepa.cli.main import main


class InProcess:
    """Stands for ``study.local.Child``: runs ``python -P -m stepjepa ...`` to its end once it is made."""

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> None:
        assert list(command[1:4]) == ["-P", "-m", "stepjepa"]
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            self._code = main(list(command[4:]))
        log.write(stream.getvalue().encode())

    def exit_code(self) -> int:
        """That of the command."""
        return self._code
