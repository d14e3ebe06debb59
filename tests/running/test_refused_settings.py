"""A setting of the Trainer that transformers refuses is named in the error, whatever transformers says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stepjepa import RunConfig, UserError
from stepjepa.cli.main import main
from stepjepa.config.trainer import trainer_options
from stepjepa.running.training_arguments import training_arguments

BAD = ["abc", "", "-1", "[1]", '{"a": 1}', "0", "nan"]


def refusal(folder: Path, **settings: Any) -> str | None:
    """The error for some settings; None if they are taken."""
    try:
        training_arguments(RunConfig(output_dir=folder, trainer={"use_cpu": True, **settings}), has_eval=True)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")  # of transformers, for what it takes
@pytest.mark.parametrize("name", sorted(trainer_options()))
def test_every_refused_setting_of_the_trainer_is_named(name: str, tmp_path: Path) -> None:
    for value in BAD:
        error = refusal(tmp_path, **{name: value})
        assert error is None or (re.search(rf"\b{name}\b", error) and "\n" not in error)


NEEDED_FILE = r"expected a JSON object, or the name of a file of one, got '.*'"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accelerator_config": "abc"}, rf"^accelerator_config: {NEEDED_FILE} \(No such file or directory\)$"),
        ({"accelerator_config": "{}/text.json"}, rf"^accelerator_config: {NEEDED_FILE} \(Expecting value\)$"),
        ({"accelerator_config": {"colour": 3}}, "^accelerator_config: .* 'colour'$"),
        ({"fsdp": True, "fsdp_config": "abc"}, rf"^fsdp_config: {NEEDED_FILE} \(No such file or directory\)$"),
        ({"report_to": ""}, "^report_to: expected none, all, or one or more of .*tensorboard.*; got ''$"),
        ({"report_to": ["tensorboard", "abc"]}, "^report_to: expected none, all, or .*; got 'abc'$"),
        ({"torch_compile_backend": "inductor"}, "leave it out, and torch_compile_backend and torch_compile_mode"),
        ({"warmup_steps": -3}, r"\bwarmup_steps\b"),
    ],
)
def test_the_error_says_what_is_expected(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    """They were errors of Python and of accelerate, such as ``abc: No such file or directory``."""
    (tmp_path / "text.json").write_text("no JSON")
    placed = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in settings.items()}
    error = refusal(tmp_path / "run", **placed)
    assert error is not None and re.search(words, error), error


@pytest.mark.parametrize(
    ("settings", "greater"),
    [
        ({}, None),
        ({"metric_for_best_model": "shuffled_similarity"}, False),
        ({"metric_for_best_model": "eval_shuffled_similarity"}, False),
        ({"metric_for_best_model": "eval_shuffled_similarity", "greater_is_better": True}, True),
        ({"metric_for_best_model": "matched_similarity"}, True),
        ({"metric_for_best_model": "jepa_loss"}, False),
    ],
)
def test_the_best_checkpoint_has_the_least_of_what_should_be_small(
    settings: dict[str, Any], greater: bool | None, tmp_path: Path
) -> None:
    config = RunConfig(output_dir=tmp_path, trainer={"use_cpu": True, **settings})
    assert training_arguments(config, has_eval=True).greater_is_better is greater


def test_the_shell_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train_file", "x.jsonl", "--model_name", "preset:tiny", "--use_cpu", "--output_dir", str(tmp_path / "a")]
    for name, value in {"accelerator_config": "abc", "report_to": ""}.items():
        assert main(["train", *flags, f"--{name}", value]) == 2
        assert re.match(rf"stepjepa train: error: (--)?{name}: expected .*\n$", capsys.readouterr().err)
