"""``stepjepa rerun``: the same weights again, and a word about whatever is no longer the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import tiny
from stepjepa.base.files import fingerprint, locked, write_json, write_jsonl
from stepjepa.cli.flags import settings_of_earlier_run
from stepjepa.cli.main import main
from stepjepa.running.repeat import recorded_settings
from stepjepa.store.record import read_run
from stepjepa.training.trainer import JepaTrainer
from stepjepa.views.layouts import LAYOUTS


@pytest.fixture(autouse=True)
def no_layout_stays() -> Iterator[None]:
    """Modules of a user that a repetition loads register layouts; other tests know none of them."""
    before = dict(LAYOUTS)
    yield
    LAYOUTS.clear()
    LAYOUTS.update(before)
    sys.modules.pop("own_layout", None)


def messages(count: int = 7) -> list[dict[str, Any]]:
    return [{"messages": list(record.messages)} for record in (tiny.records() * count)[:count]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with relative paths and some flags in a file; not to be changed."""
    place = tmp_path_factory.mktemp("rerun")
    write_jsonl(place / "data.jsonl", messages())
    write_jsonl(place / "held_out.jsonl", messages(3))
    (place / "flags.yaml").write_text("model_name: preset:tiny\nstep_jepa: true\nmax_steps: 3\nlbd: 0.3\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        files = ["--train_file", "data.jsonl", "--eval_file", "held_out.jsonl", "--output_dir", "run"]
        flags = [
            "--config",
            "flags.yaml",
            "--lbd",
            "0.5",
            "--use_cpu",
            "--batch_size",
            "2",
            "--grad_accum",
            "1",
            "--jepa_ratio",
            "0.5",
        ]
        assert main(["train", *files, *flags]) == 0
    return place


def changed(folder: Path, tmp_path: Path, settings: dict[str, Any] | None = None, **values: Any) -> Path:
    """A folder whose run.yaml or run.json differs in some values; the paths in it still lead to the data."""
    run, config = read_run(folder / "run"), yaml.safe_load((folder / "run" / "run.yaml").read_text())
    write_json(tmp_path / "run" / "run.json", {**run, **values})
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump({**config, **(settings or {})}))
    return tmp_path / "run"


def test_a_checkpoint_that_another_process_is_writing_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    run, new = tmp_path / "run", tmp_path / "again"
    part = new / ".saving" / "checkpoint-1" / "model.safetensors"
    part.parent.mkdir(parents=True)
    part.touch()
    for folder in (run, new):
        write_json(folder / "run.json", {})
    with locked(new):
        assert main(["rerun", str(run), "--output_dir", str(new), "--resume_from_checkpoint", "auto"]) == 2
    assert f"{new}: is in use by process" in capsys.readouterr().err
    assert part.exists()


def of_first_edition(place: Path, arguments: list[Any]) -> Path:
    """The folder as 0.2.0 left it: arguments in run.json, and no run.yaml."""
    (place / "run.yaml").unlink()
    write_json(place / "run.json", {**read_run(place), "arguments": arguments})
    return place


