"""Soak: runs gone on from damaged checkpoints come to the weights of the undisturbed run, or say that none is whole.

The seed can be given (``SOAK_SEED``); the figures go to ``soak/resumes.json``, or into ``SOAK_FIGURES``.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tiny
from bad_inputs import attempt
from checkpoint_damage import drawn_damage
from soak_figures import SEED, note
from stepjepa.cli import main
from stepjepa.files import write_json

pytestmark = pytest.mark.slow

RUNS = 60
KINDS = {"regular": ["--regular"], "step-jepa": ["--step_jepa"], "streamed": ["--regular", "--streaming"]}


def train(material: Path, kind: str, run: Path) -> list[object]:
    names = ["--train_file", material / "data.jsonl", "--model_name", material / "base", "--output_dir", run]
    flags = ["--max_steps", 4, "--save_steps", 1, "--batch_size", 2, "--grad_accum", 1, "--report_to", "none"]
    return ["train", *names, *KINDS[kind], *flags, "--use_cpu", "--resume_from_checkpoint"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Path:
    """A model, data, and for each kind an undisturbed run, and what a kill after its third step had left of it."""
    folder = tmp_path_factory.mktemp("resumes")
    tiny.write_material(folder, trained_tokenizer)
    for kind in KINDS:
        whole, killed = folder / kind, folder / f"{kind}-killed"
        assert main([*map(str, train(folder, kind, whole)), "auto"]) == 0
        shutil.copytree(whole, killed)
        shutil.rmtree(killed / "checkpoint-4")
        shutil.rmtree(killed / "checkpoint-1")
        (killed / "model.safetensors").unlink()
        write_json(killed / "run.json", {**json.loads((whole / "run.json").read_text()), "status": "running"})
    return folder


def test_what_is_damaged_is_never_gone_on_from(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, met = random.Random(SEED), Counter[str]()
    for number in range(RUNS):
        kind, both = chance.choice(list(KINDS)), chance.random() < 0.2
        run, what = tmp_path / str(number), f"SOAK_SEED={SEED}, run {number}"
        shutil.copytree(material / f"{kind}-killed", run)
        drawn_damage(chance)(run / "checkpoint-3")
        if both:
            (run / "checkpoint-2" / "model.safetensors").unlink()
        tried = attempt(capsys, what, *train(material, kind, run), "last")
        if both:
            assert tried.outcome == "error", what
            assert "no whole checkpoint" in tried.err, what
            met["none whole, said so"] += 1
            continue
        assert tried.outcome == "sound", what
        found, expected = (load_file(folder / "model.safetensors") for folder in (run, material / kind))
        assert found.keys() == expected.keys(), what
        assert all((found[name] == expected[name]).all() for name in expected), what
        met[f"{kind}, weights equal"] += 1
        shutil.rmtree(run)
    note("resumes", {"runs": RUNS, **met})
    assert met["none whole, said so"] > 0
