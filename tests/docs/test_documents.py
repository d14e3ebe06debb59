"""Documents: every block of commands and of Python is run on small material, or marked; flags, files, links exist."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from document_blocks import LANGUAGES, ROOT, blocks, documents, why_not
from document_world import OUTPUTS, World, generated, make_shared
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import COMMANDS, make_parser, parse
from stepjepa.cli.flags import trainer_flags
from stepjepa.cli.main import main, normalise
from stepjepa.evaluation import map_fitting
from stepjepa.objectives import head_training
from stepjepa.objectives.term import TERMS
from stepjepa.tasks.registry import TASKS, load_task
from stepjepa.views.layouts import LAYOUTS

PAGES = [page for page in documents() if any(block.commands() or block.language for block in blocks(page))]
QUICK = {"docs/tasks.md"}
"""Pages whose commands ``make test`` runs; ``make test-slow`` runs those of all others."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shared(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def world(tmp_path: Path, shared: Path, quick_nl_rx: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Projection heads are trained for a thousand steps, and their place is chosen by hundreds.
    monkeypatch.setattr(head_training, "FEWEST_STEPS", 10)
    monkeypatch.setattr(map_fitting, "STEPS_TRIED", 10)
    before, modules = dict(os.environ), set(sys.modules)
    registered: list[tuple[dict[str, Any], dict[str, Any]]] = [(known, dict(known)) for known in (LAYOUTS, TERMS)]
    yield World(tmp_path, shared)
    # Pages add layouts and terms of their own, and name their own modules alike.
    for known, those_before in registered:
        known.clear()
        known.update(those_before)
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("page", "slow"),
    [
        *(pytest.param(page, False, marks=[] if page in QUICK else pytest.mark.slow) for page in PAGES),
        *(
            pytest.param(page, True, marks=pytest.mark.slow)
            for page in PAGES
            if any(block.mark == "slow" for block in blocks(page))
        ),
    ],
)
def test_the_commands_of_a_document_run(
    page: str, slow: bool, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    program: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.title:
            target = world.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text + "\n", encoding="utf-8")
        wanted = not block.mark or (block.mark == "slow" and slow)
        if block.language == "python" and not block.title and wanted and why_not(page, "") is None:
            code = re.sub(r"max_steps=\d+", 'max_steps=2, use_cpu=True, report_to="none"', block.text)
            code = re.sub(
                r'"max_steps": (\d+)', lambda steps: f'"max_steps": {int(steps[1]) // 50}, "use_cpu": True', code
            )
            code = re.sub(r'(eval_steps=|"save_steps": )\d+', r"\g<1>1", code)
            # A page is one program.
            exec(compile(code, block.place, "exec"), program)
        for words in block.commands():
            command = world.whole(words[1:]) if words[0] == "stepjepa" else words
            if not wanted or why_not(page, " ".join(words)) is not None:
                continue
            assert words[0] == "stepjepa", f"{block.place}: nobody knows how to run '{words[0]}'; mark it with a reason"
            small = world.small(command)
            code = world.run(small)
            output = capsys.readouterr().err
            assert code == 0, f"{block.place}: stepjepa {' '.join(small)}: exit code {code}\n{output[-1500:]}"


def test_pages_make_the_files_that_they_read() -> None:
    """In a fresh clone each how-to page and the tutorial can be pasted from its first line on."""
    inputs = ("--train_file", "--eval_file", "--test_file", "--input_file", "--corpus", "--queries", "--dataset")
    pages = [page for page in PAGES if page.startswith("docs/how-to/") or page == "docs/tutorial.md"]
    assert len(pages) > 15
    for page in pages:
        made: set[str] = set()
        for block in blocks(page):
            made |= {block.title}
            for words in (words[words.index("stepjepa") + 1 :] for words in block.commands() if "stepjepa" in words):
                named = list(pairwise(words[1:]))
                read = {value for flag, value in named if flag in inputs}
                read |= {value for flag, value in named if flag == "--model_path" and value.startswith("runs/")}
                read |= {value for flag, value in named if flag == "--model_name" and value == "M"}
                if "examples/sweep.yaml" in words:
                    read |= {"runs/sweep-data/train.jsonl", "runs/sweep-data/test.jsonl"}
                written = set(generated(words)) if words[0] == "prepare" else set()
                missing = read - written - made
                assert not missing, f"{block.place}: {', '.join(sorted(missing))} is made by no command above"
                made |= written | {value for flag, value in named if flag in OUTPUTS}


