"""Run folders that hold a run already: what is gone on with, what is left as it was, what is never replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import tiny
from stepjepa.cli import main
from stepjepa.files import write_json
from stepjepa.run_folder import METRICS_FILE, RUN_FILE, open_run_folder, read_run, save_whole

CARD = "README.md"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A model, data, and a finished run of two steps with a checkpoint at the second; not to be changed."""
    folder = tmp_path_factory.mktemp("begun")
    tiny.write_material(folder, trained_tokenizer)
    assert train(folder, folder / "run") == 0
    return folder


def train(material: Path, run: Path, *more: object) -> int:
    names = ["--train_file", material / "data.jsonl", "--model_name", material / "base", "--output_dir", run]
    flags = ["--max_steps", "2", "--save_steps", "2", "--batch_size", "2", "--grad_accum", "1", "--use_cpu"]
    return main([str(each) for each in ("train", *names, *flags, "--report_to", "none", *more)])


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_without_checkpoints_is_not_begun_again(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoint-2")
    before = contents(run)
    assert train(made, run, "--resume_from_checkpoint", "auto") == 0
    assert "the run is finished" in capsys.readouterr().err
    assert contents(run) == before
    assert train(made, run, "--resume_from_checkpoint", "auto", "--lbd", "0.7") == 2
    assert "begun with other settings (jepa, lbd)" in capsys.readouterr().err
    assert contents(run) == before


def test_a_finished_run_is_one_document_too(made: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train(made, run, "--resume_from_checkpoint", "auto", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "finished"
    assert told["results"]["steps"] == 2


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(made: Path, run: Path) -> None:
    shutil.rmtree(run / "checkpoint-2")
    write_json(run / RUN_FILE, {**read_run(run), "status": "running", "launches": [{"seconds": 9.0, "to_step": 1}]})
    assert train(made, run, "--resume_from_checkpoint", "auto") == 0
    assert read_run(run)["status"] == "finished"
    assert len(read_run(run)["launches"]) == 1
    steps = [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_launch_that_trains_nothing_leaves_the_record_as_it_was(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(
        {"other": tiny.make_model("llama").lm_head.weight[:3].clone()}, run / "checkpoint-2" / "model.safetensors"
    )
    before = (run / RUN_FILE).read_bytes()
    assert train(made, run, "--resume_from_checkpoint", "last", "--max_steps", "4") == 2
    assert "checkpoint-2" in capsys.readouterr().err
    assert (run / RUN_FILE).read_bytes() == before
    # Without a record before it, the folder is free for the next try; what a kill left of one is nothing.
    fresh = run.parent / "fresh"
    assert train(made, fresh, "--optim", "adamw_apex_fused") == 2
    assert not fresh.exists()
    fresh.mkdir()
    (fresh / f".{RUN_FILE}.x7").write_text("{")
    assert open_run_folder(str(fresh), None) == (fresh, None)


def test_a_card_of_ones_own_outlives_a_longer_run(made: Path, run: Path) -> None:
    (run / CARD).write_text("# Mine\n")
    assert train(made, run, "--resume_from_checkpoint", "last", "--max_steps", "3") == 0
    assert read_run(run)["results"]["steps"] == 3
    assert (run / CARD).read_text() == "# Mine\n"


def test_a_folder_in_a_model_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """As the templates that stand beside some tokenizers."""

    def save(names: str) -> None:
        def write(part: str) -> None:
            (Path(part) / "templates").mkdir()
            for name in names:
                (Path(part) / "templates" / name).write_text(name)

        save_whole(tmp_path, write)

    save("ab")
    save("bc")
    assert contents(tmp_path) == {"templates/b": b"b", "templates/c": b"c"}
