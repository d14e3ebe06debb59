"""Model cards: valid for a hub, true, and with nothing in them that a reader's program obeys."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.base.typed_json import Origin, from_json
from stepjepa.cli.main import main
from stepjepa.store.folder import CARD_FILE
from stepjepa.store.hub import MARK, MARKS, base_on_hub, write_card
from stepjepa.store.record import RunRecord

RUN: dict[str, Any] = {
    "model": "org/base-1B",
    "model_fingerprint": "c0ffee" * 6 + "cafe",
    "arguments": ["--train_file", "/home/me/secret project/train.jsonl"],
    "jepa": {"mode": "step-jepa", "layout": "branched", "predictors": 3, "lbd": 0.7},
    "training": {"learning_rate": 2e-5, "output_dir": "/home/me/run", "seed": 23},
    "data": {"train": {"file": "/home/me/train.jsonl", "records": 17, "sha256": "ab" * 32}},
    "versions": {"stepjepa": "0.1.0", "torch": "2.13.0+cpu", "platform": "Linux-of-me"},
}


def record_with(changes: dict[str, Any]) -> RunRecord:
    return from_json(RunRecord, {**RUN, **changes}, Origin("run.json", "restore it"))


def card_of(folder: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """The YAML at the head of a card, and the whole text."""
    write_card(folder, name="me/mine", run=record_with(changes))
    text = (folder / CARD_FILE).read_text(encoding="utf-8")
    head = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(head, dict)
    return head, text


def test_what_a_card_says(tmp_path: Path) -> None:
    head, text = card_of(tmp_path)
    assert head == {
        "base_model": "org/base-1B",
        "library_name": "transformers",
        "model_name": "me/mine",
        "pipeline_tag": "text-generation",
        "tags": ["stepjepa", "jepa", "step-jepa"],
    }
    assert "name = 'me/mine'" in text
    assert not any(word in text for word in ("/home", "secret", "of-me"))


@pytest.mark.parametrize(
    ("mode", "predictors", "has"), [("regular", 3, False), ("llm-jepa", 0, False), ("llm-jepa", 1, True)]
)
def test_predictor_tokens_are_named_where_a_tokenizer_has_them(
    mode: str, predictors: int, has: bool, tmp_path: Path
) -> None:
    _, text = card_of(tmp_path, jepa={"mode": mode, "predictors": predictors})
    assert ("Predictor tokens\n(`<|predictor_1|>` ...)" in text) is has
    assert f"in mode `{mode}`, by stepjepa." in text


def test_somebodys_own_card_is_kept(tmp_path: Path) -> None:
    _, text = card_of(tmp_path)
    assert card_of(tmp_path, model="gpt2")[1] != text
    (tmp_path / CARD_FILE).write_text(text.replace(MARK, "My words."), encoding="utf-8")
    assert "My words." in card_of(tmp_path, model="gpt3")[1]


def test_a_card_of_an_earlier_version_is_written_again(tmp_path: Path) -> None:
    _, text = card_of(tmp_path)
    (tmp_path / CARD_FILE).write_text(text.replace(MARK, MARKS[1]), encoding="utf-8")
    assert MARK in card_of(tmp_path, model="gpt2")[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "org/base-1B"),
        ({"model": "preset:tiny"}, None),
        ({"loaded": {"pretrain": True}}, None),
        ({"model": "models/base", "model_fingerprint": "ab" * 32}, None),
        ({"model": "x]\nlicense: mit"}, None),
    ],
)
def test_only_a_model_of_the_hub_is_named_as_the_base(changes: dict[str, Any], expected: str | None) -> None:
    assert base_on_hub(record_with(changes)) == expected


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "`|\n---\nlicense: mit\n---\n```\n<script>alert(1)</script>\x1b[2J"
    head, text = card_of(tmp_path, model=evil, jepa={"mode": evil})
    assert set(head) == {"library_name", "model_name", "pipeline_tag", "tags"}
    assert "\x1b" not in text
    assert "<script>" not in text
    assert "\n---" not in text.split("---\n", 2)[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("flags", [[], ["--lora", "--lora_rank", "3"]], ids=["whole", "adapter"])
def test_the_lines_of_a_card_load_the_model(flags: list[str], plain_tokenizer: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    # No spare rows: an adapter's base must be made larger by whoever loads it.
    tiny.make_model("llama", vocab_size=len(plain_tokenizer)).save_pretrained(tmp_path / "base")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    fixed = ["--model_name", str(tmp_path / "base"), "--train_file", str(tmp_path / "data.jsonl"), "--use_cpu"]
    assert main(["train", *fixed, "--max_steps", "1", "--output_dir", str(tmp_path / "run"), *flags]) == 0
    text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "<|predictor_1|>" in text
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == ("peft" if flags else "transformers")
    result: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(text.partition("```python\n")[2].partition("```")[0], result)
    ids = result["tokenizer"]("3+4 <|predictor_1|>", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(result["model"](ids).logits).all()
