"""The documents are true: the tree is the tree, the Python example runs, the commands exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepjepa.cli import COMMANDS
from stepjepa.files import write_jsonl
from stepjepa.tasks.registry import TASKS, load_task

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TASKS_PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_the_way_from_the_command_line_to_the_loss_is_ten_files() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = page.partition("## From the command line to the loss")[2].partition("\n## ")[0].splitlines()
    named = [re.findall(r"`([\w/]+\.py)`", row.split("|")[1]) for row in rows if row.startswith("| `")]
    assert 5 < len(named) <= 10
    for path in (each[0] for each in named):
        assert (ROOT / "src" / "stepjepa" / path).is_file(), path


# Each may import from those before it.
ORDER = ["errors", "own_code", "terminal", "offline", "signals", "files", "fields", "run_folder", "options"]
ORDER += ["config", "arguments", "published"]
ORDER += ["data", "chat", "batch", "models", "objectives", "compute", "answers", "tasks", "preparing"]
ORDER += ["inspection", "analysis", "evaluation", "training", "experiments", "pages", "commands", "cli"]


def test_imports_point_one_way() -> None:
    source = ROOT / "src" / "stepjepa"
    for path in source.rglob("*.py"):
        place = path.relative_to(source)
        own = place.parts[0] if len(place.parts) > 1 else place.stem
        if own.startswith("__"):
            continue
        text = path.read_text(encoding="utf-8")
        if own == "config":
            # The names of layouts are registered where the layouts are, with nothing of ours but errors below them.
            text = text.replace("from stepjepa.batch.layouts import", "")
        for used in re.findall(r"^\s*(?:from|import) stepjepa\.(\w+)", text, re.MULTILINE):
            assert ORDER.index(used) <= ORDER.index(own), f"{place} imports from {used}"


def test_every_command_that_documents_name_exists() -> None:
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *pages]:
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^ {4}|`|-m )stepjepa ([a-z]+)", text, re.MULTILINE))
        assert named <= set(COMMANDS), name
        assert named or name != "README.md"
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name} links to {link}"


def test_the_task_of_ones_own_in_thirty_lines_works(tmp_path: Path) -> None:
    example = TASKS_PAGE.partition("```python\n")[2].partition("```")[0]
    assert len(example.strip().splitlines()) <= 30
    (tmp_path / "my_task.py").write_text(example, encoding="utf-8")
    chat = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima"}]
    write_jsonl(tmp_path / "test.jsonl", [{"messages": chat}] * 3)
    said = ["Lima, of course", "It is Lima", ""]
    write_jsonl(tmp_path / "said.jsonl", [{"index": i, "generated": text} for i, text in enumerate(said)])
    command = [sys.executable, "-m", "stepjepa", "score", "--task", "my_task:Capital", "--test_file", "test.jsonl"]
    command += ["--predictions", "said.jsonl", "--output_file", "scored.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["scores"] for line in lines] == [
        {"correct": True, "mentioned": True},
        {"correct": False, "mentioned": True},
        {"correct": False, "mentioned": False},
    ]
    assert [line["error"] for line in lines] == [None, "wrong answer", "no answer found"]


def test_the_table_of_tasks_is_that_of_the_code() -> None:
    table = TASKS_PAGE.partition("| task | data sets |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = {
        cells[0].strip("`"): cells
        for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table)
    }
    assert list(rows) == list(TASKS)
    for name, cells in rows.items():
        task = load_task(name)
        assert task.name == name
        assert cells[4].startswith(f"`{task.headline}`")
        assert cells[6] == f"`{task.lenient}`"
        assert cells[3] == (task.system_prompt or "–")


# Longer than they should be, and not to grow: name -> most lines.
LONG = {"record.py": 460, "trainer.py": 540}


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: path.name)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONG.get(path.name, 400)
