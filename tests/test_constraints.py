"""The pins of ``constraints.txt`` can be installed with the oldest Python that ``pyproject.toml`` names."""

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def test_no_pin_wants_a_newer_python_than_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(pin.name): pin.specifier
        for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))
    }
    wanted = {
        name: SpecifierSet(found.metadata["Requires-Python"] or "")
        for found in importlib.metadata.distributions()
        if (name := canonicalize_name(found.name)) in pins and found.version in pins[name]
    }
    assert len(wanted) > len(pins) // 2
    assert {name: str(python) for name, python in wanted.items() if oldest not in python} == {}
