"""Mutations: does the suite notice a changed line? Not part of ``make test``; hours for all 200.

Draws executable lines of the folders that hold the arithmetic by a fixed seed, changes one thing in each (a comparison,
an operator, a constant, a condition, a returned value), and runs the tests that run the line. A mutation that no test
notices is a survivor; all survivors are listed.

    pip install pytest-cov
    python -m pytest -m "sample or not slow" --cov=src/stepjepa --cov-context=test --cov-report=
    python tests/mutation.py --count 200 --output mutations.json

It changes files of the tree that it runs in, and puts them back: run it in a clone. The same command resumes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "stepjepa"
FOLDERS = ("batch", "objectives", "training", "tasks", "study")

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}


class Mutation(NamedTuple):
    """A file with one line changed, described by ``change``."""

    path: Path
    line: int  # counted from 1
    change: str
    text: str


def changes(node: ast.AST) -> Iterator[Callable[[], None]]:
    """The ways in which a node can be changed in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda: node.ops.__setitem__(0, COMPARISONS[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield lambda: setattr(node, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda: setattr(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield lambda: setattr(node, "value", ast.Constant(None))


def changeable(path: Path) -> dict[int, list[int]]:
    """For each line of a file the places, in the order of ``ast.walk``, of nodes that can be changed.

    Left out is what no test can notice: types, ``if TYPE_CHECKING``, and ``strict`` of ``zip``, which guards against
    errors in the code itself.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    types = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    idle = {id(inner) for each in types if each is not None for inner in ast.walk(each)}
    idle |= {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "strict"}
    idle |= {id(node) for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"}
    by_line: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        if id(node) not in idle and any(True for _ in changes(node)):
            by_line.setdefault(node.lineno, []).append(place)  # type: ignore[attr-defined]
    return by_line


def mutate(path: Path, line: int, place: int) -> Mutation:
    """A file with the node at a place changed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    before = ast.unparse(tree)
    next(changes(list(ast.walk(tree))[place]))()
    after = ast.unparse(ast.fix_missing_locations(tree))
    old, new = next(pair for pair in zip(before.splitlines(), after.splitlines(), strict=False) if pair[0] != pair[1])
    return Mutation(path, line, f"{old.strip()} -> {new.strip()}", after)


def draw(count: int, seed: int) -> list[Mutation]:
    """Mutations of lines drawn over all files, one a line."""
    files = [path for folder in FOLDERS for path in sorted((SOURCE / folder).rglob("*.py"))]
    lines = [(path, line, places) for path in files for line, places in sorted(changeable(path).items())]
    generator = random.Random(seed)
    chosen = generator.sample(lines, min(count, len(lines)))
    return [mutate(path, line, generator.choice(places)) for path, line, places in chosen]


def tests_of(mutation: Mutation, coverage: Any) -> list[str]:
    """The tests that ran a line; of a line that only a fixture ran those of the file, of any other some folders."""
    ran = coverage.contexts_by_lineno(str(mutation.path))
    # A statement of several lines may be known by an earlier one.
    line = max((each for each in ran if each <= mutation.line), default=0)
    named = [context.rpartition("|")[::2] for context in ran.get(line, ()) if context]
    files = {test.partition("::")[0] for test, phase in named if phase == "setup"}
    alone = {test for test, phase in named if phase == "run" and test.partition("::")[0] not in files}
    # What runs when a module is imported belongs to no test.
    folders = [f"tests/{name}" for name in (mutation.path.relative_to(SOURCE).parts[0], "invariants", "golden")]
    # The nearest first, since the first failure ends it.
    return sorted(files | alone, key=lambda test: (not test.startswith(folders[0]), test)) or folders


def noticed(mutation: Mutation, tests: list[str]) -> bool:
    """Whether one of the tests fails, or takes a quarter of an hour."""
    original = mutation.path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "sample or not slow", "-p", "no:cacheprovider", *tests]
    try:
        mutation.path.write_text(mutation.text, encoding="utf-8")
        return bool(subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=900).returncode)
    except subprocess.TimeoutExpired:
        return True
    finally:
        mutation.path.write_text(original, encoding="utf-8")


def main() -> int:
    """Run drawn mutations; the share that is noticed, and the survivors."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=200, help="mutations drawn (200)")
    options.add_argument("--seed", type=int, default=42, help="of the draw (42)")
    options.add_argument("--coverage", default=".coverage", help="data of pytest-cov with contexts (%(default)s)")
    options.add_argument("--output", type=Path, required=True, help="JSON file of all verdicts; resumed")
    args = options.parse_args()
    from coverage import CoverageData

    coverage = CoverageData(args.coverage)
    coverage.read()
    drawn = draw(args.count, args.seed)
    # What the file holds already is not run again.
    results: list[dict[str, Any]] = json.loads(args.output.read_text()) if args.output.exists() else []
    for number, mutation in enumerate(drawn[len(results) :], start=len(results) + 1):
        where = f"{mutation.path.relative_to(ROOT)}:{mutation.line}"
        is_noticed = noticed(mutation, tests_of(mutation, coverage))
        results.append({"where": where, "change": mutation.change, "noticed": is_noticed})
        args.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(
            f"[{number}/{len(drawn)}] {'noticed ' if is_noticed else 'SURVIVED'} {where}  {mutation.change}", flush=True
        )
    share = sum(bool(result["noticed"]) for result in results) / len(results)
    print(f"{share:.1%} of {len(results)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
