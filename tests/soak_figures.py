"""Where the long tests draw from, and where their figures go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

SEED = int(os.environ.get("SOAK_SEED") or time.strftime("%Y%m%d"))
"""Given as ``SOAK_SEED``, the date otherwise, which all processes of a test run agree on. Stands beside the figures."""


def note(part: str, figures: dict[str, Any]) -> None:
    """Print figures, and add them to those of the part in ``soak/``, or in ``SOAK_FIGURES``.

    Args:
        part: name of the file.
        figures: what is to stand there.
    """
    target = Path(os.environ.get("SOAK_FIGURES", "soak")) / f"{part}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps({**before, "seed": SEED, **figures}, indent=2) + "\n")
    print(f"{part}: seed {SEED}: {figures}", flush=True)