@pytest.mark.slow
def test_a_stopped_repetition_is_resumed_as_its_message_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_step, steps = JepaTrainer.training_step, []

    def stopped(self: JepaTrainer, *arguments: Any, **more: Any) -> Any:
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, *arguments, **more)

    monkeypatch.setattr(JepaTrainer, "training_step", stopped)
    rerun = ["rerun", str(folder / "run"), "--output_dir", str(tmp_path / "again")]
    assert main(rerun) == 128 + signal.SIGTERM
    assert "checkpoint-2 is saved; resume with --resume_from_checkpoint last" in capsys.readouterr().err
    assert main(rerun) == 2
    assert "is not empty; name another --output_dir, or pass --resume_from_checkpoint last" in capsys.readouterr().err
    assert main([*rerun, "--resume_from_checkpoint", "last"]) == 0
    assert f"weights: equal to those of {folder / 'run'}, bit for bit\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_weights_are_the_same_bit_for_bit_from_anywhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What has been resolved counts, not the file of flags as it is now.
    (folder / "flags.yaml").write_text("max_steps: 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", str(folder / "run"), "--output_dir", "again"]) == 0
    out = capsys.readouterr().out
    assert f"weights: equal to those of {folder / 'run'}, bit for bit\n" in out
    assert "note:" not in out
    assert Path.cwd() == tmp_path
    first, second = (load_file(place / "model.safetensors") for place in (folder / "run", tmp_path / "again"))
    assert {name: value.tolist() for name, value in first.items()} == {k: v.tolist() for k, v in second.items()}
    before, after = read_run(folder / "run"), read_run("again")
    for name in ("directory", "jepa", "data", "order", "machine", "model_fingerprint", "versions"):
        assert before[name] == after[name], name
    assert (before["jepa"]["lbd"], before["order"]["seed"], before["training"]["max_steps"]) == (0.5, 42, 3)
    assert before["command"][:3] == ["train", "--train_file", "data.jsonl"]
    assert "--config" in before["command"]
    first, second = (yaml.safe_load((place / "run.yaml").read_text()) for place in (folder / "run", tmp_path / "again"))
    # What has other values: paths are absolute, and nothing is reported.
    files = {name: str(folder / first[name]) for name in ("train_file", "eval_file")}
    silent = {"output_dir": str(tmp_path / "again"), "report_to": "none", "push_to_hub": False}
    assert {**first, **files, **silent} == second
    assert (first["mode"], first["lbd"], first["jepa_ratio"], first["use_cpu"]) == ("step-jepa", 0.5, 0.5, True)
    assert not first.keys() & {"config", "resume_from_checkpoint", "step_jepa"}
    assert before["data"]["train"]["sha256"] == fingerprint(folder / "data.jsonl")
    # A second time there is something in the folder.
    assert main(["rerun", str(folder / "run"), "--output_dir", "again"]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_resumed_with_other_settings_is_repeated_with_the_last_ones_and_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train = ["train", "--model_name", "preset:tiny", "--train_file", str(folder / "data.jsonl"), "--output_dir", "run"]
    train += ["--use_cpu", "--lr_scheduler_type", "constant", "--save_steps", "1"]
    assert main([*train, "--max_steps", "1", "--batch_size", "2", "--grad_accum", "2"]) == 0
    resume = ["--resume_from_checkpoint", "last", "--batch_size", "2", "--grad_accum", "2"]
    assert main([*train, *resume, "--max_steps", "2", "--learning_rate", "0.01", "--neftune_noise_alpha", "3"]) == 0
    capsys.readouterr()
    assert main(["rerun", "run"]) == 0
    message = capsys.readouterr()
    change = "resumed at step 1 with another learning_rate: 2e-05 -> 0.01"
    assert f"note: the run was {change}; the run was resumed at step 1 with another neftune_noise_alpha" in message.out
    assert "it is repeated with the settings of its last launch\n" in message.out
    assert f"weights: differ from those of {tmp_path / 'run'}: the run was {change}; " in message.err
    assert read_run("run-rerun")["training"]["learning_rate"] == 0.01


def test_a_changed_file_is_noticed_and_then_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "other.jsonl", messages(6))
    flags = ["rerun", str(folder / "run"), "--train_file", str(tmp_path / "other.jsonl"), "--output_dir"]
    assert main([*flags, str(tmp_path / "a")]) == 2
    assert f"{tmp_path / 'other.jsonl'} has changed since; restore what it was" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*flags, str(tmp_path / "a"), "--allow_changes"]) == 0
    message = capsys.readouterr()
    assert f"note: {tmp_path / 'other.jsonl'} has changed since\n" in message.out
    assert "weights: differ from those of" in message.err


@pytest.mark.parametrize("flag", ["--eval_accuracy", "--eval_accuracy=True"])
def test_a_moved_file_that_the_published_flag_splits(
    flag: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"data": {"file": "gone.jsonl", "sha256": "0"}}
    arguments = ["--model_name=preset:tiny", "--use_cpu", "--max_steps=1", "--train_file=gone.jsonl", flag]
    place = of_first_edition(changed(folder, tmp_path, data=data), arguments)
    assert main(["rerun", str(place), "--data_file", str(folder / "data.jsonl")]) == 2
    assert f"{folder / 'data.jsonl'} has changed since" in capsys.readouterr().err


def test_a_file_is_split_again_as_it_was(folder: Path, tmp_path: Path) -> None:
    """Earlier versions split a file by record, whatever it asks, and had no setting for that."""
    split = {"data_file": "data.jsonl", "train_file": None, "eval_file": None}
    place = changed(folder, tmp_path, split)
    assert recorded_settings(place / "run.yaml", trusted=True)["split_by"] == "record"
    place = changed(folder, tmp_path, {**split, "split_by": "question"})
    assert recorded_settings(place / "run.yaml", trusted=True)["split_by"] == "question"
    assert "split_by" not in recorded_settings(folder / "run" / "run.yaml", trusted=True)
    for arguments, rule in ((["--data_file", "a"], "record"), (["--train_file", "a"], None)):
        assert settings_of_earlier_run(arguments, {"mode": "regular"}).get("split_by") == rule


