"""The pages on other tools: every flag of ours that they name exists, and every command of ours is one."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re

import pytest

from document_blocks import ROOT, blocks
from stepjepa.cli import normalise
from stepjepa.commands import train
from stepjepa.config import JepaConfig
from stepjepa.parser import NO_COUNTERPART, OTHER_TOOLS, Parser

PAGES = ("docs/coming-from.md", "docs/ecosystem.md")
TRAIN = ["--train_file", "train.jsonl", "--model_name", "M", "--output_dir", "runs/a"]


def parser(command: str) -> Parser:
    made = Parser(prog=f"stepjepa {command}", allow_abbrev=False)
    importlib.import_module(f"stepjepa.commands.{command}").add_arguments(made)
    return made


def parse(words: list[str]) -> argparse.Namespace:
    """A command of ours, as the command line reads it."""
    command, flags = words[0], normalise(words[1:])
    with contextlib.chdir(ROOT):
        if command == "train":
            return train.parse(parser(command), flags)
        return parser(command).parse_args(flags)


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
        known = parse([word for word in words if word not in ("--config", "run.yaml")] + _missing(words))
        if words[0] == "train" and "--push_to_hub" not in words:
            config = train.check(known)
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
    known = {option for action in parser("train")._actions for option in action.option_strings}
    known |= {f"--{name}" for name in train.training_fields()}
    for command in ("export", "prepare", "evaluate"):
        known |= {option for action in parser(command)._actions for option in action.option_strings}
    # Of 'stepjepa prepare NAME'.
    known |= {"--dataset", "--columns"}
    named = [flag for cell in cells("docs/coming-from.md") for flag in re.findall(r"`?(--[\w-]+)", cell)]
    assert len(named) > 60
    assert [flag for flag in named if flag not in known] == []


def test_flags_of_other_tools_are_led_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for theirs, meant in OTHER_TOOLS.items():
        with pytest.raises(SystemExit):
            train.parse(parser("train"), [*TRAIN, theirs, "3"])
        assert f"did you mean {meant}?" in capsys.readouterr().err
    for theirs in NO_COUNTERPART:
        assert theirs.removeprefix("--") in page
        with pytest.raises(SystemExit):
            train.parse(parser("train"), [*TRAIN, theirs, "3"])
        assert "has no counterpart here (docs/coming-from.md)" in capsys.readouterr().err


def test_flags_with_values_in_the_tables_are_read() -> None:
    """Each piece of code that begins with a flag is put behind a whole command."""
    pieces = [piece for cell in cells("docs/coming-from.md") for piece in re.findall(r"`(--[^`]+)`", cell)]
    assert len(pieces) > 40
    for piece in pieces:
        words = re.sub(r"\b(F|N|DIR|P)\b", "3", piece).split()
        if len(words) == 1 and words[0] in NEED_A_VALUE:
            words += [NEED_A_VALUE[words[0]]]
        parsed = train.parse(parser("train"), normalise([*TRAIN, *words]))
        assert parsed.train_file is not None


NEED_A_VALUE = {
    "--attn_implementation": "sdpa",
    "--batch_size": "3",
    "--grad_accum": "3",
    "--learning_rate": "0.1",
    "--optim": "adamw_torch",
    "--lr_scheduler_type": "cosine",
    "--weight_decay": "0.1",
    "--shuffle_buffer_size": "3",
    "--max_steps": "3",
    "--chat_template": "F",
    "--output_dir": "runs/b",
    "--dtype": "bfloat16",
}
