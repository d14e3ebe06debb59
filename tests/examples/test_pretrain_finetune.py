"""The example of two stages: its data is what it says, its commands are ones that there are, nothing is overwritten."""

from __future__ import annotations

import importlib
import random
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from stepjepa.commands import evaluate, train
from stepjepa.data.sources import read_records
from stepjepa.parser import Parser
from stepjepa.tasks.registry import choose_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("pretrain_finetune")


def words_of(example: ModuleType, good: bool, row: int) -> set[str]:
    return set((example.GOOD if good else example.BAD)[row])


def every_word(example: ModuleType) -> set[str]:
    return {word for good in (True, False) for row in range(4) for word in words_of(example, good, row)}


def said(example: ModuleType, text: str) -> set[str]:
    return set(re.findall(r"\w+", text)) & every_word(example)


def test_words_stand_in_one_place_each(example: ModuleType) -> None:
    assert len(every_word(example)) == 32


def test_paraphrases_say_the_same(example: ModuleType) -> None:
    rows = list(example.paraphrases(random.Random(1), 300))
    assert rows == list(example.paraphrases(random.Random(1), 300))
    seen = set()
    for row in rows:
        sentences = row["sentences"]
        places = {
            (good, number)
            for good in (True, False)
            for number in range(4)
            # A word of the opposite stands in some of the sentences, words of its own in all.
            if all(words_of(example, good, number) & said(example, sentence) for sentence in sentences)
        }
        assert places
        assert len({thing for thing in example.THINGS if all(thing in sentence for sentence in sentences)}) == 1
        seen |= {word for sentence in sentences for word in said(example, sentence)}
    assert seen == every_word(example)


def test_labels_are_right(example: ModuleType) -> None:
    rows = list(example.reviews(random.Random(2), 200))
    assert sum(row["label"] for row in rows) == 100
    for row in rows:
        # What is denied is the opposite.
        claimed = said(example, re.sub(r"nobody could call .* :", "", row["text"]))
        assert len(claimed) == 2
        assert any(claimed <= words_of(example, bool(row["label"]), number) for number in range(4))


def test_its_commands_are_understood(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    real = example.command
    monkeypatch.setattr(
        example, "command", lambda line: (lines.append(line), line.startswith("prepare") and real(line))
    )
    monkeypatch.setattr(example, "paraphrases", lambda draw, count, make=example.paraphrases: make(draw, 7))
    example.run(tmp_path / "new")
    names = [line.split()[0] for line in lines]
    assert names == ["prepare"] * 3 + ["train"] * 2 + ["train", "evaluate"] * 3 + ["report"]
    assert len(lines[-1].split()) == 4
    for line in lines[3:-1]:
        name, *words = shlex.split(line)
        module = train if name == "train" else evaluate
        parser = Parser(prog=name, allow_abbrev=False)
        module.add_arguments(parser)
        if name == "train":
            config = train.check(train.parse(parser, words))
            assert config.plain
            assert (config.labels == "all") == ("pretrained-" in line.partition("--output_dir")[2].split()[0])
        else:
            _, unknown = parser.parse_known_args(words)
            assert not unknown
    records = read_records(tmp_path / "new" / "data" / "test.jsonl")
    assert choose_task("auto", records).name == "sentiment"
