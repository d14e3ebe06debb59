"""Every block of commands and of Python in the documents is run on small material, or marked with a reason not to."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from document_blocks import LANGUAGES, ROOT, Block, blocks, documents
from document_marks import NOT_RUN, why_not
from document_world import World, make_shared
from stepjepa.batch.layouts import LAYOUTS
from stepjepa.cli import normalise
from stepjepa.commands import COMMANDS, make_parser
from stepjepa.objectives.term import TERMS

PAGES = [page for page in documents() if any(block.commands() or block.language for block in blocks(page))]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shared(tmp_path_factory.mktemp("documents"))


@pytest.fixture
def world(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
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


def run_page(page: str, world: World, capsys: pytest.CaptureFixture[str], *, slow: bool) -> None:
    for block in blocks(page):
        if block.title:
            target = world.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text + "\n", encoding="utf-8")
        wanted = not block.mark or (block.mark == "slow" and slow)
        if block.language == "python" and not block.title and wanted and why_not(page, "") is None:
            code = re.sub(r"max_steps=\d+", 'max_steps=2, use_cpu=True, report_to="none"', block.text)
            exec(compile(code, block.place, "exec"), {"__name__": "__main__"})
        for words in block.commands():
            command = world.whole(words[1:]) if words[0] == "stepjepa" else words
            if not wanted or why_not(page, " ".join(words)) is not None:
                continue
            assert words[0] == "stepjepa", f"{block.place}: nobody knows how to run '{words[0]}'; mark it with a reason"
            small = world.small(command)
            code = world.run(small)
            said = capsys.readouterr().err
            assert code == 0, f"{block.place}: stepjepa {' '.join(small)}: exit code {code}\n{said[-1500:]}"


QUICK = {"README.md", "docs/tutorial.md", "docs/design.md", "docs/tasks.md"}
"""Pages whose commands ``make test`` runs; ``make test-slow`` runs those of all others."""


@pytest.mark.parametrize(
    "page", [page if page in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_the_commands_of_a_document_run(page: str, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, world, capsys, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.mark == "slow" for block in blocks(page))])
def test_the_slow_ones_run_too(page: str, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, world, capsys, slow=True)


def every_command() -> list[tuple[Block, list[str]]]:
    return [(block, words) for page in documents() for block in blocks(page) for words in block.commands()]


def options(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of a command of ours, or of its sub-command, and its flags."""
    parser: argparse.ArgumentParser = make_parser(words[0])
    if words[0] == "prepare":
        (kinds,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = kinds.choices[words[1]]
    return parser, [word.partition("=")[0] for word in normalise(words) if word.startswith("--")]


def test_flags_exist_in_every_command_also_in_those_that_are_not_run() -> None:
    from stepjepa.arguments import training_fields

    training = {f"--{name}" for name in training_fields()}
    for block, words in every_command():
        text = " ".join(words)
        if block.page in ("docs/log.md",) or not re.search(r"(^|-m )stepjepa [a-z]", text):
            continue
        inner = words[words.index("stepjepa") + 1 :]
        assert inner[0] in COMMANDS, f"{block.place}: {text}"
        parser, flags = options(inner)
        known = {name for action in parser._actions for name in action.option_strings}
        if inner[0] in ("train", "estimate", "sweep"):
            # These hand flags on: to TrainingArguments, to train and evaluate.
            known |= training | {name for each in ("train", "evaluate") for name in _flags_of(each)}
        assert set(flags) <= known, f"{block.place}: {sorted(set(flags) - known)}"


def _flags_of(command: str) -> set[str]:
    parser, _ = options([command])
    return {name for action in parser._actions for name in action.option_strings}


def test_files_targets_and_extras_exist_in_every_command() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    with (ROOT / "pyproject.toml").open("rb") as stream:
        extras = set(tomllib.load(stream)["project"]["optional-dependencies"])
    for block, words in every_command():
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, block.place
        # A page of other programs may name files of theirs, and the log files of its day.
        others = block.page in ("docs/ecosystem.md", "docs/log.md")
        if words[0].startswith("python") and words[1].endswith(".py") and not others:
            assert (ROOT / words[1]).is_file(), block.place
        for word in words:
            if extra := re.match(r"stepjepa\[(\w+)\]", word):
                assert extra[1] in extras, block.place


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


def test_marks_are_needed_and_say_why() -> None:
    for page in documents():
        for block in blocks(page):
            assert not block.mark or len(block.reason) > 5, block.place
    for page, marks in NOT_RUN.items():
        if page in PAGES:
            said = [" ".join(words) for block in blocks(page) for words in block.commands()]
            for start, _ in marks:
                assert not said or not start or any(line.startswith(start) for line in said), f"{page}: {start}"
