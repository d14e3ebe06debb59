"""Uploads to a hub after training, tried on a hub in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from fake_hub import FakeHub
from stepjepa.base.files import write_jsonl
from stepjepa.cli.main import main

MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
MODEL |= {"tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.serve(monkeypatch)
        yield hub


def command(tmp_path: Path, *flags: str) -> list[str]:
    """``stepjepa train`` of two steps."""
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    model = tiny.make_model("llama")
    model.save_pretrained(tmp_path / "base")
    fixed = ["--train_file", str(tmp_path / "data.jsonl"), "--use_cpu", "--max_steps", "2", "--save_strategy", "no"]
    return ["train", *fixed, "--output_dir", str(tmp_path / "run"), "--push_to_hub", *flags]


def test_a_command_uploads_its_run_folder_when_it_is_whole(
    hub: FakeHub, plain_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(tmp_path, "--hub_model_id", "mine", "--hub_private_repo", "true", "--model_name")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    assert main([*line, str(tmp_path / "base")]) == 0
    assert f"uploaded: {hub.endpoint}/tester/mine" in capsys.readouterr().out
    assert hub.made["tester/mine"]["visibility"] == "private"
    assert hub.names("tester/mine") == MODEL
    run = tmp_path / "run"
    for name in MODEL:
        assert hub.files["tester/mine", "main", name] == (run / name).read_bytes()
    card = hub.files["tester/mine", "main", "README.md"].decode()
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["stepjepa", "jepa", "llm-jepa"]
    assert str(tmp_path) not in card
    assert "hf_of_a_test" not in "".join(path.read_text(errors="replace") for path in run.glob("*.*"))


def test_a_command_whose_upload_is_refused_keeps_its_run_and_says_how_to_go_on(
    hub: FakeHub, plain_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(tmp_path, "--hub_model_id", "me/mine", "--hub_revision", "dev", "--model_name")
    plain_tokenizer.save_pretrained(tmp_path / "base")
    hub.refuse = "create"
    assert main([*line, str(tmp_path / "base")]) == 2
    assert not (tmp_path / "run").exists()
    hub.refuse = "commit"
    assert main([*line, str(tmp_path / "base")]) == 2
    run = tmp_path / "run"
    message = capsys.readouterr().err.splitlines()[-1]
    again = f"stepjepa export --model_path {run} --push_to_hub me/mine --hub_revision dev"
    assert message.startswith("stepjepa train: error: can't upload to 'me/mine': 403 ")
    assert message.endswith(f"; to try again: {again}")
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    hub.refuse = None
    assert main(again.split()[1:]) == 0
    assert hub.names("me/mine", "dev") == MODEL


def test_offline_it_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "--model_name", "preset:tiny")) == 2
    assert "--push_to_hub needs a connection, which --offline (or HF_HUB_OFFLINE) forbids" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
