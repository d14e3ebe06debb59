"""Job scripts and accelerate's configurations: what can be said of them without a cluster; and two processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
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
    return [[word for word in words[words.index("stepjepa") + 1 :] if word != "&"] for words in lines]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    # Behind the first command SLURM reads no more of its settings.
    assert max(m.start() for m in re.finditer(r"^#SBATCH", text, re.MULTILINE)) < text.index("set -euo pipefail")
    # Since SLURM 22.05, srun does not inherit the CPUs of a task.
    assert re.findall(r"^srun .*", text, re.MULTILINE) == re.findall(
        r'^srun --cpus-per-task "\$SLURM_CPUS_PER_TASK" .*', text, re.MULTILINE
    )
    result = commands(script)
    assert len(result) == 1
    name, *flags = result[0]
    with contextlib.chdir(ROOT):
        parsed = parse(name, normalise(flags))
        if name == "train":
            assert (parsed.run.trainer["save_strategy"], parsed.run.resume_from_checkpoint) == ("steps", "auto")


SRUN = """#!/bin/bash
trap 'echo stopped; kill $!; exit 9' TERM
echo begun
[ "$ENDS_WITH" = none ] || exit "$ENDS_WITH"
sleep 60 > /dev/null & wait
"""


@pytest.mark.parametrize("name", ["one-node.sh", "several-nodes.sh"])
@pytest.mark.parametrize("ends_with", ["none", "0", "3"])
def test_a_job_whose_time_is_up_is_queued_again(name: str, ends_with: str, tmp_path: Path) -> None:
    """SLURM does that by itself only for a failed node or a preemption; a run that fails is not run again."""
    for program, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho scontrol $*\n")):
        (tmp_path / program).write_text(text, encoding="utf-8")
        (tmp_path / program).chmod(0o755)
    given = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "a", "SLURM_JOB_NODELIST": "b[1-4]", "SLURM_NNODES": "4"}
    given |= {"SLURM_CPUS_PER_TASK": "8", "ENDS_WITH": ends_with, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "examples" / "slurm" / name)]
    with subprocess.Popen(command, env={**os.environ, **given}, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "begun\n"
        if ends_with == "none":
            job.send_signal(signal.SIGUSR1)
        output = job.stdout.read().splitlines()
    is_stopped = ends_with == "none"
    assert output == (["stopped", "scontrol requeue 17"] if is_stopped else [])
    assert is_stopped or job.returncode == int(ends_with)


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
    first = subprocess.run(launch, check=False, **options)
    assert first.returncode == 0, first.stderr
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
