"""The documents are true: the tree is the tree, the Python example runs, the commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from stepjepa.cli import COMMANDS
from stepjepa.files import write_jsonl

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = README.partition("    src/stepjepa/\n")[2].partition("    tests/")[0]
    named = set(re.findall(r"^ {6}(\S+)", tree, re.MULTILINE))
    source = ROOT / "src" / "stepjepa"
    there = {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    there |= {f"{path.name}/" for path in source.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert named == there


def test_every_command_that_documents_name_exists() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md", "docs/performance.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^ {4}|`|-m )stepjepa ([a-z]+)", text, re.MULTILINE))
        assert named <= set(COMMANDS), name
        assert named or name != "README.md"
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name} links to {link}"


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        for line in re.findall(r"make ((?:[a-z-]+ ?)+)", (ROOT / name).read_text(encoding="utf-8")):
            assert line.split()[0] in targets, line


def test_the_python_example_runs(tmp_path: Path) -> None:
    example = README.partition("```python\n")[2].partition("```")[0]
    assert len(example.strip().splitlines()) <= 15
    write_jsonl(tmp_path / "train.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 3])
    code = example.replace("max_steps=100", "max_steps=2, use_cpu=True, report_to='none'")
    assert code != example
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.name)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400
