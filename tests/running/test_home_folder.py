"""A path that begins with ``~`` is in the home folder, wherever it is named; no folder is ever called ``~``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stepjepa
import tiny
from stepjepa import Jepa, JepaTrainer, Run, RunConfig, UserError, run
from stepjepa.base.arguments import expanded
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import COMMANDS, load
from stepjepa.cli.main import main
from stepjepa.config.option import Option, options_of
from stepjepa.config.run import OPTIONS
from stepjepa.evaluation.settings import EvaluationSettings
from stepjepa.preparing.files import NlRxSettings, SourceSettings, StepmathSettings

TRAINER = {"max_steps": 1, "use_cpu": True, "save_strategy": "no", "report_to": "none"}

OF_RUNS = [setting for setting in OPTIONS if setting.about.get("path")]
PREPARING = tuple((kind, "") for kind in (SourceSettings, StepmathSettings, NlRxSettings))
OF_COMMANDS = [
    (name, setting)
    for name in COMMANDS
    for flags, _ in (*load(name).flags, *PREPARING * (name == "prepare"))
    for setting in options_of(flags)
    if str(setting.about.get("metavar")).partition(".")[0] in ("FILE", "DIR", "RUN", "PATH")
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with records, and another working directory."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    rows = [{"messages": list(record.messages)} for record in tiny.records() * 5]
    write_jsonl(tmp_path / "home" / "data.jsonl", rows)
    return tmp_path / "home"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def config_of(**values: Any) -> RunConfig:
    return RunConfig(**{"model_name": "preset:tiny", "train_file": "~/data.jsonl", "trainer": TRAINER, **values})


def test_a_run_in_the_home_folder_is_not_overwritten(home: Path) -> None:
    run(config_of(output_dir="~/runs/b", no_cache=True))
    before = contents(home)
    assert "runs/b/run.json" in before
    for folder in ("~/runs/b", Path("~/runs/b")):
        with pytest.raises(UserError, match="is not empty"):
            run(config_of(output_dir=folder, no_cache=True))
    assigned = config_of(output_dir="runs/c", no_cache=True)
    assigned.output_dir = "~/runs/b"
    with pytest.raises(UserError, match="is not empty"):
        run(assigned)
    assert contents(home) == before
    assert not any(Path.cwd().iterdir())


@pytest.mark.parametrize("setting", OF_RUNS, ids=[setting.name for setting in OF_RUNS])
def test_every_path_of_a_run_may_begin_with_a_tilde(setting: Option, home: Path) -> None:
    def value(path: str) -> Any:
        return [path] if setting.several else path

    more = {"eval_generate": 3, "eval_file": "b"} if setting.name == "spider_path" else {}
    config = RunConfig(**{**more, setting.name: value("~/a")})
    assert getattr(config, setting.name) == value(str(home / "a"))
    assert RunConfig.from_flat(config.to_flat(launch=True)) == config
    # A name that is no path, and that of no user's home, stay as they are.
    other = value("~no-such-user/a")
    assert getattr(RunConfig(**{**more, setting.name: other}), setting.name) == other


@pytest.mark.parametrize("setting", OF_COMMANDS, ids=[f"{name}-{setting.name}" for name, setting in OF_COMMANDS])
def test_every_flag_of_a_path_may_begin_with_a_tilde(setting: tuple[str, Option], home: Path) -> None:
    assert setting[1].read("~/a") == str(home / "a")


def test_settings_of_an_evaluation_are_in_the_home_folder(home: Path) -> None:
    paths = {"model_path": "~/m", "test_file": "~/t.jsonl", "output_file": Path("~/o.jsonl"), "linear_map": "~/l.jsonl"}
    settings = EvaluationSettings.from_flat({**paths, "retrieval": True, "spider_path": "~/s"})
    assert [getattr(settings, name) for name in paths] == [expanded(path) for path in paths.values()]
    assert settings.task_options.spider_path == str(home / "s")
    assert expanded("~/m") == str(home / "m")


def test_no_folder_is_called_tilde(home: Path, trained_tokenizer: Any) -> None:
    trained = run(config_of(output_dir="~/a", cache_dir="~/cache", dataset=["~/data.jsonl"], train_file=None))
    assert trained.folder == home / "a" and any((home / "cache").glob("*.arrow"))
    assert Run("~/a").config == RunConfig.read("~/a/run.yaml")
    Run("~/a").evaluate("~/data.jsonl", output_file="~/answers.jsonl", max_examples=2, max_new_tokens=2)
    stepjepa.evaluate("~/a", "~/data.jsonl", max_examples=2, max_new_tokens=2)
    assert (home / "answers.summary.json").is_file() and (home / "a" / "data.jsonl").is_file()
    jepa = Jepa.from_pretrained("~/a")
    assert jepa.config.mode == trained.config.jepa.mode
    jepa.save("~/copy")
    assert len(stepjepa.read_records("~/data.jsonl")) == len(tiny.records()) * 5
    # The run is read.
    with pytest.raises(UserError, match="differ in nothing but their seeds"):
        stepjepa.compare(["~/a"], evaluation="data")
    args = tiny.arguments(home / "t", max_steps=1)
    trainer = JepaTrainer("~/copy", args, train_dataset="~/data.jsonl")
    assert trainer.passed.model == str(home / "copy")
    trainer.save_model("~/saved")
    assert (home / "saved" / "model.safetensors").is_file()
    stepjepa.prepare("~/data.jsonl", jepa.tokenizer, jepa.config, cache_dir="~/prepared", say=lambda line: None)
    assert any((home / "prepared").iterdir())
    assert not any(Path.cwd().iterdir())


def test_flags_with_an_equals_sign_are_in_the_home_folder(home: Path) -> None:
    """A shell leaves the ``~`` of ``--output_file=~/t.jsonl`` as it is."""
    (home / "grid.yaml").write_text("model_name: preset:tiny\ntrain_file: ~/data.jsonl\n")
    flags = ["--max_steps=1", "--use_cpu", "--save_strategy=no", "--report_to=none", "--no_cache"]
    assert main(["train", "--config=~/grid.yaml", "--output_dir=~/a", *flags]) == 0
    few = ["--max_examples=2", "--max_new_tokens=2"]
    answers = ["--test_file=~/data.jsonl", "--output_file=~/t.jsonl"]
    assert main(["evaluate", "--model_path=~/a", *answers, *few]) == 0
    assert (home / "a" / "run.json").is_file() and (home / "t.summary.json").is_file()
    assert not any(Path.cwd().iterdir())