def flags_of(words: list[str]) -> set[str]:
    """The flags that a command of ours, or its sub-command, knows."""
    parser: argparse.ArgumentParser = make_parser(words[0])
    if words[0] == "prepare" and len(words) > 1:
        (kinds,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = kinds.choices[words[1]]
    known = {*parser._option_string_actions}
    if words[0] in ("train", "estimate"):
        known |= {*trainer_flags()}
    return known


def test_flags_files_targets_and_extras_of_every_command_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    with (ROOT / "pyproject.toml").open("rb") as stream:
        extras = set(tomllib.load(stream)["project"]["optional-dependencies"])
    result = [(block, words) for page in documents() for block in blocks(page) for words in block.commands()]
    for block, words in result:
        # The log names commands and files of its day.
        if block.page == "docs/log.md":
            continue
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, block.place
        # The folder of another repository is the reader's own.
        if words[0].startswith("python") and "/" in words[1] and not words[1].startswith("llama.cpp/"):
            assert (ROOT / words[1]).is_file(), block.place
        assert set(re.findall(r"stepjepa\[(\w+)\]", " ".join(words))) <= extras, block.place
        if re.search(r"(^|-m )stepjepa [a-z]", " ".join(words)):
            inner = words[words.index("stepjepa") + 1 :]
            assert inner[0] in COMMANDS, block.place
            flags = {word.partition("=")[0] for word in normalise(inner) if word.startswith("--")}
            assert flags <= flags_of(inner), f"{block.place}: {sorted(flags - flags_of(inner))}"


def test_commands_for_users_of_other_tools_mean_something() -> None:
    """Their data and models are the reader's, so each is parsed and checked but not run."""
    for block in blocks("docs/coming-from.md"):
        for words in block.commands():
            if words[:2] == ["stepjepa", "train"]:
                with contextlib.chdir(ROOT):
                    parse("train", normalise(words[2:]))
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    ours = [line.split(" | ", 1)[1] for line in page.splitlines() if line.startswith("| ") and " | " in line]
    named = {flag for cell in ours for flag in re.findall(r"`?(--[\w-]+)", cell)}
    known = flags_of(["train"]) | flags_of(["export"]) | flags_of(["evaluate"]) | {"--dataset", "--columns"}
    assert len(named) > 40
    assert named <= known, named - known


def test_fences_name_a_language_and_hold_it() -> None:
    for page in documents():
        for block in blocks(page):
            if not block.fenced:
                continue
            assert block.language in LANGUAGES, f"{block.place}: '{block.language}'"
            if block.language == "yaml":
                yaml.safe_load(block.text)
            if block.language == "json":
                for line in block.text.splitlines() if block.title.endswith(".jsonl") else [block.text]:
                    json.loads(line)


def test_links_and_tests_that_documents_name_exist() -> None:
    for name in [*documents(), "CHANGELOG.md"]:
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name} links to {link}"
    # Each promise has a test.
    for line in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines():
        place = ROOT
        for path in re.findall(r"`([\w/]+\.py)`", line):
            place = (ROOT / path).parent if "/" in path else place
            assert (ROOT / path if "/" in path else place / path).is_file(), line


def test_the_files_from_the_command_line_to_the_loss_exist() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rows = page.partition("## From the command line to the loss")[2].partition("\n## ")[0].splitlines()
    named = [re.findall(r"`([\w/]+\.py)`", row.split("|")[1])[0] for row in rows if row.startswith("| `")]
    assert 5 < len(named) <= 10
    for path in named:
        assert (ROOT / "src" / "stepjepa" / path).is_file(), path


def test_the_page_of_tasks_has_every_task_and_an_own_one_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    table = page.partition("| task | data sets |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = {
        cells[0].strip("`"): cells
        for cells in ([cell.strip() for cell in line.strip("|").split(" | ")] for line in table)
    }
    assert list(rows) == list(TASKS)
    for name, cells in rows.items():
        task = load_task(name)
        assert cells[4].startswith(f"`{task.headline}`")
        assert cells[6] == f"`{task.lenient}`"
        assert cells[3] == (task.system_prompt or "–")
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    chat = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima"}]
    write_jsonl("test.jsonl", [{"messages": chat}] * 3)
    output = ["Lima, of course", "It is Lima", ""]
    write_jsonl("said.jsonl", [{"index": i, "generated": text} for i, text in enumerate(output)])
    command = "score --task my_task:Capital --test_file test.jsonl --predictions said.jsonl --output_file scored.jsonl"
    assert main(command.split()) == 0
    lines = [json.loads(line) for line in Path("scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [list(line["scores"].values()) for line in lines] == [[True, True], [False, True], [False, False]]
    assert [line["error"] for line in lines] == [None, "wrong answer", "no answer found"]


def test_the_task_of_the_page_that_judges_calls_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8").partition("### Answers that are tool calls")[2]
    monkeypatch.chdir(tmp_path)
    Path("my_calls.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    call = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Bonn", "day": 3}}}
    answers: list[dict[str, Any]] = [{"content": "", "tool_calls": [call, call]}] * 5 + [{"content": "No."}] * 2
    user = {"role": "user", "content": "Rain?"}
    write_jsonl("test.jsonl", [{"messages": [user, {"role": "assistant", **answer}]} for answer in answers])

    def written(*calls: str) -> str:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)

    right, other = '{"name": "rain", "arguments": {"day": 3, "city": "Bonn"}}', '{"name": "rain", "arguments": {}}'
    said = [f"<think>\nHm.\n</think>\n\n{written(right, right)}", written(right, other), written(right), "{", ""]
    said += ["<think>\nHm.\n</think>\n\nNo.", written(right)]
    write_jsonl("said.jsonl", [{"index": i, "generated": text} for i, text in enumerate(said)])
    options = "--test_file test.jsonl --predictions said.jsonl --output_file scored.jsonl"
    assert main(["score", "--task", "my_calls:ToolCalls", *options.split()]) == 0
    lines = [json.loads(line) for line in Path("scored.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["scores"]["correct"] for line in lines] == [True, False, False, False, False, True, False]
    assert [line["scores"]["same_functions"] for line in lines] == [True, True, False, False, False, True, False]
    assert "skipped" not in capsys.readouterr().out
    # A task that compares texts has nothing to compare in a call.
    assert main(["score", "--task", "generic", *options.replace("scored", "texts").split()]) == 0
    assert "skipped: 5 records: answer without text (a tool call) 5" in capsys.readouterr().out
