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
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import tiny
from stepjepa.base.files import write_jsonl
from stepjepa.cli.commands import parse
from stepjepa.cli.main import main, normalise
from stepjepa.store.record import read_record
from stepjepa.study.comparison import compare

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
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    # Behind the first command SLURM reads no more of its settings.
    assert max(m.start() for m in re.finditer(r"^#SBATCH", text, re.MULTILINE)) < text.index("set -euo pipefail")
    result = commands(script)
    assert len(result) == 1
    name, *flags = result[0]
    with contextlib.chdir(ROOT):
        parsed = parse(name, normalise(flags))
        if name == "train":
            assert (parsed.run.trainer["save_strategy"], parsed.run.resume_from_checkpoint) == ("steps", "auto")


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
        command = [
            *start,
            "stepjepa",
            "train",
            *flags,
            "--output_dir",
            folder,
            "--batch_size",
            batch,
            "--grad_accum",
            "2",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=400, check=True)
    assert json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))["machine"]["processes"] == 2
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("two", "one")]
    for name, value in weights[0].items():
        assert (value - weights[1][name]).abs().max() <= 1e-5, name
    # One process writes: one curve, one card.
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1


SCRIPT = """
from transformers import TrainingArguments
from stepjepa import JepaConfig, JepaTrainer

fixed = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", "seed": 7}
trainer = JepaTrainer("preset:tiny", TrainingArguments("jepa", **fixed), JepaConfig(), train_dataset="data.jsonl")
trainer.train()
"""


@pytest.mark.slow
def test_a_script_that_accelerate_launches_writes_a_run_that_compare_reads(tmp_path: Path) -> None:
    """A trainer in two processes, compared with a run of the command line; a second launch is refused by both."""
    write_jsonl(tmp_path / "data.jsonl", [{"messages": list(record.messages)} for record in tiny.records() * 5])
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [str(ROOT / "examples" / "accelerate" / "two-cpus.yaml"), "--main_process_port", "0", "script.py"]
    environment: Any = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "timeout": 400, "text": True}
    subprocess.run(launch, check=True, **options)
    record = read_record(tmp_path / "jepa")
    assert (record.status, record.machine["processes"], record.launches[0].to_step) == ("finished", 2, 2)
    with contextlib.chdir(tmp_path):
        train = "train --train_file data.jsonl --model_name preset:tiny --regular --max_steps 2 --batch_size 4"
        assert main([*train.split(), "--grad_accum", "1", "--seed", "7", "--use_cpu", "--output_dir", "plain"]) == 0
        for name in ("jepa", "plain"):
            evaluate = ["evaluate", "--model_path", name, "--test_file", "data.jsonl", "--max_new_tokens", "3"]
            assert main([*evaluate, "--output_file", f"{name}/test.jsonl"]) == 0
        compared = compare(["jepa", "plain"])
    assert {arm.settings["mode"] for arm in compared.arms} == {"llm-jepa", "regular"}
    again = subprocess.run(launch, check=False, **options)
    assert again.returncode != 0
    assert again.stderr.count("UserError: jepa: holds the record of a run; ") == 2
    assert "Connection" not in again.stderr
