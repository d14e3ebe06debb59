"""Job scripts and accelerate's configurations: what can be said of them without a cluster; and two processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import tiny
from stepjepa.cli import COMMANDS, normalise
from stepjepa.commands import parse
from stepjepa.commands.train import check
from stepjepa.files import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))
ACCELERATE = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))


def commands(script: Path) -> list[list[str]]:
    """What follows ``stepjepa`` on each line of a script."""
    text = re.sub(r"\\\n\s*", "", script.read_text(encoding="utf-8"))
    lines = [shlex.split(line) for line in text.splitlines() if re.search(r"^srun .*\bstepjepa\b", line)]
    return [words[words.index("stepjepa") + 1 :] for words in lines]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    # Behind the first command SLURM reads no more of its settings.
    assert max(m.start() for m in re.finditer(r"^#SBATCH", text, re.MULTILINE)) < text.index("set -euo pipefail")
    found = commands(script)
    assert len(found) == 1
    for name, *flags in found:
        assert name in COMMANDS
        with contextlib.chdir(ROOT):
            parsed = parse(name, normalise(flags))
            if name == "train":
                check(parsed)
                assert (parsed.training["save_strategy"], parsed.resume_from_checkpoint) == ("steps", "auto")


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda path: path.name)
def test_accelerate_reads_its_configurations(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    # A key that it does not know is an error.
    config = load_config_from_file(str(file))
    assert config.num_processes == yaml.safe_load(file.read_text(encoding="utf-8"))["num_processes"]
    assert f"--config_file examples/accelerate/{file.name} -m stepjepa train" in file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_two_processes_of_accelerate(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 5])
    flags = ["--train_file", "data.jsonl", "--model_name", "preset:tiny", "--use_cpu", "--max_steps", "2"]
    flags += ["--step_jepa", "--logging_steps", "1", "--save_strategy", "no", "--learning_rate", "0.01"]
    flags += ["--optim", "sgd"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(ROOT / "examples" / "accelerate" / "two-cpus.yaml"), "--main_process_port", "0", "-m"]
    for start, folder, batch in ((launcher, "two", "2"), ([sys.executable, "-m"], "one", "4")):
        more = ["--output_dir", folder, "--batch_size", batch, "--grad_accum", "2"]
        done = subprocess.run(
            [*start, "stepjepa", "train", *flags, *more],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    two, one = (json.loads((tmp_path / name / "run.json").read_text(encoding="utf-8")) for name in ("two", "one"))
    assert two["machine"]["processes"] == 2
    for name in ("lm_loss", "jepa_loss", "matched_similarity"):
        assert two["results"]["last_log"][name] == pytest.approx(one["results"]["last_log"][name], rel=1e-4), name
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("two", "one")]
    for name, value in weights[0].items():
        assert (value - weights[1][name]).abs().max() <= 1e-5, name
    # One process writes: one curve, one card.
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1
    assert (tmp_path / "two" / "README.md").is_file()