def test_a_missing_file_and_other_versions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = read_run(folder / "run")
    place = changed(
        folder,
        tmp_path,
        directory=str(tmp_path / "gone"),
        versions={**old["versions"], "torch": "2.0.1"},
        machine={**old["machine"], "threads": 61},
        status="running",
    )
    monkeypatch.chdir(tmp_path)
    assert main(["rerun", str(place)]) == 2
    assert "data.jsonl: no such file; pass --train_file with where it is now" in capsys.readouterr().err
    now = ["--train_file", str(folder / "data.jsonl"), "--eval_file", str(folder / "held_out.jsonl")]
    assert main(["rerun", str(place), *now]) == 0
    out = capsys.readouterr().out
    assert "note: torch was 2.0.1 and is " in out
    assert "note: threads was 61 and is " in out
    assert "holds no weights of a finished run" in out
    assert fingerprint(f"{place}-rerun/model.safetensors") == fingerprint(folder / "run" / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"machine": {"processes": 5, "threads": 1, "device": "cpu"}}, "the run had 5 processes"),
        ({"settings": {"trust_remote_code": True}}, "--trust_remote_code 'True', which runs code"),
        ({"settings": {"eval_generate": 2, "eval_task": "some:Task"}}, "the run had --eval_task 'some:Task', which"),
        ({"settings": {"model_name": "somebody/model", "term": ["a:B"]}}, "--model_name 'somebody/model', --term '["),
        ({"settings": {"layout": "own_layout:nothing"}}, "the run had --layout 'own_layout:nothing', which runs code"),
        ({"settings": {"attn_implementation": "some/kernel"}}, "--attn_implementation 'some/kernel', which"),
        ({"settings": {"train_dataset": {"records": 5, "sha256": "0"}}}, "pass train_dataset= to stepjepa.run again"),
    ],
)
def test_what_is_refused(
    values: dict[str, Any], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = changed(folder, tmp_path, **values)
    assert main(["rerun", str(place)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not Path(f"{place}-rerun").exists()


@pytest.mark.parametrize("values", [{"data": {"train": 5}}, {"data": {"tests": {}}}, {"machine": None}])
def test_a_damaged_record_is_one_line(
    values: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rerun", str(changed(folder, tmp_path, **values))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run.json: is damaged" in line


ARGUMENTS = ["--train_file", "data.jsonl", "--model_name", "preset:tiny", "--use_cpu", "--max_steps", "1"]


def test_the_objective_of_a_run_of_the_first_edition_is_that_of_its_record(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments name no loss, and their default was InfoNCE."""
    before = read_run(folder / "run")
    jepa = {**before["jepa"], "mode": "llm-jepa", "layout": "separate", "jepa_loss_type": "infonce"}
    place = changed(folder, tmp_path, jepa=jepa, data={"train": before["data"]["train"]}, status="running")
    of_first_edition(place, [*ARGUMENTS, "--infonce_temperature", "0.07", "--regular", "--allow_changes"])
    assert main(["rerun", str(place)]) == 0
    after = read_run(f"{place}-rerun")
    assert after["jepa"] == jepa
    assert after["training"]["max_steps"] == 1
    # Its objective may come from a stranger, too.
    of_first_edition(changed(folder, tmp_path, jepa={**jepa, "layout": "own_layout:nothing"}), ARGUMENTS)
    assert main(["rerun", str(place), "--output_dir", str(tmp_path / "other")]) == 2
    assert "the run had --layout 'own_layout:nothing', which runs code" in capsys.readouterr().err
    of_first_edition(changed(folder, tmp_path), ["--lora", 3])
    assert main(["rerun", str(place), "--output_dir", str(tmp_path / "other")]) == 2
    assert "holds no 'arguments'" in capsys.readouterr().err


def test_the_configuration_of_a_run_folder_trains_it_again_from_anywhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["train", "--config", str(folder / "run" / "run.yaml"), "--output_dir", "again"]
    assert main(flags) == 0
    assert fingerprint("again/model.safetensors") == fingerprint(folder / "run" / "model.safetensors")
    # Without a folder of its own it would begin in the old one.
    assert main(flags[:-2]) == 2
    assert "are required: --output_dir" in capsys.readouterr().err
    # It may come from a stranger.
    place = changed(folder, tmp_path, {"layout": "own_layout:nothing"})
    flags = ["train", "--config", str(place / "run.yaml"), "--output_dir", "other"]
    assert main(flags) == 2
    assert "the run had --layout 'own_layout:nothing', which runs code of others; pass --trust_folder" in (
        capsys.readouterr().err
    )
    assert main([*flags, "--trust_folder"]) == 2
    assert "can't load 'own_layout:nothing'" in capsys.readouterr().err
    named = ["--train_file", "a", "--model_name", "m", "--output_dir", "o"]
    assert main(["train", *named, "--trust_folder"]) == 2
    assert "--trust_folder does nothing without --config" in capsys.readouterr().err
