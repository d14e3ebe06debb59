"""Figures that documents name in passing are those that the code and the committed results give."""

from __future__ import annotations

import subprocess
import sys

from document_blocks import ROOT


def text_of(page: str) -> str:
    """A page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_table_of_performance_is_that_of_the_committed_results() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], check=False)
    assert done.returncode == 0
