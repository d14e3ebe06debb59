"""The package's modules import each other in one direction, in few levels, and without what they do not need."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stepjepa

ROOT = Path(stepjepa.__file__).parent
MOST_LEVELS = 10
"""Modules in the longest chain of imports, those in functions and for type checkers counted."""
MOST_LINES = 450

FLOORS = (
    ("base",),
    ("config", "chat", "data", "views"),
    ("batch", "tasks"),
    ("models", "preparing"),
    ("objectives", "store"),
    ("training", "evaluation"),
    ("running", "study", "inspection"),
    ("cli",),
)
"""Folders from the lowest floor up; a folder may import those of its own floor and of the floors below."""
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    """The syntax tree of a module, flat."""
    return [*ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))]


@functools.cache
def imports(name: str) -> frozenset[str]:
    """The package's modules that a module imports: at its top, in a function, or for type checkers alone."""
    result: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            result |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            result |= {each.name for each in node.names}
    # A package's __init__ that is imported for a name in it counts, one that is passed on the way does not.
    return frozenset(result & MODULES.keys() - {name})


def test_imports_have_no_circle_and_few_levels() -> None:
    chains: dict[str, list[str]] = {}
    graph = {name: imports(name) for name in MODULES}
    # Raises an error that names the modules of a circle.
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [name, *max((chains[each] for each in graph[name]), key=len, default=[])]
    chain = max(chains.values(), key=len)
    assert len(chain) <= MOST_LEVELS, " -> ".join(chain)


def test_the_shell_is_known_to_nothing_but_itself() -> None:
    known = {}
    for name in (name for name in MODULES if not name.startswith("stepjepa.cli")):
        named = {each.name for node in nodes(name) if isinstance(node, ast.Import) for each in node.names}
        named |= {node.module for node in nodes(name) if isinstance(node, ast.ImportFrom) and node.module}
        shell = {each for each in named if each.partition(".")[0] == "argparse" or "ArgumentParser" in each}
        if name != "stepjepa.__main__":
            shell |= {each for each in named if each.startswith("stepjepa.cli")}
        known |= {name: shell} if shell else {}
    assert not known


def folder_of(name: str) -> str:
    """The folder of a module; empty for the package itself and ``__main__``."""
    folder = name.removeprefix("stepjepa").removeprefix(".").partition(".")[0]
    return folder if (ROOT / folder).is_dir() else ""


def test_nothing_is_imported_from_a_higher_floor() -> None:
    upward = [
        f"{name} imports {each}"
        for name in MODULES
        if (folder := folder_of(name))
        for each in imports(name)
        if FLOOR.get(folder_of(each), len(FLOORS)) > FLOOR[folder]
    ]
    assert not upward


def test_the_trainer_is_known_from_the_floor_of_training_up() -> None:
    """Below it only the type of the arguments is, which the record of a run names."""
    below = [name for name in MODULES if (folder := folder_of(name)) and FLOOR[folder] < FLOOR["training"]]
    known = [
        f"{name} imports {each.name} from {node.module}"
        for name in below
        for node in nodes(name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for each in node.names
        if each.name.startswith("Trainer") or node.module.startswith("transformers.trainer")
    ]
    assert not known


def test_every_folder_has_a_floor() -> None:
    assert {folder_of(name) for name in MODULES} == {*FLOOR, ""}


@functools.cache
def called_names(name: str) -> set[str]:
    """The names of the functions that a module calls."""
    calls = [node.func for node in nodes(name) if isinstance(node, ast.Call)]
    return {each.id for each in calls if isinstance(each, ast.Name)} | {
        each.attr for each in calls if isinstance(each, ast.Attribute)
    }


@pytest.mark.parametrize("function", ["set_up", "set_up_attention", "make_collator", "attach_heads"])
def test_a_model_is_set_up_in_one_place(function: str) -> None:
    callers = {name for name in MODULES if function in called_names(name)}
    assert callers - {"stepjepa.objectives.setup"} == {"stepjepa.objectives.jepa"}


def test_files_are_small() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


@pytest.mark.parametrize("module", ["stepjepa", "stepjepa.cli.main"])
def test_what_every_command_imports_is_light(module: str) -> None:
    heavy = {
        "torch",
        "transformers",
        "datasets",
        "pandas",
        "scipy",
        "matplotlib",
        "sklearn",
        "jinja2",
    }
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
