"""The pages on other tools: every flag of ours that they name exists, and every command of ours is one."""

from __future__ import annotations

import contextlib
import re

import pytest

from document_blocks import ROOT, blocks
from stepjepa.arguments import training_fields
from stepjepa.cli import normalise
from stepjepa.commands import make_parser, parse
from stepjepa.commands.train import check
from stepjepa.config import JepaConfig

PAGES = ("docs/coming-from.md", "docs/ecosystem.md")
TRAIN = ["--train_file", "train.jsonl", "--model_name", "M", "--output_dir", "runs/a"]


def ours(words: list[str]) -> list[str] | None:
    """What follows ``stepjepa`` in a command, behind launchers as well."""
    return words[words.index("stepjepa") + 1 :] if "stepjepa" in words else None


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_is_one(page: str) -> None:
    found = [ours(words) for block in blocks(page) for words in block.commands()]
    commands = [words for words in found if words]
    assert len(commands) >= 4
    for words in commands:
        # A file of the reader's.
        flags = [word for word in words[1:] if word not in ("--config", "run.yaml")] + _missing(words)
        with contextlib.chdir(ROOT):
            known = parse(words[0], normalise(flags))
        if words[0] == "train" and "--push_to_hub" not in words:
            config = check(known)
            assert isinstance(config, JepaConfig)


def _missing(words: list[str]) -> list[str]:
    if words[0] != "train" or "--config" not in words:
        return []
    return TRAIN


def cells(page: str) -> list[str]:
    """The column on the right of each table: what is ours."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [line.split(" | ", 1)[1] for line in text.splitlines() if line.startswith("| ") and " | " in line]


def test_every_flag_in_the_tables_exists() -> None:
    known = {*make_parser("train")._option_string_actions}
    known |= {f"--{name}" for name in training_fields()}
    for command in ("export", "prepare", "evaluate"):
        known |= {*make_parser(command)._option_string_actions}
    # Of 'stepjepa prepare NAME'.
    known |= {"--dataset", "--columns"}
    named = [flag for cell in cells("docs/coming-from.md") for flag in re.findall(r"`?(--[\w-]+)", cell)]
    assert len(named) > 60
    assert [flag for flag in named if flag not in known] == []
