"""The figures of a soak, printed at its end: by then each part has written its own."""

import os
from pathlib import Path
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for path in sorted(Path(os.environ.get("SOAK_FIGURES", "soak")).glob("*.json")):
        terminalreporter.write_line(f"{path}: {' '.join(path.read_text(encoding='utf-8').split())}")
