"""Parsers of scripts of users' own take the settings beside those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import HfArgumentParser, TrainingArguments

from stepjepa import JepaConfig, RunConfig
from stepjepa.config.option import options_of


def test_flags_and_files_of_hf_argument_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = HfArgumentParser((JepaConfig, TrainingArguments))
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--jepa-loss-type", "infonce", "--lbd", "0.5"]
    flags += ["--layout", "branched", "--predictors", "3", "--front_pred"]
    config, arguments = parser.parse_args_into_dataclasses(flags)
    named = {"layout": "branched", "predictors": 3, "front_pred": True}
    assert config == JepaConfig(jepa_loss_type="infonce", lbd=0.5, **named)
    assert arguments.output_dir == str(tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nchat_template_kwargs: {{enable_thinking: false}}\n")
    config, _ = parser.parse_yaml_file(str(file))
    assert config == JepaConfig(chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*flags, "--pooling", "first"])
    assert "invalid choice: 'first'" in capsys.readouterr().err


def test_trl_parser(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    file = tmp_path / "settings.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nlbd: 0.25\ndataset_name: mine\n")
    parser = trl.TrlParser((trl.ScriptArguments, TrainingArguments, JepaConfig))
    script, _, config = parser.parse_args_and_config(["--config", str(file), "--gamma", "2"])
    assert (script.dataset_name, config) == ("mine", JepaConfig(lbd=0.25, gamma=2))


@pytest.mark.parametrize("owner", [JepaConfig, RunConfig])
def test_the_help_of_other_parsers_has_every_option(owner: type) -> None:
    text = HfArgumentParser(owner).format_help()
    assert all(f"--{option.name}" in text for option in options_of(owner))
