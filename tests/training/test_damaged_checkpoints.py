"""Checkpoints whose files are whole and hold something else: said in one line, and nothing is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from stepjepa.base.files import write_json
from stepjepa.cli.main import main

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A folder with a model, data, and a run that was ended after two of its three steps."""
    folder = tmp_path_factory.mktemp("damaged")
    tiny.write_material(folder, trained_tokenizer)
    assert main(given(folder, folder / "whole", "--save_steps", "1")) == 0
    end_early(folder / "whole")
    return folder


def end_early(folder: Path) -> None:
    """Leave a finished run as one that was killed in its third step, and without checksums, which would tell first."""
    shutil.rmtree(folder / "checkpoint-3")
    for file in folder.glob("checkpoint-*/checksums.json"):
        file.unlink()
    write_json(folder / "run.json", {**json.loads((folder / "run.json").read_text()), "status": "running"})


def given(folder: Path, target: Path, *more: str) -> list[str]:
    """A command line."""
    flags = ["--max_steps", "3", "--regular", "--batch_size", "2", "--grad_accum", "1", "--use_cpu"]
    names = ["--train_file", folder / "data.jsonl", "--model_name", folder / "base", "--output_dir", target]
    return list(map(str, ["train", *names, *flags, *more]))


def weights(change: Callable[[dict[str, torch.Tensor]], Any], file: str = WEIGHTS) -> Callable[[Path], None]:
    """Other tensors in the place of the weights."""

    def apply(folder: Path) -> None:
        result = load_file(folder / file)
        change(result)
        save_file(result, folder / file, metadata={"format": "pt"})

    return apply


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a weight is missing": weights(lambda tensors: tensors.pop(min(tensors))),
    "a weight is too many": weights(lambda tensors: tensors.update(other=torch.ones(3))),
    "random numbers that are none": lambda folder: torch.save({}, folder / "rng_state.pth"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DAMAGES)
def test_what_can_not_be_loaded_is_said_in_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "whole", tmp_path / "run")
    DAMAGES[name](tmp_path / "run" / "checkpoint-2")
    line = given(run, tmp_path / "run", "--save_steps", "1", "--resume_from_checkpoint", "last")
    capsys.readouterr()
    assert main(line) == 2
    output = capsys.readouterr().err.strip()
    assert len([each for each in output.splitlines() if "error: " in each]) == 1, output
    assert "Traceback" not in output
    assert f"{tmp_path}/run/checkpoint-2" in output, output
    if name == "a weight is missing":
        # What it tells to do: the checkpoint out of the way, and on from the one before it, to the same weights.
        (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "elsewhere")
        assert main(line) == 0
        ours, theirs = (load_file(folder / WEIGHTS) for folder in (tmp_path / "run", run / "whole"))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_an_adapter_that_lacks_a_weight_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT alone would go on from zeros in its place."""
    line = given(run, tmp_path / "run", "--lora", "--lora_rank", "3", "--save_steps", "1")
    assert main(line) == 0
    end_early(tmp_path / "run")
    weights(lambda tensors: tensors.pop(max(tensors)), "adapter_model.safetensors")(tmp_path / "run" / "checkpoint-2")
    capsys.readouterr()
    assert main([*line, "--resume_from_checkpoint", "last"]) == 2
    assert "its weights are those of another adapter: " in capsys.readouterr().err
