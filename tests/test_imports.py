"""The package's modules import each other in one direction, in few levels, and without what they do not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import stepjepa

ROOT = Path(stepjepa.__file__).parent
MOST_LEVELS = 15


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


@cache
def imports(name: str) -> frozenset[str]:
    """The package's modules that a module imports, at its top or in a function, but not for type checkers alone."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[name].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        waiting += ast.iter_child_nodes(node)
    return frozenset(found & MODULES.keys() - {name})


def longest(name: str, path: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain of imports that begins at a module."""
    assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
    if name not in _longest:
        chains = [longest(each, (*path, name)) for each in sorted(imports(name))]
        _longest[name] = (name, *max(chains, key=len, default=()))
    return _longest[name]


_longest: dict[str, tuple[str, ...]] = {}


def test_imports_have_no_circle_and_few_levels() -> None:
    chain = max((longest(name) for name in sorted(MODULES)), key=len)
    assert len(chain) <= MOST_LEVELS, " -> ".join(chain)


@pytest.mark.parametrize("module", ["stepjepa", "stepjepa.cli"])
def test_what_every_command_imports_is_light(module: str) -> None:
    heavy = {
        "torch",
        "transformers",
        "datasets",
        "pandas",
        "scipy",
        "plotly",
        "matplotlib",
        "sklearn",
        "rich",
        "jinja2",
    }
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
