"""What is asked of a cluster, by the names of submitit and of sbatch; what its queue says."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepjepa.errors import UserError
from stepjepa.experiments.cluster import CLUSTER, Cluster, queue, read_options

pytest.importorskip("submitit", reason="jobs are handed in through submitit, which is not installed")

TIMES = [("90", 90), ("90:30", 91), ("1:30:00", 90), ("1-12", 2160), ("1-12:30", 2190), ("0-00:00:01", 1)]


def test_options_go_by_the_names_of_submitit_and_of_sbatch() -> None:
    words = ["partition=gpu", "slurm_account=abc", "time=4:00:00", "mem_gb=3.5", "gpus-per-node=1", "name=grid"]
    words += ['setup=["module load cuda"]', "mem=7GB", "max_num_timeout=5", "stderr_to_stdout=true"]
    assert read_options(words) == {
        "slurm_partition": "gpu",
        "slurm_account": "abc",
        "timeout_min": 240,
        "mem_gb": 3.5,
        "gpus_per_node": 1,
        "name": "grid",
        "slurm_setup": ["module load cuda"],
        "slurm_mem": "7GB",
        "slurm_max_num_timeout": 5,
        "stderr_to_stdout": True,
    }
    # What srun no longer takes over from sbatch.
    assert read_options(["time=1", "cpus_per_task=3"])["slurm_srun_args"] == ["--cpus-per-task=3"]


@pytest.mark.parametrize(("text", "minutes"), TIMES)
def test_time_limits(text: str, minutes: int) -> None:
    for name in ("time", "timeout_min", "slurm_time"):
        assert read_options([f"{name}={text}"]) == {"timeout_min": minutes}


REFUSED = [
    ([], "name the time limit of one trial, as in --slurm time=4:00:00"),
    (["gpu"], "expected KEY=VALUE, got 'gpu'"),
    (["partitoin=a"], "submitit has no parameter 'partitoin'; did you mean partition?"),
    (["array_parallelism=3"], "array_parallelism is set by the sweep itself; leave it out; --jobs N says how many"),
    (["nodes=2"], "nodes is set by the sweep itself; leave it out"),
    (["time=1", "slurm_time=2"], "time is there twice"),
    (["time=later"], "a time limit is minutes or [DAYS-]HOURS:MINUTES:SECONDS, got 'later'"),
    (["time=0:00"], "a time limit of nothing"),
    (["time=1", "cpus_per_task=many"], "cpus_per_task needs a value of type int, got 'many'"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_is_refused_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_options(words)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--slurm: ")


def program(folder: Path, name: str, code: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stand for those of SLURM; what they were called with is in ``called``."""
    monkeypatch.delenv(CLUSTER, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("sbatch", "srun", "squeue", "scancel"):
        program(tmp_path, name, f'echo {name} "$@" >> {tmp_path}/called; echo "Submitted batch job 7"')
    return tmp_path


def test_jobs_are_an_array_with_what_was_asked_for(slurm: Path) -> None:
    cluster = Cluster(slurm / "jobs", read_options(["partition=gpu", "time=90", "cpus_per_task=3"]), 2)
    assert cluster.submit([dict, list, set]) == ["7_0", "7_1", "7_2"]
    script = (slurm / "jobs" / "7_submission.sh").read_text()
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"array=0-2%2", "partition=gpu", "time=90", "cpus-per-task=3", "job-name=stepjepa"} < asked
    assert " --cpus-per-task=3 " in script.splitlines()[-1]
    cluster.cancel(["7_0", "7_2"])
    assert (slurm / "called").read_text().splitlines()[-1] == "scancel 7_0 7_2"


def test_the_queue_is_asked_for_all_jobs_of_the_user_at_once(slurm: Path) -> None:
    program(slurm, "squeue", f'echo "$@" > {slurm}/asked; printf "7_0 RUNNING\\n7_1 PENDING\\n7_2 OUT_OF_MEMORY\\n"')
    cluster = Cluster(slurm / "jobs", read_options(["time=1"]))
    states = cluster.states(["7_0", "7_2", "7_3"])
    assert states == {"7_0": "RUNNING", "7_2": "OUT_OF_MEMORY"}
    assert [cluster.is_over(states.get(job)) for job in ("7_0", "7_2", "7_3")] == [False, True, True]
    asked = (slurm / "asked").read_text().split()
    assert asked == ["--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i", "%T"]
    program(slurm, "squeue", "echo 'slurm_load_jobs error:  timed out' >&2; exit 1")
    with pytest.raises(UserError, match=r"SLURM's queue can't be asked .slurm_load_jobs error: timed out.; the same"):
        queue()


def test_what_the_cluster_refuses_is_said_on_one_line(slurm: Path) -> None:
    program(slurm, "sbatch", "echo 'sbatch: error: invalid partition specified: gqu' >&2; exit 1")
    cluster = Cluster(slurm / "jobs", read_options(["partition=gqu", "time=1"]))
    with pytest.raises(UserError) as caught:
        cluster.submit([dict, list])
    assert str(caught.value) == (
        "the jobs were refused (sbatch: error: invalid partition specified: gqu); change --slurm, or --engine local "
        "runs them here"
    )


def test_no_slurm_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch here; start it where jobs are handed in, or use --engine local"):
        Cluster(tmp_path, read_options(["time=1"]))


def test_another_executor_must_be_one_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER, "nowhere")
    options: dict[str, Any] = read_options(["time=1"])
    with pytest.raises(UserError, match="doesn't know any executor named nowhere"):
        Cluster(tmp_path, options)


def test_no_file_of_the_folder_that_a_job_starts_in_takes_the_place_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLUSTER, "local")
    executor = Cluster(tmp_path / "jobs", read_options(["time=3", "max_num_timeout=5"]))._executor._executor
    for name in ("submitit", "pickle", "shlex"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit('hostile')\n")
    # What a script of sbatch would run; without a job it can only fail.
    command = shlex.split(executor._submitit_command_str)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "submitit" in done.stderr
    assert "hostile" not in done.stderr
    assert not (tmp_path / "ran").exists()
