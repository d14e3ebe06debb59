"""A resume by the shell with other settings: what is refused, and what is said and recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main
from stepjepa.store.record import read_record


@pytest.fixture
def material(tmp_path: Path, plain_tokenizer: Any) -> Path:
    """A model with trained weights, and records with two columns of answers."""
    tiny.write_material(tmp_path, plain_tokenizer)
    rows = [{"question": f"{n}+1?", "long": f"It is {n + 1}.", "short": str(n + 1)} for n in range(8)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return tmp_path


def train(material: Path, *more: object, answer: str = "long") -> int:
    names = [
        "--train_file",
        material / "rows.jsonl",
        "--model_name",
        material / "base",
        "--output_dir",
        material / "run",
    ]
    flags = [
        "--columns",
        "question",
        answer,
        "--regular",
        "--batch_size",
        "2",
        "--grad_accum",
        "1",
        "--save_steps",
        "2",
    ]
    quiet = ["--use_cpu", "--report_to", "none", "--no_cache"]
    return main(["train", *map(str, (*names, *flags, *quiet, "--max_steps", 4, *more))])


LAST = ("--resume_from_checkpoint", "last", "--max_steps", "6")


def test_other_columns_are_refused(material: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(material) == 0
    capsys.readouterr()
    assert train(material, *LAST, answer="short") == 2
    assert "begun with other settings (training records as tokens)" in capsys.readouterr().err
    assert train(material, *LAST, "--allow_changes", answer="short") == 0
    changes = read_record(material / "run").launches[-1].changes
    assert changes[0].name == "training records as tokens" and changes[0].mixed


@pytest.mark.slow
def test_a_replaced_base_of_an_adapter_is_refused(material: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ("--lora", "--lora_rank", "2")
    assert train(material, *lora) == 0
    model = AutoModelForCausalLM.from_pretrained(material / "base")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(material / "base")
    capsys.readouterr()
    assert train(material, *LAST, *lora) == 2
    assert "begun with other settings (weights of the base model)" in capsys.readouterr().err


def test_another_rate_is_said_and_recorded(material: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(material) == 0
    capsys.readouterr()
    assert train(material, *LAST, "--learning_rate", "1e-3", "--optim", "sgd") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "resumed with another learning_rate: 2e-05 -> 0.001" in lines
    assert any(line.startswith("resumed with another optim: adamw") and line.endswith(" -> sgd") for line in lines)
    first, second = read_record(material / "run").launches
    assert (first.settings["learning_rate"], second.settings["learning_rate"]) == (2e-5, 1e-3)
    assert (first.from_step, first.to_step, second.from_step, second.to_step) == (0, 4, 4, 6)
    assert {change.name for change in second.changes if change.mixed} == {"learning_rate", "optim", "max_steps"}
