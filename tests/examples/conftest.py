"""What tests of the examples share: their commands run in this process, which has all libraries loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from in_process import InProcess
from stepjepa.study import local

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# At the end, since names as common as those of the scripts may be taken.
sys.path.append(str(EXAMPLES / "experiment"))


@pytest.fixture
def load(quick_nl_rx: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """``load(name)``: an example as a module; the trials of its sweeps run in this process, too."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(local, "Child", InProcess)
    return importlib.import_module
