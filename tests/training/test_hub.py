"""Uploads to a hub while and after training, tried on a hub in a thread."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load

import tiny
from fake_hub import FakeHub
from stepjepa.cli import main
from stepjepa.config import JepaConfig
from stepjepa.errors import UserError
from stepjepa.files import write_jsonl
from stepjepa.training.trainer import JepaTrainer

MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
MODEL |= {"tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.serve(monkeypatch)
        yield hub


def trainer(folder: Path, tokenizer: Any, **changes: Any) -> JepaTrainer:
    """A run of three steps with a checkpoint behind each, of which one is kept."""
    fixed = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "per_device_train_batch_size": 3}
    return JepaTrainer(
        tiny.make_model("llama"),
        tiny.arguments(folder, push_to_hub=True, hub_model_id="me/mine", **fixed | changes),
        JepaConfig(predictor_head="linear"),
        train_dataset=tiny.records() * 3,
        processing_class=tokenizer,
    )


def command(tmp_path: Path, *flags: str) -> list[str]:
    """``stepjepa train`` of two steps."""
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records()])
    model = tiny.make_model("llama")
    model.save_pretrained(tmp_path / "base")
    fixed = ["--train_file", str(tmp_path / "data.jsonl"), "--use_cpu", "--max_steps", "2", "--save_strategy", "no"]
    return ["train", *fixed, "--output_dir", str(tmp_path / "run"), "--push_to_hub", *flags]


def test_checkpoints_arrive_whole_and_with_nothing_of_the_machine(
    hub: FakeHub, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    made = trainer(tmp_path / "run", tiny_tokenizer)
    made.train()
    assert hub.commits == [f"Training in progress, step {step}" for step in (1, 2, 3)]
    assert hub.names("me/mine") == MODEL
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "metrics.jsonl"]
    sent = hub.files["me/mine", "main", "model.safetensors"]
    assert sent == (tmp_path / "run" / "checkpoint-3" / "model.safetensors").read_bytes()
    assert not [name for name in load(sent) if "head" in name]
    assert not [path for (_, _, path), content in hub.files.items() if str(tmp_path).encode() in content]


def test_an_upload_that_fails_costs_the_run_nothing(
    hub: FakeHub, tiny_tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path / "run", tiny_tokenizer)
    hub.refuse = "put"
    with caplog.at_level(logging.WARNING, "stepjepa"):
        made.train()
    assert made.state.global_step == 3
    told = [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]
    assert len(told) == 3
    assert told[0].startswith("can't upload to 'me/mine': 403 ")
    assert hub.commits == []


def test_what_can_not_be_is_refused_before_training(hub: FakeHub, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected end or every_save, .* got checkpoint"):
        trainer(tmp_path / "run", tiny_tokenizer, hub_strategy="checkpoint")
    hub.refuse = "create"
    with pytest.raises(UserError, match=r"can't make the repository 'me/mine' on the hub: 403 .*; set HF_TOKEN"):
        trainer(tmp_path / "run", tiny_tokenizer)


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
    hub.refuse = "commit"
    assert main([*line, str(tmp_path / "base")]) == 2
    run = tmp_path / "run"
    told = capsys.readouterr().err.splitlines()[-1]
    again = f"stepjepa export --model_path {run} --push_to_hub me/mine --hub_revision dev"
    assert told.startswith("stepjepa train: error: the run is finished and saved, but: can't upload to 'me/mine': 403 ")
    assert told.endswith(f"; to try again: {again}")
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    hub.refuse = None
    assert main(again.split()[1:]) == 0
    assert hub.names("me/mine", "dev") == MODEL


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push_to_hub", "--offline"], "--push_to_hub needs a connection, and --offline"),
        (["--push_to_hub"], "--push_to_hub needs a connection, and --offline (or HF_HUB_OFFLINE)"),
        (["--hub_model_id", "me/mine"], "--hub_model_id does nothing without --push_to_hub"),
        (["--hub_token", "hf_sEcReT", "--push_to_hub"], "--hub_token would be read by others"),
    ],
)
def test_flags_that_can_not_be(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--offline" in flags:
        # A command that follows --offline does so for as long as its process lives.
        monkeypatch.setattr("stepjepa.cli.go_offline", lambda: monkeypatch.setenv("STEPJEPA_OFFLINE", "1"))
    line = command(tmp_path, "--model_name", "preset:tiny")
    line.remove("--push_to_hub")
    assert main([*line, *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
