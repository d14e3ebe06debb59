"""Private parts of libraries: all that are used are listed, and JepaTrainer notices one that is other than expected.

``PYTHONPATH=tests python tests/training/test_private.py --write`` writes the table into docs/design.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

import page_tables
import stepjepa
import tiny
from stepjepa.base.errors import UserError
from stepjepa.config.jepa import JepaConfig
from stepjepa.training import private
from stepjepa.training.checkpoints import CheckpointingTrainer
from stepjepa.training.held_out import EvaluatingTrainer
from stepjepa.training.private import KNOWN_TO_WORK, OTHER_LIBRARIES, PARTS, check_transformers, table
from stepjepa.training.trainer import JepaTrainer

MARK = "private parts"
ROOT = Path(__file__).parents[2]
LISTED = {part.name for part in PARTS} | OTHER_LIBRARIES.keys()
# Public, though they begin with an underscore; stubs that type checkers alone read.
PUBLIC = {"_asdict", "_replace", "_fields", "_make", "_exit", "_typeshed"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module uses: attributes, also by getattr; arguments; imported names and modules."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.keyword) and node.arg is not None:
            names = [node.arg]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [str(each.value) for each in node.args[1:2] if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.ImportFrom):
            names = [each.name for each in node.names]
            yield from [str(node.module)] * any(map(is_private, str(node.module).split(".")))
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if any(map(is_private, each.name.split("."))))
        yield from filter(is_private, names)


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, and attributes that it sets on ``self``.

    What a protocol declares is defined elsewhere.
    """
    protocols = [
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    ]
    declared = {id(node) for protocol in protocols for node in ast.walk(protocol)}
    for node in ast.walk(tree):
        if id(node) in declared:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.slow
def test_all_private_parts_are_listed() -> None:
    files = sorted(Path(stepjepa.__file__).parent.rglob("*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    own = {name for tree in trees for name in own_names(tree)}
    used = {name for tree in trees for name in private_names(tree)} - own - PUBLIC
    used = {f"torch.{name}" if name == "_dynamo" else name for name in used}
    ours = {name for kind in (JepaTrainer, EvaluatingTrainer, CheckpointingTrainer) for name in vars(kind)}
    overridden = {name for name in ours if is_private(name) and hasattr(Trainer, name)}
    assert len(overridden) >= 10
    assert used | overridden == LISTED


def test_a_new_private_name_is_seen() -> None:
    tree = ast.parse(
        "import a._b\nfrom c._d import e\nx._f\ngetattr(x, '_g', None)\nh(_i=1)\nfrom j import _k\n__l__._m()"
    )
    assert set(private_names(tree)) == {"a._b", "c._d", "_f", "_g", "_i", "_k", "_m"}


def test_overrides_take_what_trainer_passes() -> None:
    """Either the same parameters, or all that there may be."""
    for part in PARTS:
        if part.use == "overridden":
            given = inspect.signature(getattr(JepaTrainer, part.name)).parameters
            passed = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in given.values())
            assert passed or tuple(given) == part.parameters, part.name


def test_this_release_has_all_of_them() -> None:
    check_transformers()
    assert [part.fault() for part in PARTS] == [None] * len(PARTS)


@pytest.mark.parametrize("name", [part.name for part in PARTS if part.use == "overridden"])
def test_a_method_that_is_gone_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    method = getattr(Trainer, name)
    monkeypatch.delattr(Trainer, name)
    monkeypatch.setattr(Trainer, f"{name}_renamed", method, raising=False)
    oldest, newest = map(re.escape, KNOWN_TO_WORK)
    expected = rf"^transformers \S+ is not known to work .*Trainer has no {name}; install one from {oldest} to {newest}"
    with pytest.raises(UserError, match=expected):
        JepaTrainer(tiny.make_model("llama"), tiny.arguments(tmp_path), JepaConfig(), processing_class=tiny_tokenizer)


@pytest.mark.parametrize("name", ["_save_checkpoint", "_run_epoch", "_load_best_model", "_get_grad_norm"])
def test_another_signature_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, another: Any) -> None: ...

    monkeypatch.setattr(Trainer, name, other)
    with pytest.raises(
        UserError, match=rf"{name} takes \(self, another\), expected \(self.*pip install 'transformers=="
    ):
        check_transformers()


def test_what_is_never_called_or_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a method stays for others' sake, and where an attribute has another name."""
    read, of_trainer = private._source, Trainer.__module__
    source = read(of_trainer)
    for name, fault in [("_save_checkpoint", "never calls _save_checkpoint"), ("_tr_loss", "has no _tr_loss")]:
        changed = re.sub(rf"\bself\.{name}\b", "self.renamed", source)
        assert changed != source
        monkeypatch.setattr(private, "_source", lambda of, text=changed: text if of == of_trainer else read(of))
        with pytest.raises(UserError, match=fault):
            check_transformers()
    checkpointing = GradientCheckpointingLayer.__module__
    monkeypatch.setattr(private, "_source", lambda of: "" if of == checkpointing else read(of))
    with pytest.raises(UserError, match="has no _gradient_checkpointing_func"):
        check_transformers()


def test_the_releases_are_those_of_the_tests() -> None:
    oldest, newest = KNOWN_TO_WORK
    required = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pinned = re.search(
        r"^transformers==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert required is not None
    assert pinned is not None
    assert oldest.startswith(required[1])
    # `make test-newest` may have run on a newer one, which other libraries do not allow yet.
    assert Version(pinned[1]) <= Version(newest)


def test_the_page_has_the_table() -> None:
    assert page_tables.read(MARK) == table()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        page_tables.write(MARK, table())
    else:
        print(table())
