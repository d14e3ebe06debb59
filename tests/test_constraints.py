"""The pins of ``constraints.txt`` can be installed with the oldest Python that ``pyproject.toml`` names."""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]


def test_no_pin_wants_a_newer_python_than_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    wanted = {each.name: each.metadata.get("Requires-Python") or "" for each in importlib.metadata.distributions()}
    pinned = {name: python for name, python in wanted.items() if name in pins}
    assert len(pinned) > len(pins) // 2
    assert {name: python for name, python in pinned.items() if oldest not in SpecifierSet(python)} == {}
